"""A rehearsal under a seeded schedule of misfortune: `up` in a process of its own, and what became of it in the end.

The controller itself may be killed, so that it has to be a process that is not ours; the same command then goes on.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from conf.schema.config import Config
from controller.core.errors import SlipwayError
from controller.records.ledger import Ledger
from controller.recovery.policy import Episode
from controller.rehearsal.fault_schedule import Spec, Stage

TRIES = 6
"""How often a run that was given up is started again, as its user would."""
BLINK_SECONDS = 6.0
SECONDS = 10.0
LAUNCHED = re.compile(r"launched attempt (\d+) ")
KILLED = -9
AGAIN = frozenset({KILLED, 2, 5, 6})
"""Exit codes after which the same command is given again: Google refused, or a budget is spent."""


class NotConverged(SlipwayError):
    """The run did not come to its end."""

    exit_code = 6


@dataclass(frozen=True)
class Moment:
    """Something that happened, `time` in seconds since the epoch."""

    time: float
    words: str


@dataclass
class Watched:
    """What the events of all processes of a rehearsal say."""

    began: float
    ended: float = 0.0
    moments: list[Moment] = field(default_factory=list)
    last_step: int | None = None
    fresh: bool = False
    steps_again: int = 0

    def told(self, event: dict[str, Any]) -> str:
        """Take an event in; what is to be shown of it at once, empty for nothing."""
        time = datetime.fromisoformat(event["time"]).timestamp()
        if event["kind"] == "metrics" and isinstance(step := event["metrics"].get("step"), int | float):
            self._step(int(step))
        if event["kind"] != "note":
            return ""
        if LAUNCHED.search(event.get("words", "")):
            self.fresh = True
            self.moments.append(Moment(time, event["words"]))
        return event.get("words", "")

    def _step(self, step: int) -> None:
        if self.fresh and self.last_step is not None:
            self.steps_again += max(0, self.last_step - step + 1)
        self.fresh = False
        self.last_step = max(step, self.last_step or 0)


def stage_of(config: Config, workers: int) -> Stage:
    """What a schedule for this experiment may rest on: the names of its checkpoints, as far as they are known."""
    objects: tuple[str, ...] = ()
    if config.program.kind == "trainer":
        objects = tuple(f"checkpoints/{config.checkpoint.every * n}/commit_success" for n in (1, 2))
    elif config.code.stand_in:
        objects = ("/commit_success",)
    return Stage(workers, objects, SECONDS, BLINK_SECONDS, kills_controller=True, adopted=config.tpu.adopt)


def undergo(words: Sequence[str], watched: Watched, show: bool) -> None:
    """Run `up` until it has converged, again where it is killed or gives up.

    Args:
        words: of its command line.
        show: print its notes as they come.

    Raises:
        NotConverged: not even after some tries; its last words.
    """
    said = ""
    for _ in range(TRIES):
        code, said = _up(words, watched, show)
        now = datetime.now().timestamp()
        watched.ended = now
        if code == 0:
            return
        if code not in AGAIN:
            break
        how = "the controller was killed" if code == KILLED else f"`up` gave up with exit code {code}"
        watched.moments.append(Moment(now, f"{how}; the same command again"))
        if show:
            print(f"  › {how}; the same command again", flush=True)
    raise NotConverged(f"it did not converge; the last `up` said:\n{said}")


def _up(words: Sequence[str], watched: Watched, show: bool) -> tuple[int, str]:
    command = [sys.executable, "-P", "-m", "controller", "up", "--json", "--yes", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # of one that is killed the last line may be half
            note = watched.told(event)
            if note and show:
                print(f"  › {note}", flush=True)
        said = process.stderr.read().strip()
    return process.returncode, said


def timeline(watched: Watched, ledger: Ledger, faults: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What happened, in its order: each fault, each verdict with what was done, each launch."""
    launches = ledger.launches()
    moments = list(watched.moments)
    for fault in faults:
        if fault["struck"]:
            times = f", {len(fault['struck'])} times" if len(fault["struck"]) > 1 else ""
            moments.append(Moment(fault["struck"][0], f"fault: {described(fault['spec'])}{times}"))
    for episode in map(Episode.read, ledger.episodes()):
        after = next((launch.time for launch in launches if launch.time > episode.time), None)
        took = f"; the next attempt began {after - episode.time:.1f} s later" if after else ""
        moments.append(Moment(episode.time, f"verdict: {episode.words}; {episode.response}{took}"))
    for moment in sorted(moments, key=lambda moment: moment.time):
        yield f"{max(0.0, moment.time - watched.began):7.1f} s  {moment.words}"


def cost(watched: Watched, ledger: Ledger) -> str:
    """What it all cost in time, in words."""
    launches, episodes = ledger.launches(), [Episode.read(document) for document in ledger.episodes()]
    lost = 0.0
    for episode in episodes:
        after = next((launch.time for launch in launches if launch.time > episode.time), None)
        lost += after - episode.time if after else 0.0
    again = f"; {watched.steps_again} steps computed again" if watched.last_step is not None else ""
    return (
        f"{watched.ended - watched.began:.0f} s in all, {lost:.0f} s of them from a verdict to the next launch, "
        f"{len(launches)} attempts{again}"
    )


def described(spec: Spec) -> str:
    """A fault with the keys that its schedule gave it."""
    shown = {k: v for k, v in spec.items() if v not in (None, 0.0) and k not in ("kind", "seed")}
    return f"{spec['kind']} ({', '.join(f'{key} {value}' for key, value in shown.items())})"
