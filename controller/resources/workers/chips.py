"""TPU chips of every worker: as many as planned, and nobody holds them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from controller.agent.protocol import OBSERVE, Chips, Observation
from controller.context import Context
from controller.core.errors import WrongDevicesError
from controller.core.text import plural
from controller.reconcile.resource import Diff, ObservedResources
from controller.resources.workers.base import WorkerResource, raise_failures

FREE = "free"
LOOKS, PAUSE_SECONDS = 3, 3.0
"""A program that was just stopped may hold its chips a little longer: how often to look, and the pause in between."""


@dataclass(frozen=True, kw_only=True)
class FreeChips(WorkerResource):
    """As many device nodes as the worker has chips by the plan, held by no process.

    Nothing here can be mended from outside: a difference is an error, unless the holder ends by itself.
    """

    kind: ClassVar[str] = "chips"
    expected: int = field(compare=False)
    state: tuple[str, ...]

    @classmethod
    def for_workers(cls, expected: int, workers: int, **placing: Any) -> Self:
        return cls(expected=expected, state=(FREE,) * workers, **placing)

    @property
    def title(self) -> str:
        return (
            f"{plural(self.expected * len(self.state), 'chip')} of {plural(len(self.state), 'worker')}: present, free"
        )

    def observe(self, context: Context, observed: ObservedResources) -> Self:
        return replace(self, state=self.observe_workers(context, observed, self._state, chips=True))

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        found: list[Chips] = []
        for look in range(LOOKS):
            if look:
                context.clock.sleep(PAUSE_SECONDS)
            answers = self.fleet(context, observed).call_all(OBSERVE, {"chips": True})
            raise_failures(answers, self.title)
            found = [chips for a in answers if isinstance(a, dict) and (chips := a["chips"]) is not None]
            require_count(found, self.expected)
            if not any(chips["holders"] for chips in found):
                return
        problems = [f"worker {i}: {held}" for i, chips in enumerate(found) if (held := _held_by(chips))]
        raise WrongDevicesError(
            f"{'; '.join(problems)}. End it (`slipway exec --worker N -- kill PID`, with sudo if it is another "
            "user's), or set program.needs_chips=false if the program uses no chips"
        )

    def _state(self, answer: Observation) -> str:
        chips = answer["chips"]
        assert chips is not None, "they were asked for"
        return chips_problem(chips, self.expected) or FREE


def chips_problem(chips: Chips, expected: int) -> str:
    """Return what is wrong with the chips of a worker, or ""."""
    if len(chips["paths"]) != expected:
        return f"{len(chips['paths'])} of {plural(expected, 'chip')}{_list_paths(chips)}"
    return _held_by(chips)


def require_count(found: Sequence[Chips], expected: int) -> None:
    """Raise WrongDevicesError unless every worker has the expected number of chips."""
    counts = [len(chips["paths"]) for chips in found]
    wrong = [i for i, count in enumerate(counts) if count != expected]
    if not wrong:
        return
    listed = "; ".join(f"worker {i} has {chips_problem(found[i], expected)}" for i in wrong)
    on_bus = all(found[i]["on_pci"] >= expected for i in wrong)
    if len(wrong) < len(found):
        cure = "delete the pod with `slipway down` and run `up` again for other hardware"
    elif on_bus:
        cure = (
            "the PCI bus has them all, so their driver is missing: is tpu.runtime_version the image of this TPU "
            "generation? null selects it"
        )
    else:
        cure = "is tpu.accelerator_type what this pod is? If so, `slipway down` and `up` get other hardware"
    raise WrongDevicesError(
        f"{listed}; {cure}. A program that uses no chips sets program.needs_chips=false",
        [f"{count} chips" for count in counts],
        wrong if len(wrong) < len(found) else [],
    )


def _list_paths(chips: Chips) -> str:
    bus = f"{chips['on_pci']} on its PCI bus"
    return f" ({', '.join(chips['paths']) or 'no device nodes in /dev'}; {bus})"


def _held_by(chips: Chips) -> str:
    return "; ".join(
        f"{', '.join(holder['paths'])} {'is' if len(holder['paths']) == 1 else 'are'} held by process {holder['pid']} "
        f"of {holder['user']} ({holder['command'] or 'unknown command'})"
        for holder in chips["holders"]
    )
