"""The pods of a sweep, each a thread that takes the next run as soon as it is free.

A run is carried through by `up` itself, recovery included: nothing here knows of preemptions. Which run a pod has is on
record in the bucket before it is launched: a controller that takes over gives the pod the same run back, which may be
under way there still, and two programs of one run would write to the same place.
"""

from __future__ import annotations

import json
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from conf.schema import Config
from controller.cli import Command
from controller.connect import connected
from controller.errors import SlipwayError
from controller.events import Event, Events
from controller.google import Google, NotFound
from controller.ledger import Result
from controller.reconcile import destroy
from controller.resources.node import Node
from controller.spending import let_go
from controller.sweep.board import Board, Line, Screen
from controller.sweep.study import Builder, Job, on_pod
from controller.verbs.up import carry_on
from controller.world import World


class Source(Protocol):
    """Where the runs come from; threads ask it one at a time."""

    def take(self, pod: int) -> Job | None:
        """The next run, None where there is none left for this pod."""
        ...

    def ended(self, job: Job, result: Result | None) -> None:
        """It has finished, or has been given up (None)."""
        ...

    def metrics(self, job: Job, event: Event) -> bool:
        """One line of its metrics; True: it is to be ended now, being worse than others were."""
        ...


class Listed:
    """The runs of a grid, in order; a run that a pod had when the last controller ended goes to that pod first."""

    def __init__(self, jobs: Iterable[Job], held: dict[int, str]) -> None:
        left = {job.run_id: job for job in jobs}
        self._held = {pod: left.pop(run) for pod, run in sorted(held.items()) if run in left}
        self._left = deque(left.values())

    @property
    def pods_held(self) -> set[int]:
        return set(self._held)

    def take(self, pod: int) -> Job | None:
        if pod in self._held:
            return self._held.pop(pod)
        return self._left.popleft() if self._left else None

    def ended(self, job: Job, result: Result | None) -> None:
        pass

    def metrics(self, job: Job, event: Event) -> bool:
        return False

    def clear(self) -> None:
        """Nothing further is begun."""
        self._left.clear()


@dataclass
class Pool:
    """Carries all runs of a source through; `failed` holds those that were given up, and why."""

    sweep_id: str
    bucket: str
    source: Source
    builder: Builder
    board: Board
    any_config: Config
    pods: int
    on_failure: str
    retries: int
    delete_pods: bool
    failed: dict[str, str] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _worlds: list[World] = field(default_factory=list)
    _broken: list[BaseException] = field(default_factory=list)

    def run(self, further_pods: Iterable[int] = ()) -> None:
        """Until nothing is left to run.

        Args:
            further_pods: of pods that an earlier controller had.

        Raises:
            KeyboardInterrupt: what is under way goes on without us.
        """
        numbers = sorted({*range(1, self.pods + 1), *further_pods})
        threads = [threading.Thread(target=self._work, args=(n,), daemon=True, name=f"pod-{n}") for n in numbers]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
        except KeyboardInterrupt:
            self._stop.set()
            for world in self._worlds:
                world.clock.interrupt()
            raise
        if self._broken:
            raise self._broken[0]

    def _work(self, pod: int) -> None:
        try:
            job = self._take(pod)
            if job is None and not self.delete_pods:
                return
            with connected(on_pod(self.any_config, pod), keep_awake=True) as (world, emulator):
                self._worlds.append(world)
                while job is not None:
                    record(world.google, self.bucket, self.sweep_id, pod, job.run_id)
                    self._carry(job, pod, world, emulator)
                    job = self._take(pod)
                if self.delete_pods and not self._stop.is_set():
                    self._let_go(pod, world)
        except BaseException as error:  # it is raised where the sweep was started
            if not self._stop.is_set():
                self._broken.append(error)
                self._stop.set()

    def _take(self, pod: int) -> Job | None:
        with self._lock:
            return None if self._stop.is_set() else self.source.take(pod)

    def _carry(self, job: Job, pod: int, world: World, emulator: object) -> None:
        """One run, as often as the policy says."""
        tries = 1 + (self.retries if self.on_failure == "retry" else 0)
        self.board.add(Line(job.run_id, job.variant.title))
        for attempt in range(tries):
            self.board.state(job.run_id, "running", pod=pod, began=world.clock.now(), why="")
            try:
                result = self._once(job, pod, world, emulator)
            except SlipwayError as error:
                why = str(error).partition("\n")[0]
                again = "; once more" if attempt + 1 < tries else ""
                self.board.state(job.run_id, "failed", f"{why}{again}", why=why)
                self.failed[job.run_id] = why
                if self.on_failure == "stop":
                    self._stop.set()
                    return
            else:
                self.failed.pop(job.run_id, None)
                if result is None:
                    self.board.state(job.run_id, "ended early", why="pruned or cancelled")
                with self._lock:
                    self.source.ended(job, result)
                return
        with self._lock:
            self.source.ended(job, None)

    def _once(self, job: Job, pod: int, world: World, emulator: object) -> Result | None:
        plan = self.builder.plan(on_pod(job.config, pod))
        world.events = Events(world.clock)
        screen = Screen(self.board, job.run_id, world.clock)
        world.events.listen(screen)
        pruned = False

        def watch(event: Event) -> None:
            nonlocal pruned
            if event.kind != "metrics" or pruned:
                return
            with self._lock:
                pruned = self.source.metrics(job, event)
            if pruned:
                end_now(plan.run_id)

        def end_now(run_id: str) -> None:
            from controller.launch import stop
            from controller.ledger import Ledger

            Ledger(world.google, self.bucket, run_id).cancel()
            node = plan.node.observe(world, {})
            if isinstance(node, Node):
                stop(world.fleet(node), run_id)

        world.events.listen(watch)
        flags = Namespace(json=False, yes=True, detach=False, queue=True, take_over=False, run=None)
        command = Command("up", flags, job.variant.words)
        return carry_on(command, plan, world, emulator, screen, self.sweep_id)  # pyright: ignore[reportArgumentType]

    def _let_go(self, pod: int, world: World) -> None:
        """Nothing is left for this pod; an earlier controller may have left it without coming to that."""
        plan = self.builder.plan(on_pod(self.any_config, pod))
        seen = plan.node.observe(world, {})
        if isinstance(seen, Node) and seen.ours and not plan.node.adopt:
            let_go(world.google, world.clock, self.bucket, plan.config, seen, "the sweep has no more runs")
            world.events = Events(world.clock)
            destroy([replace(plan.node, needs=())], world)


def record(google: Google, bucket: str, sweep_id: str, pod: int, run_id: str) -> None:
    """The pod has this run from now on."""
    google.upload(bucket, f"sweeps/{sweep_id}/pods/{pod}.json", json.dumps({"pod": pod, "run": run_id}).encode())


def recorded(google: Google, bucket: str, sweep_id: str, still: Callable[[str], bool]) -> dict[int, str]:
    """By pod the run that it had last, of those that `still` matter."""
    where = {"bucket": bucket, "prefix": f"sweeps/{sweep_id}/pods/"}
    try:
        items = list(google.pages("storage", "objects.list", "items", **where))
    except NotFound:
        return {}
    found = [json.loads(google.download(bucket, item["name"])) for item in items]
    return {entry["pod"]: entry["run"] for entry in found if still(entry["run"])}
