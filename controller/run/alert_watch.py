"""Raise the alerts of an attempt while the controller follows it: as events, in the bucket, and to `notify`."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from controller.alerts.alert import Alert, AlertRecord, read_alerts, write_alerts
from controller.alerts.checkpoint_watch import CheckpointWatch
from controller.alerts.judge import AlertJudge
from controller.context import Context
from controller.core.clock import InterruptedSleepError
from controller.core.errors import SlipwayError
from controller.core.events import Event
from controller.plan.build import Plan
from controller.records.ledger import Launch, Ledger

CLOSE_SECONDS = 30.0
"""Maximum wait at the end of an attempt for notifications that are being sent."""


class AlertWatch:
    """Watches one attempt. Events are judged as they come; whatever may wait for a network is done by a thread."""

    def __init__(
        self, plan: Plan, context: Context, ledger: Ledger, launched: Launch, notify: Callable[[Alert], None]
    ) -> None:
        self._context, self._ledger, self._run_id = context, ledger, plan.run_id
        self._attempt, self._launched, self._notify = launched.attempt, launched.time, notify
        known = read_alerts(ledger)
        config = plan.config
        self._judge = AlertJudge(
            config.alerts,
            launched.time,
            config.checkpoint.save_interval if config.program.kind == "trainer" else None,
            known.alerts if known.attempt == launched.attempt else (),
        )
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()

    @contextmanager
    def watching(self) -> Iterator[Self]:
        """Watch while the context is open."""
        worker = threading.Thread(target=self._work, daemon=True, name="alerts")
        worker.start()
        self._checkpoints = CheckpointWatch(self._newest_checkpoint, lambda: self._judge.step)
        self._context.events.add_listener(self._hear)
        try:
            yield self
        finally:
            self._context.events.remove_listener(self._hear)
            self._checkpoints.close()
            self._report()
            self._jobs.put(None)
            worker.join(CLOSE_SECONDS)

    def tick(self, idle_seconds: float) -> None:
        """Judge how long the workers have been silent and the newest checkpoint, and report what has changed."""
        now = self._context.clock.now()
        self._judge.add_silence(idle_seconds, now)
        if (found := self._checkpoints.pop()) is not None:
            self._judge.add_checkpoint(*found, now)
        self._report()

    def end(self) -> None:
        """The attempt has ended, and all its alerts with it; the events say so, the screen need not."""
        self._report()
        self._judge.end_all(self._context.clock.now())
        self._report(says=False)

    def _hear(self, event: Event) -> None:
        """Judge an event; a listener must not emit any itself, so `tick` reports."""
        if event.subject != self._run_id:
            return
        if event.kind == "log":
            self._judge.add_output(event.time)
        elif event.kind == "metrics":
            line = event.data["metrics"]
            written = line.get("time")
            if isinstance(written, int | float) and written < self._launched:
                return  # metrics.jsonl has the lines of earlier attempts too
            self._judge.add_metrics(line, event.time)

    def _report(self, *, says: bool = True) -> None:
        changes = self._judge.pop_changes()
        for alert in changes:
            over = alert.ended is not None
            message = "" if not says else f"{alert.name} is over" if over else str(alert)
            about = {"alert": alert.name, "over": over, "attempt": self._attempt}
            self._context.events.emit("alert", self._run_id, message, **about)
            if not over:
                self._jobs.put(lambda alert=alert: self._notify(alert))
        if changes:
            record = AlertRecord(self._attempt, self._judge.alerts)
            self._jobs.put(lambda: write_alerts(self._ledger, record))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except InterruptedSleepError:
                return  # Ctrl-C, or another controller has taken over
            except SlipwayError as error:
                self._context.events.note(self._run_id, f"warning: the alerts were not recorded: {error}")

    def _newest_checkpoint(self) -> tuple[int, float] | None:
        newest = max(self._ledger.checkpoints(), default=None)
        written = None if newest is None else self._ledger.checkpoint_time(newest)
        return None if newest is None or written is None else (newest, written)
