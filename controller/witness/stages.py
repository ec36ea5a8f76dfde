"""The stages of a first contact, as the events of the run tell them; and the preemption by hand."""

import threading
from typing import Any

from controller.context import Context
from controller.core.clock import InterruptedSleepError
from controller.core.errors import SlipwayError
from controller.core.events import Event
from controller.gcp.operations import OperationFailedError
from controller.plan.build import Plan
from controller.resources.pod.node import Node
from controller.witness.drill import CHECKPOINT
from controller.witness.limits import TimeLimit
from controller.witness.recording import Recording, Stage
from controller.witness.worker_facts import survey_workers

STAGES = ("look", "first run", "checkpoint", "preempt", "recover", "clean up", "verify")
"""look: checks and price. first run: from enabled APIs to the launched program. checkpoint: until it is in the bucket.
preempt: the node is deleted by hand, until the program runs on a new one. recover: until the run has finished. clean
up: `down --all`. verify: what is left."""
FACTS_SECONDS = 180.0
"""How long the clean-up waits for the facts about the workers."""


class StageLog:
    """Keeps the stages of a recording. A stage begins when the one before it ends; the rest are skipped."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._lock = threading.RLock()

    def begin(self, name: str) -> None:
        with self._lock:
            self.end("ok")
            self._recording.stages.append(Stage(name, self._recording.seconds()))

    def end(self, outcome: str, detail: str = "") -> None:
        """End the stage in progress, if there is one."""
        with self._lock:
            if (stage := self._recording.stage) is not None:
                stage.outcome, stage.detail = outcome, detail
                stage.seconds = round(self._recording.seconds() - stage.began, 3)

    def note(self, message: str) -> None:
        if (stage := self._recording.stage) is not None:
            stage.notes.append(message)

    def skip_rest(self) -> None:
        """Record the stages before the clean-up that never began."""
        known = {stage.name for stage in self._recording.stages}
        for name in STAGES[: STAGES.index("clean up")]:
            if name not in known:
                self._recording.stages.append(Stage(name, self._recording.seconds(), outcome="skipped"))

    def on_event(self, event: Event) -> None:
        """Record what happens to a resource, and what the user is told."""
        if (stage := self._recording.stage) is None:
            return
        if event.kind == "note":
            stage.notes.append(event.message)
        elif event.kind == "step_started":
            if all(step["resource"] != event.subject or step["outcome"] != "running" for step in stage.steps):
                stage.steps.append(self._step(event) | {"waiting_for": event.message})
        elif event.kind in ("step_done", "step_failed"):
            steps = [s for s in stage.steps if s["resource"] == event.subject and s["outcome"] == "running"]
            step = steps[-1] if steps else self._step(event)
            if not steps:
                stage.steps.append(step)
            step["outcome"] = "ok" if event.kind == "step_done" else f"failed: {event.message}"
            step["action"] = event.data.get("action", "")
            step["seconds"] = round(self._recording.seconds() - step["began"], 3)

    def _step(self, event: Event) -> dict[str, Any]:
        title, began = event.data.get("title", event.subject), self._recording.seconds()
        return {"resource": event.subject, "title": title, "began": began, "outcome": "running"}


class FirstRun:
    """Follows the events of the drill: surveys the workers, and deletes the node once a checkpoint is in the bucket."""

    def __init__(self, plan: Plan, context: Context, recording: Recording, log: StageLog, limit: TimeLimit) -> None:
        self._plan, self._context, self._recording = plan, context, recording
        self._log, self._limit = log, limit
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._surveyed = False
        self._told: set[tuple[Any, Any]] = set()
        self._resumed_at: int | None = None
        self.preempted = False
        """Whether the node was deleted by hand."""

    def on_event(self, event: Event) -> None:
        """Move on to the next stage, before `StageLog` records the event."""
        attempt = event.data.get("attempt")
        if event.kind == "step_done" and event.subject.startswith("ssh/") and not self._surveyed:
            self._surveyed = True
            self._spawn(self._survey)
        elif event.kind == "note" and isinstance(attempt, int) and "verdict" not in event.data:
            self._log.begin("checkpoint" if attempt == 1 else "recover")
            if attempt == 1:
                self._spawn(self._preempt)
        elif event.kind == "metrics" and event.data["metrics"].get("phase") == "train":
            self._note_step(event.data["metrics"])

    def _note_step(self, metrics: dict[str, Any]) -> None:
        """Remember the first step that is new in the last attempt, which repeats the lines of the one before it."""
        line = metrics.get("step"), metrics.get("time")
        stage = self._recording.stage
        if stage is None or stage.name != "recover":
            self._told.add(line)
        elif line not in self._told and self._resumed_at is None:
            self._resumed_at = metrics.get("step")

    def problem(self) -> str:
        """Return what the finished run failed to show, empty if nothing."""
        if not self.preempted:
            return "the pod was not preempted by hand"
        if self._resumed_at != CHECKPOINT + 1:
            return f"the second attempt began at step {self._resumed_at}, not {CHECKPOINT + 1}"
        return ""

    def close(self) -> None:
        """Wait until the facts are recorded and no request is under way."""
        self._closed.set()
        for thread in self._threads:
            thread.join(FACTS_SECONDS)

    def _spawn(self, target: Any) -> None:
        thread = threading.Thread(target=target, daemon=True, name=f"witness-{target.__name__}")
        self._threads.append(thread)
        thread.start()

    def _survey(self) -> None:
        try:
            node = self._plan.observe_pod(self._context)
            if isinstance(node, Node):
                self._recording.workers.extend(survey_workers(self._context, node))
        except (SlipwayError, InterruptedSleepError) as error:
            self._recording.workers.append({"error": str(error)})

    def _preempt(self) -> None:
        try:
            while not self._has_checkpoint():
                if self._closed.wait(self._context.poll_seconds):
                    return
            node = self._plan.node.find(self._context)
            if node is None or self._closed.is_set():
                return
            self._log.begin("preempt")
            self.preempted = True
            node.plane.delete_by_hand(self._context, node.name, node.place.zone)
        except InterruptedSleepError:
            return
        except OperationFailedError as error:  # the controller may have replaced the node already
            self._log.note(f"the deletion by hand: {error}")
        except SlipwayError as error:  # the program would wait for ever
            self._limit.stop(f"the node could not be preempted by hand: {error}")

    def _has_checkpoint(self) -> bool:
        prefix = f"runs/{self._plan.run_id}/checkpoints/{CHECKPOINT}/commit_success"
        answer = self._context.google.call("storage", "objects.list", bucket=self._plan.bucket, prefix=prefix)
        return bool(answer.get("items"))
