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

from controller.core.clock import Clock, Interrupted
from controller.core.errors import Fenced, SlipwayError
from controller.gcp.client import Conflict, GoogleError, NotFound
from controller.lease.store import LeaseFile, Me, Seen, Term

MARGIN = 1 / 6
"""Of a term: how long before its end a controller is no longer sure, so that what it has begun arrives in time."""
ENDINGS = ("cancelled", "deleted", "stopped")
"""How the reason begins for which a holder is to let go, where its run is to end; else another one goes on with it."""
RENEWALS = 4
"""In a term, at least."""


class Held(SlipwayError):
    """Another controller has the lease; nothing was done."""

    exit_code = 2

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        super().__init__(f"{seen.term} acts on this pod")


class Asked(Fenced):
    """The controller was asked to let go, and did. `ends`: so that the run ends, by a verb of that name."""

    def __init__(self, term: Term) -> None:
        self.ends = term.asked.startswith(ENDINGS)
        again = "cancelled; the same command starts it again from its last checkpoint"
        what = again if self.ends else "this controller let go and touches nothing more"
        super().__init__(f"{term.asked}: {what}")


class Lease:
    """What one controller knows of the lease of one pod, or of one sweep. Threads may share it."""

    def __init__(
        self, file: LeaseFile, clock: Clock, me: Me, seconds: float, every: float, fenced: Callable[[], None]
    ) -> None:
        """Nothing is taken yet.

        Args:
            seconds: the term.
            every: how often it is renewed at least, in seconds.
            fenced: called once, from any thread, when another one acts on the pod: whoever sleeps should wake up.
        """
        self._file, self._clock, self.me, self._seconds = file, clock, me, seconds
        self._every, self._fenced = min(every, seconds / RENEWALS), fenced
        self._mine: Term | None = None
        self._generation = 0
        self._sure_until = 0.0
        self._lost: Fenced | None = None
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def held(self) -> bool:
        return self._mine is not None

    def look(self) -> Seen | None:
        """Who has it, this controller excepted; None if it is to be had."""
        seen = self._file.read()
        return seen if self.is_others(seen) else None

    def is_others(self, seen: Seen | None) -> bool:
        """Does what was read say that another controller has it?"""
        return seen is not None and seen.term.id != self.me.id and not self._is_free(seen)

    def last(self) -> Seen | None:
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
        if (mine := self._mine) is not None and self._clock.since_boot() < self._sure_until:
            return mine.token  # without the lock, which a slow renewal may have
        with self._lock:
            self.check()
            if self._mine is None:
                self._take()
            elif self._clock.since_boot() >= self._sure_until:
                self._renew()
            assert self._mine is not None
            return self._mine.token

    def check(self) -> None:
        """Raises Fenced, as far as that is known already; asks nobody."""
        if self._lost is not None:
            raise self._lost

    def take_over(self, why: str, tell: Callable[[str], object] = lambda words: None) -> None:
        """Ask whoever has it to let go, wait for that or for the end of the term, and take it.

        Raises:
            Held: a third one was faster.
        """
        if asked := self.ask(why):
            tell(f"waiting for {asked} to let go")
            while (seen := self.look()) and seen.term.id == asked.id:
                self._clock.sleep(min(1.0, self._every / 2))
        self.hold()

    def ask(self, why: str) -> Term | None:
        """Ask whoever has it to let go; returns whom."""
        while seen := self.look():
            try:
                self._file.write(replace(seen.term, asked=f"{why} by {self.me.holder}"), seen.generation)
            except Conflict:
                continue  # it has renewed meanwhile
            return seen.term
        return None

    def release(self, said: str = "", exit_code: int | None = None) -> None:
        """Let go, with one's last words where what was to be done has come to an end. No error if it is gone."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock, contextlib.suppress(GoogleError):  # then it ends with its term
            if self._mine is not None and (self._lost is None or isinstance(self._lost, Asked)):
                last = replace(self._mine, released=True, said=said, exit_code=exit_code)
                self._file.write(last, self._generation)
        self._mine = self._thread = None
        self._stop = threading.Event()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Let go at the end of this, whatever happens; an error's words are the last ones."""
        try:
            yield
        except Asked as error:
            self.release(str(error), 0 if error.ends else None)
            raise
        except SlipwayError as error:
            self.release(str(error), error.exit_code)
            raise
        except BaseException:
            self.release()
            raise
        self.release()

    def _is_free(self, seen: Seen) -> bool:
        return seen.free(self.me.knows_gone(seen.term))

    def _take(self) -> None:
        while True:
            began = self._clock.since_boot()
            seen = self._file.read()
            if seen is not None and seen.term.id != self.me.id and not self._is_free(seen):
                raise Held(seen)
            token, generation = (seen.term.token + 1, seen.generation) if seen else (1, 0)
            term = self.me.term(token, self._clock.now(), self._seconds)
            try:
                self._written(term, generation, began)
            except Conflict:
                continue  # somebody else was faster, or our own request came twice
            self._thread = threading.Thread(target=self._keep, args=(self._stop,), daemon=True, name="lease")
            self._thread.start()
            return

    def _renew(self) -> None:
        assert self._mine is not None
        while True:
            began = self._clock.since_boot()
            try:
                return self._written(self._mine, self._generation, began)
            except (Conflict, NotFound):
                seen = self._file.read()
            if seen is None:
                raise self._lose(Fenced("the lease is gone, and its bucket with it; this controller stopped"))
            if (seen.term.id, seen.term.token) != (self._mine.id, self._mine.token):
                words = "acts now; this controller stopped and touches nothing more"
                raise self._lose(Fenced(f"{seen.term} {words}"))
            self._generation = seen.generation
            if seen.term.asked:
                raise self._lose(Asked(seen.term))
            # Our own request had arrived, though its answer had not.

    def _lose(self, error: Fenced) -> Fenced:
        self._lost = error
        self._fenced()
        return error

    def _written(self, term: Term, generation: int, began: float) -> None:
        self._generation = self._file.write(term, generation)
        self._mine, self._sure_until = term, began + self._seconds * (1 - MARGIN)

    def _keep(self, stop: threading.Event) -> None:
        """Renew until it is released or lost; what passes is left to the next time."""
        while not stop.wait(self._every):
            with self._lock:
                if stop.is_set() or self._mine is None:
                    return
                try:
                    self._renew()
                except (Fenced, Interrupted):
                    return
                except SlipwayError:
                    continue  # whoever acts will hear of it, unless it passes
