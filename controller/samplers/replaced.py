"""End the pods of samplers of a run that another run has replaced on the trainer's pod."""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from controller.cloud.connect import open_context
from controller.context import Context
from controller.core.errors import SlipwayError
from controller.core.events import Event
from controller.core.text import object_url
from controller.plan.build import Plan
from controller.records.ledger import Ledger
from controller.records.recorder import RECORD_FILE, RunRecord, read_run_record
from controller.records.restore import plan_from_record, recorded_config
from controller.samplers.ending import end_pods


class ReplacedRuns:
    """Listens for runs that this one stops, and ends their pods of samplers, each run's in a thread of its own."""

    def __init__(self, plan: Plan, keep: Collection[str], context: Context) -> None:
        """Listen to nothing yet.

        Args:
            plan: that of the run that replaces others.
            keep: names of its own pods of samplers, which take over those of the same name.
            context: its context.
        """
        self._plan, self._keep, self._context = plan, keep, context
        self._threads: list[threading.Thread] = []

    @contextmanager
    def ended_on_exit(self) -> Iterator[None]:
        """Listen while the context is open; its end waits until the pods are deleted."""
        self._context.events.add_listener(self)
        try:
            yield
        finally:
            if any(thread.is_alive() for thread in self._threads):
                self._context.events.note(self._plan.run_id, "waiting for another run's pods of samplers to be deleted")
            for thread in self._threads:
                thread.join()

    def __call__(self, event: Event) -> None:
        if event.subject == self._plan.run_id and (other := event.data.get("stopped")):
            thread = threading.Thread(target=self._end, args=(other,), daemon=True, name=f"samplers-of-{other}")
            self._threads.append(thread)
            thread.start()

    def _end(self, run_id: str) -> None:
        try:
            with open_context(self._plan.config, keep_awake=True) as (context, _):
                other = self._plan_of(run_id, context)
                if other is None:
                    return
                why = f"{self._plan.run_id} has replaced its run"
                problems = end_pods(other, context, why, keep=self._keep)
        except SlipwayError as error:
            problems = [f"pods of samplers of {run_id}: {error}"]
        for problem in problems:
            hint = "they end by themselves within about an hour; `slipway orphans` lists what is billed"
            self._context.events.note(self._plan.run_id, f"not deleted: {problem}; {hint}")

    def _plan_of(self, run_id: str, context: Context) -> Plan | None:
        """Return the plan of a run from its record; None if it has no pods of samplers to end.

        Raises:
            SlipwayError: the record is damaged, or something that it names has gone.
        """
        bucket, state = self._plan.bucket, Path(self._plan.config.run.state_dir).expanduser()
        content = Ledger(context.google, bucket, run_id).read(RECORD_FILE)
        if content is None:
            return None
        document = read_run_record(content, object_url(bucket, f"runs/{run_id}/{RECORD_FILE}"))
        if not _has_sampler_pods(document):
            return None
        return plan_from_record(document, recorded_config(document, Path.cwd()), context.google, state)


def _has_sampler_pods(document: RunRecord) -> bool:
    """Return whether a record, perhaps of an older version, has pods of samplers."""
    sampler = (document["config"].get("loop") or {}).get("sampler") or {}
    return bool(sampler.get("pods"))
