"""The state of a GRPO run, saved to checkpoints and restored from them."""

from collections import deque
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from trainer.checkpoint.manager import CheckpointManager
from trainer.distributed.preemption import PreemptedError, PreemptionNotice
from trainer.rl.progress import Progress
from trainer.rl.rollouts import Rollout
from trainer.rl.telemetry import Telemetry
from trainer.step import train_step
from trainer.step.batch_check import BatchCheck


@dataclass
class TrainState:
    """Everything that a checkpoint stores. rollouts: drawn but not yet trained on, oldest first."""

    state: train_step.State
    progress: Progress
    rollouts: deque[Rollout]


class StateSaver:
    """Saves and restores the state of a run. All processes call every method, in the same order."""

    def __init__(
        self, checkpoints: CheckpointManager, preemption: PreemptionNotice, telemetry: Telemetry, batches: BatchCheck
    ) -> None:
        self._checkpoints, self._preemption, self._telemetry = checkpoints, preemption, telemetry
        self._batches = batches
        self._first_step = 0

    def restore(self, abstract: train_step.State, mesh: Mesh) -> TrainState | None:
        """Return the state of the newest checkpoint, or None if there is none. Also restores the telemetry."""
        resumed = self._checkpoints.restore_latest(abstract)
        if resumed is None:
            return None
        body = resumed.position
        self._telemetry.restore(body)
        progress = Progress(**body["position"])
        self._first_step = progress.total_steps
        self._batches.restart(progress.total_steps)
        rollouts = deque(Rollout.from_json(rollout, mesh) for rollout in body["rollouts"])
        return TrainState(resumed.state, progress, rollouts)

    def save(self, train_state: TrainState) -> None:
        """Save a checkpoint; metrics are uploaded first, since a run that resumes from it reads them."""
        self._telemetry.flush()
        with self._telemetry.stopwatch.excluded(), self._telemetry.phases.measure("checkpoints"):
            self._telemetry.upload()
            self._batches.compare(train_state.progress.total_steps)
            rollouts = [rollout.to_json() for rollout in train_state.rollouts]
            body = {"position": train_state.progress.to_json(), **self._telemetry.to_json(), "rollouts": rollouts}
            written = body if jax.process_index() == 0 else {}
            self._checkpoints.save(train_state.progress.total_steps, train_state.state, written)

    def save_if_preempted(self, train_state: TrainState) -> None:
        """Save and end the run on all processes if the VM is about to be preempted. Raises PreemptedError."""
        step = train_state.progress.total_steps
        if self._preemption.should_stop(step):
            if step > self._first_step:
                self.save(train_state)
            raise PreemptedError

    def verify(self, train_state: TrainState) -> None:
        """Compare the copies of the state, and the data, if it is time to. Raises CorruptionError on all processes."""
        step = train_state.progress.total_steps
        with self._telemetry.stopwatch.excluded():
            self._checkpoints.catch_up()
            self._batches.compare_if_due(step)
            self._checkpoints.verify_replicas(step, train_state.state)

    def verify_at_rest(self, train_state: TrainState) -> None:
        """Compare the copies of the state, before and after a phase that does not change it. Raises CorruptionError."""
        with self._telemetry.stopwatch.excluded():
            self._checkpoints.verify_at_rest(train_state.progress.total_steps, train_state.state)

    def diagnose(self, train_state: TrainState) -> None:
        """Look for a fault of hardware behind an update that was not finite. Raises CorruptionError."""
        step = train_state.progress.total_steps
        self._checkpoints.verify(step, train_state.state)
        self._batches.compare(step)
