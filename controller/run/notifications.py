"""Tell people about a run: a webhook, and a function of the user's own. Whoever drives the run sends it.

A notification that fails is a warning in the run's events, and nothing else: no run ends because of it.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypedDict

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from conf.extension import load
from conf.schema.run.notify import Event
from controller.alerts.alert import Alert
from controller.context import Context
from controller.core.clock import InterruptedSleepError
from controller.inputs.modules import on_search_path
from controller.inputs.secrets import Vault, address_problem
from controller.plan.build import Plan
from controller.records.ledger import Result

ATTEMPTS = 4
TIMEOUT_SECONDS = 5.0
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses of a server that may answer later."""
MAX_RESULTS = 12
"""Results that the text names; the field `results` has all."""


class Notification(TypedDict):
    """What a webhook and a notifier get. `text` is all that Slack shows."""

    text: str
    event: Event
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

    def _notify(self, event: Event, said: str, verdict: str, results: Mapping[str, Any]) -> None:
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
    data = json.dumps(content, default=str).encode()
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
