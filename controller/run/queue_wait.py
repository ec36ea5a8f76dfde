"""Wait for a pod that other runs use or wait for: `up --queue`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from controller.context import Context
from controller.lease.lease import Lease
from controller.plan.build import Plan
from controller.resources.pod.node import Node
from controller.run.launch import running_runs
from controller.run.queue import PodQueue


@dataclass(frozen=True)
class QueueWaiter:
    """Waits for the runs that are ahead of this one on its pod."""

    plan: Plan
    world: Context
    turns: PodQueue
    lease: Lease
    poll_seconds: float
    note: Callable[[str], None]

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Wait for our turn, then keep it until the context ends."""
        if self.lease.held:
            yield
            return
        with self.turns.joined(self.plan.run_id) as refresh:
            told: list[str] = []
            while ahead := self._ahead():
                if ahead != told:
                    self.note(f"waiting for {', '.join(ahead)}")
                    told = ahead
                self.world.clock.sleep(self.poll_seconds)
                refresh()
            yield

    def _ahead(self) -> list[str]:
        """Return the runs ahead of this one: those running or being driven on the pod and those queued earlier."""
        node = self.plan.observe_pod(self.world)
        running = set[str]()
        if isinstance(node, Node) and node.is_ready and node.accepts_our_key(self.world):
            running = running_runs(node.fleet(self.world))
        if (other := self.lease.look()) is not None:
            running.add(other.term.run_id)
        if self.plan.run_id in running:
            return []
        return [*sorted(running), *self._queued_before()]

    def _queued_before(self) -> list[str]:
        line = self.turns.waiting()
        return line[: line.index(self.plan.run_id)] if self.plan.run_id in line else line
