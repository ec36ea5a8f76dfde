"""Read from the TPU compiler's text what one device does, in which order.

What libtpu 0.0.52 says, found on small programs for v5e and v6e:

- `compiled.as_text()` is the scheduled module of one device after all passes, with layouts and memory spaces: `S(1)` is
  VMEM, none is HBM. `runtime_executable().hlo_modules()[0].to_string()` is the same text.
- An instruction of the TensorCore has `estimated_cycles` in its backend_config's `window_config`. `cost_model_type` is
  COST_MODEL_TYPE_CLASSIC for matrix products and fusions with one, and COST_MODEL_TYPE_INVALID for the others.
  `ml_estimated_microseconds` and `estimated_bundle_count` are always 0.
- The cycles of products come to 1.28 (v5e) and 1.43 (v6e) times their operations at the peak rate. Those of the other
  instructions come to 4 to 8 times their bytes at HBM's bandwidth, which no chip does. Nothing else has cycles. So
  `step_time` takes operations and bytes, and a factor per generation from published runs, and does not read cycles.
- Collectives have shapes and groups only. An asynchronous one is a pair of `-start` and `-done`, or fusions named
  async-collective-start, fusion, async-collective-done with the same channel, whose middle ones compute products. A
  reduce-scatter is a fusion of all-reduce and dynamic-slice named all-reduce-scatter. Mosaic kernels have no cost.
- Loops have no trip count. Their condition compares a counter with a constant, and the body may add more than 1 to it.
- `cost_analysis()` counts each loop's body once, and its `optimal_seconds` is negative, so neither is used.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

ITEM_BYTES = {"bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
"""Bytes of an element; types that are not listed have 1."""
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) .*\{$")
SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split(")", 1)[0])

    def called(self, attribute: str) -> str:
        """Return the computation that an attribute names; empty if there is none."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)
        return found[1] if found else ""


Body = dict[str, Instruction]
"""A computation's instructions by name, in scheduled order."""


@dataclass
class Module:
    """The computations of a compiled program by name."""

    entry: str = ""
    computations: dict[str, Body] = field(default_factory=dict[str, Body])


def parse(text: str) -> Module:
    """Parse `compiled.as_text()`."""
    module, body = Module(), Body()
    for line in text.splitlines():
        if begins := COMPUTATION.match(line):
            body = module.computations[begins[2]] = {}
            module.entry = begins[2] if begins[1] else module.entry
        elif found := INSTRUCTION.match(line):
            body[found[1]] = Instruction(*found.groups())
    return module


def calls(module: Module, instruction: Instruction) -> Iterator[tuple[str, float]]:
    """Yield the computations that an instruction runs, and how often. A fusion is one instruction."""
    match instruction.opcode:
        case "while":
            body = instruction.called("body")
            yield body, trip_count(module, instruction.called("condition"), body)
        case "call":
            yield instruction.called("to_apply"), 1.0
        case "conditional":
            named = re.search(r"branch_computations=\{([^}]*)\}", instruction.rest)
            names = re.findall(r"%([\w.\-]+)", named[1]) if named else []
            yield from ((n, 1.0) for n in names or (instruction.called("true_computation"),) if n)
        case _:
            return


def trip_count(module: Module, condition: str, body: str = "") -> float:
    """Return how often a loop runs: the limit in its condition over the step of its body; 1 if that depends on data."""
    known = module.computations.get(condition, {})
    for instruction in known.values():
        if instruction.opcode == "compare" and "direction=LT" in instruction.rest:
            constants = [known[o] for o in instruction.operands if o in known and known[o].opcode == "constant"]
            counters = [known[o] for o in instruction.operands if o in known and known[o].opcode != "constant"]
            if not constants:
                return 1.0
            index = re.search(r"index=(\d+)", counters[0].rest) if counters else None
            return _constant(constants[0]) / _step(module.computations.get(body, {}), int(index[1]) if index else -1)
    return 1.0


def _step(body: Body, index: int) -> float:
    """Return what a loop's body adds to its counter, more than once if the compiler has unrolled it."""
    root = next(reversed(body.values()), None)
    if root is None or root.opcode != "tuple" or not 0 <= index < len(root.operands):
        return 1.0
    step, found = 0.0, body.get(root.operands[index])
    while found is not None and found.opcode in ("add", "copy"):
        given = [body[o] for o in found.operands if o in body]
        step += sum(_constant(i) for i in given if i.opcode == "constant")
        found = next((i for i in given if i.opcode != "constant"), None)
    return step or 1.0


def _constant(instruction: Instruction) -> float:
    return float(instruction.rest.split(")", 1)[0])


@dataclass(frozen=True)
class Transfer:
    """A collective, or a part of it: `start`, `step` beside products, `done`, or `all` at once."""

    kind: str
    part: str
    key: str
    instruction: Instruction
    body: Body


def find_transfer(module: Module, instruction: Instruction, body: Body) -> Transfer | None:
    """Return the collective that an instruction is part of. `key` is the same for all of its parts."""
    opcode, _, part = instruction.opcode.rpartition("-")
    if instruction.opcode in COLLECTIVES:
        return Transfer(instruction.opcode, "all", instruction.name, instruction, body)
    if opcode in COLLECTIVES:
        key = instruction.name if part == "start" else next(iter(instruction.operands), "")
        return Transfer(opcode, part, key, instruction, body)
    if instruction.opcode != "fusion":
        return None
    called = instruction.called("calls")
    inner = module.computations.get(called, {})
    for found in inner.values():
        if found.opcode in COLLECTIVES:
            kind = "reduce-scatter" if called.startswith("all-reduce-scatter") else found.opcode
            channel = re.search(r"channel_id=(\d+)", found.rest)
            part = next((p for p in ("start", "done") if f"async-collective-{p}" in instruction.name), "all")
            part = "step" if called.startswith("async_collective_fusion") else part
            return Transfer(kind, part, channel[1] if channel else "", found, inner)
    return None


def group_size(instruction: Instruction) -> int:
    """Return the number of devices that take part in one group of a collective."""
    rest = instruction.rest
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest):
        return int(found[2])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        axes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        return math.prod(int(axes.get(name, 1)) for name in re.findall(r"'([^']+)'", found[2]))
    return 2 if "source_target_pairs" in rest else 1


def shapes(text: str) -> Iterator[tuple[str, list[int], str]]:
    """Yield element type, dimensions and layout of each array in a shape, which may be a tuple."""
    for element, dimensions, layout in SHAPE.findall(text):
        yield element, [int(d) for d in dimensions.split(",") if d], layout


def num_bytes(shape: str, *, only_hbm: bool = False) -> float:
    """Return the bytes of all arrays in a shape; only_hbm: of those that are in HBM."""
    return sum(
        math.prod(dimensions) * ITEM_BYTES.get(element, 1)
        for element, dimensions, layout in shapes(shape)
        if not (only_hbm and "S(" in layout)
    )
