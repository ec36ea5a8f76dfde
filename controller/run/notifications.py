"""Tell people about a run: alerts while the controller follows it, a webhook, and a function of the user's own.

Whoever drives the run tells. A notification that fails is a warning in the run's events, and nothing else: no run ends
because of it.
"""

import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self, TypedDict

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from conf.extension import load
from conf.schema.run_sections import Event as NotifyEvent
from conf.strict_json import dumps
from controller.alerts import AlertJudge
from controller.context import Context
from controller.core.errors import SlipwayError
from controller.core.events import Event
from controller.core.this_process import Clock, InterruptedSleepError
from controller.inputs.env_inputs import Vault, address_problem
from controller.inputs.modules import on_search_path
from controller.plan.build import Plan
from controller.records.ledger import Alert, AlertRecord, Launch, Ledger, Result, read_alerts, write_alerts

POLL_SECONDS = 60.0


class CheckpointWatch:
    """The newest checkpoint, looked for once a minute."""

    def __init__(
        self,
        clock: Clock,
        look: Callable[[], tuple[int, float] | None],
        step: Callable[[], float],
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """Start to watch.

        Args:
            clock: what its pauses go by.
            look: returns step and time of the newest checkpoint, or None if there is none.
            step: returns the last step that the program has reported.
            poll_seconds: time between two questions.
        """
        self._clock, self._look, self._step, self._poll_seconds = clock, look, step, poll_seconds
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._found: tuple[tuple[int, float] | None, float] | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True, name="checkpoint-watch")
        self._thread.start()

    def pop(self) -> tuple[tuple[int, float] | None, float] | None:
        """Return the newest checkpoint and the step of the program when the bucket was asked; None without news."""
        with self._lock:
            found, self._found = self._found, None
        return found

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._clock.wait(self._closed, self._poll_seconds):
            step = self._step()
            try:
                newest = self._look()
            except InterruptedSleepError:
                return
            except SlipwayError:
                continue  # unknown; whoever needs the bucket to go on reports that it does not answer
            with self._lock:
                self._found = newest, step


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
        self._checkpoints = CheckpointWatch(self._context.clock, self._newest_checkpoint, lambda: self._judge.step)
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


ATTEMPTS = 4
TIMEOUT_SECONDS = 5.0
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses of a server that may answer later."""
MAX_RESULTS = 12
"""Results that the text names; the field `results` has all."""


class Notification(TypedDict):
    """What a webhook and a notifier get. `text` is all that Slack shows."""

    text: str
    event: NotifyEvent
    run: str
    pod: str
    verdict: str
    results: Mapping[str, Any]


class Notifications:
    """Sends the events of one run, as `notify` in its config says."""

    def __init__(self, plan: Plan, context: Context) -> None:
        self._plan, self._context, self._settings = plan, context, plan.config.notify

    def run_ended(self, result: Result) -> None:
        """Tell of a finished run."""
        named = [f"{name} {_short(value)}" for name, value in list(result.summary.items())[:MAX_RESULTS]]
        said = f"finished after {result.seconds / 60:.1f} min" + (f": {', '.join(named)}" if named else "")
        self._notify("end", said, result.outcome, result.summary)

    def run_failed(self, error: str) -> None:
        """Tell of a run that ended without a result."""
        self._notify("failure", f"failed: {error.splitlines()[0] if error else 'unknown reason'}", error, {})

    def pod_preempted(self, summary: str) -> None:
        """Tell of a pod that Google took away; the run goes on."""
        self._notify("preemption", f"preempted: {summary}", summary, {})

    def alert_raised(self, alert: Alert) -> None:
        """Tell of an alert; the run goes on."""
        self._notify("alert", f"alert: {alert}", str(alert), {})

    def _notify(self, event: NotifyEvent, said: str, verdict: str, results: Mapping[str, Any]) -> None:
        if event not in self._settings.events:
            return
        plan = self._plan
        text = f"{plan.run_id} on {plan.node.name}: {said}"
        content = Notification(
            text=text, event=event, run=plan.run_id, pod=plan.node.name, verdict=verdict, results=dict(results)
        )
        if self._settings.webhook is not None:
            self._attempt("notify.webhook", lambda: self._post(content))
        if self._settings.notifier is not None:
            self._attempt("notify.notifier", lambda: self._call(content))

    def _attempt(self, key: str, send: Callable[[], None]) -> None:
        """Send; whatever goes wrong in a webhook or in code of the user's own is a warning."""
        try:
            send()
        except InterruptedSleepError:
            raise  # Ctrl-C, or another controller has taken over
        except Exception as error:
            reason = f"{type(error).__name__}: {error}" if key == "notify.notifier" else str(error)
            self._context.events.note(self._plan.run_id, f"warning: {key}: nobody was notified: {reason}")

    def _call(self, content: Notification) -> None:
        assert self._settings.notifier is not None
        with on_search_path(self._plan.config, Path.cwd(), self._plan.snapshot.root):
            load("notifier", self._settings.notifier, "notify.notifier")(content)

    def _post(self, content: Notification) -> None:
        vault = Vault({"webhook": self._settings.webhook}, section="notify")
        vault.load(self._context.google)
        post_json(vault.values()["webhook"], content, self._context.clock.sleep)


class WebhookError(Exception):
    """A webhook did not accept a notification. The message does not contain its address, which is a secret."""


def post_json(url: str, content: Mapping[str, Any], sleep: Callable[[float], None]) -> None:
    """Post JSON to a webhook, again if the server is busy or does not answer. Raises WebhookError."""
    if (problem := address_problem(url)) != "":
        raise WebhookError(problem)
    data = dumps(content, default=str).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - http(s), checked

    def send() -> None:
        try:
            urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS).close()  # noqa: S310
        except urllib.error.HTTPError as error:
            error.close()
            raise

    retrying = Retrying(
        retry=retry_if_exception(_may_pass),
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_exponential(multiplier=1, max=10),
        sleep=sleep,
        reraise=True,
    )
    try:
        retrying(send)
    except urllib.error.HTTPError as error:
        raise WebhookError(f"the webhook answered {error.code} {error.reason}") from None
    except HTTPException as error:  # its message may repeat the address
        raise WebhookError(f"the webhook did not answer in HTTP: {type(error).__name__}") from None
    except OSError as error:  # URLError and timeouts too
        raise WebhookError(f"the webhook cannot be reached: {getattr(error, 'reason', error)}") from None


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code in RETRIED
    return isinstance(error, OSError)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
