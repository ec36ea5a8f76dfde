"""One acting controller per pod: the lease is taken before the first act, renewed, and asked about before each act.

A controller is sure of its lease for a little less than its term after it last wrote it, by a clock of its own that no
one sets; another one may take it only when the server says that the whole term has passed. So the two never overlap,
however their clocks differ. Who was stopped, asleep or cut off for longer finds that out before its next act: it asks
for the lease again, and where another one has it, it is fenced and ends. What reaches a worker late is refused there
by its smaller token (controller/agent/main.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from controller.core.clock import Clock, InterruptedSleepError
from controller.core.errors import LeaseLostError, SlipwayError
from controller.gcp.client import ConflictError, GoogleError, NotFoundError
from controller.lease.store import Identity, LeaseRecord, LeaseSnapshot, LeaseStore

SAFETY_MARGIN = 1 / 6
"""Of a term: how long before its end a controller is no longer sure, so that what it has begun arrives in time."""
RUN_ENDING_REASONS = ("cancelled", "deleted", "stopped")
"""How the reason begins for which a holder is to let go, where its run is to end; else another one goes on with it."""
RENEWALS_PER_TERM = 4
"""In a term, at least."""


class LeaseHeldError(SlipwayError):
    """Another controller has the lease; nothing was done."""

    exit_code = 2

    def __init__(self, seen: LeaseSnapshot) -> None:
        self.seen = seen
        super().__init__(f"{seen.term} acts on this pod")


class ReleaseRequestedError(LeaseLostError):
    """The controller was asked to let go, and did. `ends`: so that the run ends, by a verb of that name."""

    def __init__(self, term: LeaseRecord) -> None:
        self.ends = term.asked.startswith(RUN_ENDING_REASONS)
        again = "cancelled; the same command starts it again from its last checkpoint"
        what = again if self.ends else "this controller let go and touches nothing more"
        super().__init__(f"{term.asked}: {what}")


class Lease:
    """What one controller knows of the lease of one pod, or of one sweep. Threads may share it."""

    def __init__(
        self, file: LeaseStore, clock: Clock, me: Identity, seconds: float, every: float, fenced: Callable[[], None]
    ) -> None:
        """Nothing is taken yet.

        Args:
            seconds: the term.
            every: how often it is renewed at least, in seconds.
            fenced: called once, from any thread, when another one acts on the pod: whoever sleeps should wake up.
        """
        self._file, self._clock, self.me, self._seconds = file, clock, me, seconds
        self._renew_seconds, self._fenced = min(every, seconds / RENEWALS_PER_TERM), fenced
        self._mine: LeaseRecord | None = None
        self._generation = 0
        self._valid_until = 0.0
        self._lost_error: LeaseLostError | None = None
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def held(self) -> bool:
        return self._mine is not None

    def look(self) -> LeaseSnapshot | None:
        """Who has it, this controller excepted; None if it is to be had."""
        seen = self._file.read()
        return seen if self.is_held_by_other(seen) else None

    def is_held_by_other(self, seen: LeaseSnapshot | None) -> bool:
        """Does what was read say that another controller has it?"""
        return seen is not None and seen.term.id != self.me.id and not self._is_free(seen)

    def last(self) -> LeaseSnapshot | None:
        """What lies there, whoever left it."""
        return self._file.read()

    def hold(self) -> int:
        """Be sure of the lease: to be called before each act. Costs nothing while that is so; returns the token.

        Raises:
            Held: another controller has it, and we never had.
            Fenced: we had it, and another one has it now, or we were asked to let go; for good.
            GoogleError: it cannot be known.
        """
        self.check()
        if (mine := self._mine) is not None and self._clock.boot_time() < self._valid_until:
            return mine.token  # without the lock, which a slow renewal may have
        with self._lock:
            self.check()
            if self._mine is None:
                self._take()
            elif self._clock.boot_time() >= self._valid_until:
                self._renew()
            assert self._mine is not None
            return self._mine.token

    def check(self) -> None:
        """Raises Fenced, as far as that is known already; asks nobody."""
        if self._lost_error is not None:
            raise self._lost_error

    def take_over(self, why: str, tell: Callable[[str], object] = lambda words: None) -> None:
        """Ask whoever has it to let go, wait for that or for the end of the term, and take it.

        Raises:
            Held: a third one was faster.
        """
        if asked := self.ask(why):
            tell(f"waiting for {asked} to let go")
            while (seen := self.look()) and seen.term.id == asked.id:
                self._clock.sleep(min(1.0, self._renew_seconds / 2))
        self.hold()

    def ask(self, why: str) -> LeaseRecord | None:
        """Ask whoever has it to let go; returns whom."""
        while seen := self.look():
            try:
                self._file.write(replace(seen.term, asked=f"{why} by {self.me.holder}"), seen.generation)
            except ConflictError:
                continue  # it has renewed meanwhile
            return seen.term
        return None

    def release(self, said: str = "", exit_code: int | None = None) -> None:
        """Let go, with one's last words where what was to be done has come to an end. No error if it is gone."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock, contextlib.suppress(GoogleError):  # then it ends with its term
            if self._mine is not None and (
                self._lost_error is None or isinstance(self._lost_error, ReleaseRequestedError)
            ):
                last = replace(self._mine, released=True, said=said, exit_code=exit_code)
                self._file.write(last, self._generation)
        self._mine = self._thread = None
        self._stop = threading.Event()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Let go at the end of this, whatever happens; an error's words are the last ones."""
        try:
            yield
        except ReleaseRequestedError as error:
            self.release(str(error), 0 if error.ends else None)
            raise
        except SlipwayError as error:
            self.release(str(error), error.exit_code)
            raise
        except BaseException:
            self.release()
            raise
        self.release()

    def _is_free(self, seen: LeaseSnapshot) -> bool:
        return seen.free(self.me.is_known_dead(seen.term))

    def _take(self) -> None:
        while True:
            began = self._clock.boot_time()
            seen = self._file.read()
            if seen is not None and seen.term.id != self.me.id and not self._is_free(seen):
                raise LeaseHeldError(seen)
            token, generation = (seen.term.token + 1, seen.generation) if seen else (1, 0)
            term = self.me.term(token, self._clock.now(), self._seconds)
            try:
                self._write(term, generation, began)
            except ConflictError:
                continue  # somebody else was faster, or our own request came twice
            self._thread = threading.Thread(target=self._keep, args=(self._stop,), daemon=True, name="lease")
            self._thread.start()
            return

    def _renew(self) -> None:
        assert self._mine is not None
        while True:
            began = self._clock.boot_time()
            try:
                return self._write(self._mine, self._generation, began)
            except (ConflictError, NotFoundError):
                seen = self._file.read()
            if seen is None:
                raise self._mark_lost(
                    LeaseLostError("the lease is gone, and its bucket with it; this controller stopped")
                )
            if (seen.term.id, seen.term.token) != (self._mine.id, self._mine.token):
                words = "acts now; this controller stopped and touches nothing more"
                raise self._mark_lost(LeaseLostError(f"{seen.term} {words}"))
            self._generation = seen.generation
            if seen.term.asked:
                raise self._mark_lost(ReleaseRequestedError(seen.term))
            # Our own request had arrived, though its answer had not.

    def _mark_lost(self, error: LeaseLostError) -> LeaseLostError:
        self._lost_error = error
        self._fenced()
        return error

    def _write(self, term: LeaseRecord, generation: int, began: float) -> None:
        self._generation = self._file.write(term, generation)
        self._mine, self._valid_until = term, began + self._seconds * (1 - SAFETY_MARGIN)

    def _keep(self, stop: threading.Event) -> None:
        """Renew until it is released or lost; what passes is left to the next time."""
        while not stop.wait(self._renew_seconds):
            with self._lock:
                if stop.is_set() or self._mine is None:
                    return
                try:
                    self._renew()
                except (LeaseLostError, InterruptedSleepError):
                    return
                except SlipwayError:
                    continue  # whoever acts will hear of it, unless it passes
