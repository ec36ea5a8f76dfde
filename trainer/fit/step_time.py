"""The time of a compiled program on one device, from its schedule and the chip's rates.

Each instruction takes as long as its operations at the peak rate, or its bytes at HBM's bandwidth if that is longer. A
transfer runs from its start until an instruction needs it. `slices` multiplies the parts by calibrated factors.
"""

import math
from dataclasses import dataclass, fields

from conf.schema.topology import Topology, tpu_type_table
from trainer.fit import work
from trainer.fit.schedule import Body, Instruction, Module, Transfer, calls, find_transfer, group_size

TORUS = {"v5e": 16, "v6e": 16}
"""Chips of an axis from which its ends are connected, where that is not 4."""


@dataclass(frozen=True)
class Rates:
    """What one device does per second.

    Attributes:
        link_bytes: on one link in one direction.
        axis_links: links of each axis of the slice that a collective can use at a time: two, or one without a torus.
    """

    flops: float
    hbm_bytes: float
    link_bytes: float
    axis_links: tuple[int, ...]
    num_devices: int


@dataclass(frozen=True)
class StepTime:
    """Seconds by cause.

    Attributes:
        products: of instructions with matrix products; kernels: of attention's; other: of the rest.
        waiting: for collectives that nothing overlaps; transfer: of all collectives.
    """

    products: float = 0.0
    kernels: float = 0.0
    other: float = 0.0
    waiting: float = 0.0
    transfer: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.kernels + self.other + self.waiting

    def __add__(self, more: "StepTime") -> "StepTime":
        return StepTime(*(getattr(self, f.name) + getattr(more, f.name) for f in fields(self)))

    def times(self, count: float) -> "StepTime":
        return StepTime(*(count * getattr(self, f.name) for f in fields(self)))


def device_rates(slice_: Topology) -> Rates:
    """Return the rates of a slice's devices; a chip of two devices shares its memory and links."""
    facts = tpu_type_table()["generations"][slice_.generation]
    per_chip = slice_.devices // slice_.chips
    shape = [int(n) for n in (slice_.shape or "1").split("x")]
    torus = TORUS.get(slice_.generation, 4)
    num_axes = 2 if slice_.generation in ("v2", "v3", "v5e", "v6e") else 3
    return Rates(
        flops=facts["bf16_flops_per_chip"] / per_chip,
        hbm_bytes=facts["hbm_bytes_per_second"] / per_chip,
        link_bytes=facts["ici_bytes_per_second"] / (2 * num_axes) / per_chip,
        axis_links=tuple(2 if n % torus == 0 else 1 for n in shape if n > 1) or (1,),
        num_devices=slice_.devices,
    )


def step_time(module: Module, rates: Rates) -> StepTime:
    """Return the time of one execution."""
    return _time_of(module, module.entry, rates)


def _time_of(module: Module, name: str, rates: Rates) -> StepTime:
    """Walk a computation in its scheduled order."""
    body = module.computations[name]
    total, links_free, ready = StepTime(), 0.0, dict[str, float]()
    for instruction in body.values():
        now, transfer = total.total, find_transfer(module, instruction, body)
        if inner := [_time_of(module, called, rates).times(turns) for called, turns in calls(module, instruction)]:
            total += max(inner, key=lambda t: t.total)
        elif transfer is None or transfer.part == "step":
            total += _own_time(module, instruction, body, rates)
        elif transfer.part == "done":
            total += StepTime(waiting=max(0.0, ready.pop(transfer.key, now) - now))
        else:
            seconds = transfer_seconds(transfer, rates)
            links_free = max(now, links_free) + seconds
            ready[transfer.key] = links_free
            total += StepTime(transfer=seconds, waiting=links_free - now if transfer.part == "all" else 0.0)
    return total


def _own_time(module: Module, instruction: Instruction, body: Body, rates: Rates) -> StepTime:
    memory = work.hbm_bytes(module, instruction, body) / rates.hbm_bytes
    if flops := work.product_flops(module, instruction, body):
        return StepTime(products=max(flops / rates.flops, memory))
    return StepTime(kernels=work.kernel_flops(instruction, body) / rates.flops, other=memory)


def transfer_seconds(transfer: Transfer, rates: Rates) -> float:
    """Return a collective's time. A group that is part of the slice uses the links of its share of the axes."""
    sent = work.sent_bytes(transfer.kind, transfer.instruction, transfer.body)
    if transfer.kind == "collective-permute":  # a loop over products sends in both directions of one axis at a time
        return sent / (2 * rates.link_bytes)
    size = group_size(transfer.instruction)
    share = math.log(size) / math.log(max(size, rates.num_devices)) if size > 1 else 1.0
    return sent / (rates.link_bytes * max(1.0, share * sum(rates.axis_links)))
