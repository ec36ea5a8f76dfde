"""The time of a compiled program on one device, from its schedule and the chip's rates.

Each instruction takes as long as its operations at the peak rate, or its bytes at HBM's bandwidth if that is longer. A
transfer runs from its start until an instruction needs it. `slices` multiplies the parts by calibrated factors.
"""

import math
import re
from dataclasses import dataclass, fields

from conf.schema.topology import Topology, tpu_type_table
from trainer.fit.schedule import (
    Body,
    Instruction,
    Module,
    Transfer,
    calls,
    find_transfer,
    group_size,
    num_bytes,
    shapes,
)

TORUS = {"v5e": 16, "v6e": 16}
"""Chips of an axis from which its ends are connected, where that is not 4."""
FREE = frozenset(
    ["parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy-start", "copy-done", "slice-start",
     "slice-done", "after-all", "partition-id", "replica-id", "iota", "async-start", "async-done", "opt-barrier"]
)  # fmt: skip
"""Instructions that take no time of the TensorCore; copies between HBM and VMEM run beside it."""
KERNEL_PRODUCTS = {"dkv": 4, "dq": 3, "fwd": 2}
"""Products of one [T, S] matrix in splash attention's kernels, by a part of the kernel's name; one more in a `dkv` that
also computes the gradient of the queries."""


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


def has_rates(slice_: Topology) -> bool:
    """Return whether the table knows how fast a slice's chips are."""
    facts = tpu_type_table()["generations"][slice_.generation]
    return None not in (facts[key] for key in ("bf16_flops_per_chip", "hbm_bytes_per_second", "ici_bytes_per_second"))


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
    memory = hbm_bytes(module, instruction, body) / rates.hbm_bytes
    if flops := product_flops(module, instruction, body):
        return StepTime(products=max(flops / rates.flops, memory))
    return StepTime(kernels=kernel_flops(instruction, body) / rates.flops, other=memory)


def transfer_seconds(transfer: Transfer, rates: Rates) -> float:
    """Return a collective's time. A group that is part of the slice uses the links of its share of the axes."""
    sent = sent_bytes(transfer.kind, transfer.instruction, transfer.body)
    if transfer.kind == "collective-permute":  # a loop over products sends in both directions of one axis at a time
        return sent / (2 * rates.link_bytes)
    size = group_size(transfer.instruction)
    share = math.log(size) / math.log(max(size, rates.num_devices)) if size > 1 else 1.0
    return sent / (rates.link_bytes * max(1.0, share * sum(rates.axis_links)))


def product_flops(module: Module, instruction: Instruction, body: Body) -> float:
    """Return the operations of the matrix products in an instruction, those of its fused computations included."""
    match instruction.opcode:
        case "convolution":
            return _convolution_flops(instruction, body)
        case "dot":
            left = _dimensions(body, instruction.operands[0])
            found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
            contracted = [left[int(i)] for i in found[1].split(",") if i] if found else []
            return 2.0 * math.prod(_first(instruction.shape)) * math.prod(contracted)
        case "fusion":
            inner = module.computations.get(instruction.called("calls"), {})
            return sum(product_flops(module, i, inner) for i in inner.values())
        case _:
            return 0.0


def _convolution_flops(instruction: Instruction, body: Body) -> float:
    """Count as XLA's cost analysis does: without positions in padding or between dilated elements."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    if labels is None:
        return 0.0
    left, right = (_dimensions(body, name) for name in instruction.operands[:2])
    out = _first(instruction.shape)
    window = _window(instruction.rest)
    flops = 2.0 * right[labels[2].index("i")] * out[labels[3].index("b")] * out[labels[3].index("f")]
    for n in range(len(out) - 2):
        axis = str(n)
        sizes = left[labels[1].index(axis)], right[labels[2].index(axis)], out[labels[3].index(axis)]
        options = {key: values[n] for key, values in window.items() if n < len(values)}
        flops *= _valid_positions(*sizes, options)
    return flops


def _window(rest: str) -> dict[str, list[str]]:
    found = re.search(r"window=\{([^}]*)\}", rest)
    pairs = (word.split("=") for word in found[1].split()) if found else ()
    return {key: values.split("x") for key, values in pairs}


def _valid_positions(given: int, kernel: int, out: int, options: dict[str, str]) -> int:
    """Return how many pairs of output and kernel position read an element that exists, on one axis."""
    stride, base = int(options.get("stride", "1")), int(options.get("lhs_dilate", "1"))
    dilation, low = int(options.get("rhs_dilate", "1")), int(options.get("pad", "0_0").split("_")[0])
    if out * kernel > 1_000_000:
        return min(out * kernel, given * kernel)
    last = (given - 1) * base
    reads = (o * stride - low + k * dilation for o in range(out) for k in range(kernel))
    return sum(0 <= at <= last and at % base == 0 for at in reads)


def kernel_flops(instruction: Instruction, body: Body) -> float:
    """Return the operations of a splash attention kernel, by its name and its operands' shapes; 0 for others.

    A causal mask halves them. With a local window, the grid has fewer columns of blocks than rows.
    """
    if instruction.opcode != "custom-call" or "splash" not in instruction.name:
        return 0.0
    found = [list(shapes(body[o].shape)) for o in instruction.operands if o in body]
    blocks = [d for (kind, d, _), *_ in found if kind == "s8" and len(d) == 3]
    heads = [d for (kind, d, _), *_ in found if kind in ("bf16", "f32") and len(d) >= 3]
    products = next((n for part, n in KERNEL_PRODUCTS.items() if part in instruction.name), 0)
    if len(heads) < 2 or not products:
        return 0.0
    if products == KERNEL_PRODUCTS["dkv"] and any(len(d) > len(heads[0]) for _, d, _ in shapes(instruction.shape)):
        products, blocks = products + 1, []  # blocks of keys are larger than those of queries
    (*batch, num_heads, length, width), keys = heads[0], heads[1][-2]  # a batch of one row has no axis
    share = blocks[0][2] / blocks[0][1] if blocks and blocks[0][2] < blocks[0][1] else 0.5
    return products * 2.0 * math.prod(batch) * num_heads * length * keys * width * share


def hbm_bytes(module: Module, instruction: Instruction, body: Body) -> float:
    """Return the bytes that an instruction reads from and writes to HBM.

    Slices count by their own size: a loop reads one layer of the stacked weights and writes one of the stacked results.
    """
    if instruction.opcode in FREE or instruction.opcode == "custom-call":
        return 0.0
    given = [body[o] for o in instruction.operands if o in body]
    if instruction.opcode == "dynamic-update-slice":
        return 2 * num_bytes(given[1].shape, only_hbm=True) if len(given) > 1 else 0.0
    written = num_bytes(instruction.shape, only_hbm=True)
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * written
    if instruction.opcode != "fusion":
        return written + sum(num_bytes(i.shape, only_hbm=True) for i in given)
    inner = module.computations.get(instruction.called("calls"), {})
    updates = {i.operands[0]: num_bytes(inner[i.operands[1]].shape) for i in _of(inner, "dynamic-update-slice")}
    whole = sum(num_bytes(i.shape, only_hbm=True) for i in _of(inner, "dynamic-update-slice"))
    written = max(0.0, written - whole) + sum(updates.values()) if updates else written
    return written + sum(_read_bytes(given, inner, updates))


def _read_bytes(given: list[Instruction], inner: Body, updates: dict[str, float]) -> list[float]:
    """Return what a fusion reads of each operand."""
    parameters = {int(i.rest.split(")", 1)[0]): i.name for i in _of(inner, "parameter")}
    users: dict[str, list[Instruction]] = {name: [] for name in parameters.values()}
    for instruction in inner.values():
        for operand in instruction.operands:
            if operand in users:
                users[operand].append(instruction)
    read: list[float] = []
    for index, operand in enumerate(given):
        name, size = parameters.get(index, ""), num_bytes(operand.shape, only_hbm=True)
        uses = users.get(name, [])
        if name in updates:
            size = 0.0
        elif uses and all(use.opcode in ("dynamic-slice", "slice", "gather") for use in uses):
            size = min(size, sum(num_bytes(use.shape) for use in uses))
        read.append(size)
    return read


def sent_bytes(kind: str, instruction: Instruction, body: Body) -> float:
    """Return the bytes that each device sends over its links in a collective."""
    size = group_size(instruction)
    given = sum(num_bytes(body[o].shape) for o in instruction.operands if o in body)
    share = (size - 1) / size
    factors = {"all-gather": size - 1, "reduce-scatter": share, "all-reduce": 2 * share, "all-to-all": share}
    return given * factors.get(kind, 1.0)


def _of(body: Body, opcode: str) -> list[Instruction]:
    return [i for i in body.values() if i.opcode == opcode]


def _dimensions(body: Body, name: str) -> list[int]:
    return _first(body[name].shape) if name in body else []


def _first(shape: str) -> list[int]:
    return next((dimensions for _, dimensions, _ in shapes(shape)), [])
