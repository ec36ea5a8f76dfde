"""Waiting for Google: requests that are refused for now are repeated, and an outage of the bucket is waited out."""

from collections.abc import Callable
from typing import Any, TypeVar

from controller.core.errors import CloudError
from controller.core.this_process import Clock
from controller.gcp.google_errors import UNREACHABLE, GoogleError

ATTEMPTS = 6
FIRST_ATTEMPTS = 4
"""Attempts of a request while Google has never been reached: a machine without a network is told so in seconds."""
TOLD_SECONDS = 20.0
"""Shortest pause between two attempts that is said."""
OUTAGE_SECONDS = 600.0
"""How long a command that has changed nothing yet waits for the bucket to answer."""
OUTAGE_PAUSE_SECONDS = 5.0
"""Between two tries during an outage; each of them is repeated by the client, too."""
T = TypeVar("T")


def wait_out(clock: Clock, act: Callable[[], T], what: str, tell: Callable[[str], object]) -> T:
    """Call a function until Google no longer answers that it cannot serve the request now, and return its value.

    Args:
        clock: measures the wait.
        act: sends requests, each with its own retries.
        what: what does not answer, for messages.
        tell: called once with a message if there is a wait.

    Raises:
        CloudError: there was no other answer within OUTAGE_SECONDS.
        GoogleError: any other error; also if this machine has no network.
    """
    late, is_told = clock.deadline(OUTAGE_SECONDS), False
    while True:
        try:
            return act()
        except GoogleError as error:
            if not error.is_transient or error.reason == UNREACHABLE:
                raise
            answer, minutes = f"{error.status} {error.reason}", f"{OUTAGE_SECONDS / 60:g} minutes"
            if late():
                raise CloudError(
                    f"{what} has answered only {answer} for {minutes} ({error.message}); nothing was changed. Run the "
                    "same command again when it works: https://status.cloud.google.com"
                ) from error
            if not is_told:
                tell(f"{what} answers {answer}; waiting, for at most {minutes}")
                is_told = True
        clock.sleep(OUTAGE_PAUSE_SECONDS)


def outlast(clock: Clock, act: Callable[[], T], what: str, tell: Callable[[str], object], hours: float) -> T:
    """Call a function while a run goes on until the bucket answers, and return its value.

    The function is called again after a request of it has failed, so it must be safe to repeat.

    Args:
        clock: measures the wait.
        act: sends requests, each with its own retries.
        what: what does not answer, for messages.
        tell: called once with a message if there is a wait.
        hours: `checkpoint.max_outage_hours`, how long the program on the workers bridges the outage.

    Raises:
        CloudError: there was no other answer in that time; while this machine has no network, it is not measured.
        GoogleError: any error that waiting does not mend.
    """
    limit, is_told = OutageLimit(clock, what, hours), False
    while True:
        try:
            return act()
        except GoogleError as error:
            if not error.is_transient:
                raise
            limit.check(error)
            if not is_told:
                tell(f"{what} does not answer ({error.message}); the run goes on, waiting")
                is_told = True
        clock.sleep(OUTAGE_PAUSE_SECONDS)


def retry_for_minutes(clock: Clock, act: Callable[[], T]) -> T:
    """Call a function until the bucket answers, for at most OUTAGE_SECONDS, and return its value.

    For what is recorded after a run has ended: nobody waits for it. Raises the last GoogleError that came.
    """
    late = clock.deadline(OUTAGE_SECONDS)
    while True:
        try:
            return act()
        except GoogleError as error:
            if not error.is_transient or late():
                raise
        clock.sleep(OUTAGE_PAUSE_SECONDS)


class OutageLimit:
    """How long a controller waits for the bucket while its run goes on."""

    def __init__(self, clock: Clock, what: str, hours: float) -> None:
        """Prepare; the time begins at the first `check`. Arguments as of `outlast`."""
        self._clock, self._what, self._hours = clock, what, max(hours, OUTAGE_SECONDS / 3600)
        self._late: Callable[[], bool] | None = None

    def check(self, error: GoogleError) -> None:
        """Raise CloudError if errors have come for too long; without a network it is this machine that is cut off."""
        if error.reason == UNREACHABLE:
            return
        if self._late is None:
            self._late = self._clock.deadline(3600 * self._hours)
        elif self._late():
            raise CloudError(
                f"{self._what} has not answered for {self._hours:g} h, the limit (checkpoint.max_outage_hours): "
                f"{error.message}. Nothing that was saved is lost; run the same command again when the bucket answers"
            ) from error


class Retries:
    """Repeats the requests of one client; threads may share it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._patience = FIRST_ATTEMPTS
        """Attempts while the network is down: all once Google was reached, one after giving up before that."""
        self.is_hurried = False
        """Whether something billed is being ended: an API that has just failed all attempts gets one a request."""
        self._failed: set[str] = set()
        self.tell: Callable[[str], object] = lambda message: None
        """Called before a pause that a user notices."""

    def call(self, act: Callable[..., Any], *arguments: Any, api: str = "") -> Any:
        """Call a function until it succeeds or fails for good. Raises its last error.

        Args:
            act: sends one request.
            arguments: its arguments.
            api: the API that it is sent to.
        """
        from tenacity import Retrying, retry_if_exception

        retrying = Retrying(
            stop=lambda state: self._has_tried_enough(state, api),
            wait=_backoff_seconds,
            retry=retry_if_exception(lambda e: isinstance(e, GoogleError) and e.is_transient),
            sleep=self._clock.sleep,
            before_sleep=self._say,
            reraise=True,
        )
        try:
            answer = retrying(act, *arguments)
        except GoogleError as error:
            if error.reason != UNREACHABLE:
                self._patience = ATTEMPTS
            elif self._patience < ATTEMPTS:
                self._patience = 1
            if error.is_transient:
                self._failed.add(api)
            raise
        finally:
            retrying.iter_state.reset()  # else its closures and it refer to each other: garbage with every request
        self._patience = ATTEMPTS
        self._failed.discard(api)
        return answer

    def _has_tried_enough(self, state: Any, api: str) -> bool:
        """Return whether a request that failed for now is not sent again."""
        if self.is_hurried and api in self._failed:
            return True
        error = state.outcome.exception()
        if error.reason != UNREACHABLE:
            self._patience = ATTEMPTS
        return state.attempt_number >= self._patience or (error.retry_after or 0.0) > OUTAGE_SECONDS

    def _say(self, state: Any) -> None:
        if (seconds := _backoff_seconds(state)) >= TOLD_SECONDS:
            self.tell(
                f"Google asks to wait, and the request is repeated in {seconds:.0f} s: {state.outcome.exception()}"
            )


def _backoff_seconds(state: Any) -> float:
    """Return Retry-After, else 1, 2, 4 ... seconds. https://cloud.google.com/storage/docs/retry-strategy."""
    error = state.outcome.exception()
    return error.retry_after or min(2.0 ** (state.attempt_number - 1), 30.0)
