"""Figures of one compiled program on one device, from the compiler's schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.fit import work
from trainer.fit.schedule import Body, Instruction, Module, calls, find_transfer, num_bytes, parse, shapes
from trainer.fit.step_time import Rates, StepTime, step_time


@dataclass(frozen=True)
class Figures:
    """What one execution takes on one device.

    Attributes:
        flops: of matrix products and attention kernels, recomputation and padding included.
        hbm_bytes: read and written by everything except attention kernels, copies to and from VMEM included.
        ici_bytes: sent over the links.
        time: at the chip's rates, not calibrated, see `trainer.fit.step_time`.
    """

    flops: float
    hbm_bytes: float
    ici_bytes: float
    time: StepTime


def figures(text: str, rates: Rates) -> Figures:
    """Return the figures of a schedule; a loop's body counts as often as it runs."""
    module = parse(text)
    flops = hbm = ici = 0.0
    for instruction, body, turns in executed(module, module.entry, 1.0):
        transfer = find_transfer(module, instruction, body)
        flops += turns * (work.product_flops(module, instruction, body) + work.kernel_flops(instruction, body))
        hbm += turns * (work.hbm_bytes(module, instruction, body) + copied_bytes(instruction))
        if transfer is not None and transfer.part in ("start", "all"):
            ici += turns * work.sent_bytes(transfer.kind, transfer.instruction, transfer.body)
    return Figures(flops, hbm, ici, step_time(module, rates))


def copied_bytes(instruction: Instruction) -> float:
    """Return the bytes that an asynchronous copy or slice reads from and writes to HBM."""
    if instruction.opcode not in ("copy-start", "slice-start"):
        return 0.0
    arrays = [f"{kind}[{','.join(map(str, sizes))}]{layout}" for kind, sizes, layout in shapes(instruction.shape)]
    given, taken = (arrays[1], arrays[0]) if instruction.opcode == "copy-start" else (arrays[0], arrays[1])
    sides = ("S(" not in given) + ("S(" not in taken)
    return sides * num_bytes(taken)


def executed(module: Module, name: str, turns: float) -> Iterator[tuple[Instruction, Body, float]]:
    """Yield each instruction of a computation and of the loops in it, and how often it runs.

    Both sides of a branch are yielded: an update that is skipped does nothing.
    """
    body = module.computations[name]
    for instruction in body.values():
        if inner := list(calls(module, instruction)):
            for called, times in inner:
                yield from executed(module, called, turns * times)
        else:
            yield instruction, body, turns
