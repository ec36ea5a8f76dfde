"""The lease of a pod: of two controllers one acts at a time, whatever the order of their steps and of what is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.clock import Clock
from controller.core.errors import LeaseLostError
from controller.gcp.errors import ConflictError, GoogleError
from controller.lease.lease import SAFETY_MARGIN, Lease, LeaseHeldError, ReleaseRequestedError
from controller.lease.store import Identity, LeaseRecord, LeaseSnapshot

TERM = 60.0


class Time(Clock):
    """True time, which moves when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.true = 0.0

    def now(self) -> float:
        return self.true

    def boot_time(self) -> float:
        return self.true

    def sleep(self, seconds: float) -> None:
        self.true += seconds


class Skewed(Time):
    """The clock of a machine whose date is off, as somebody set it; its stopwatch is not."""

    def __init__(self, time: Time, off: float) -> None:
        super().__init__()
        self._time, self._off = time, off

    def now(self) -> float:
        return self._time.true + self._off

    def boot_time(self) -> float:
        return self._time.true + 1000 * self._off

    def sleep(self, seconds: float) -> None:
        self._time.sleep(seconds)


class FakeFile:
    """The object in a bucket. `lose_answer`: the next write arrives, and its answer does not; `down`: nothing does."""

    def __init__(self, time: Time) -> None:
        self._time = time
        self._term: LeaseRecord | None = None
        self._generation = 0
        self._updated = 0.0
        self.writes = 0
        self.lose_answer = self.down = False

    def read(self) -> LeaseSnapshot | None:
        if self.down:
            raise GoogleError("get", 503, "UNREACHABLE", "no network")
        age = float(int(self._time.true)) - self._updated
        return None if self._term is None else LeaseSnapshot(self._term, self._generation, age)

    def write(self, term: LeaseRecord, generation: int) -> int:
        if self.down:
            raise GoogleError("insert", 503, "UNREACHABLE", "no network")
        if generation != self._generation:
            raise ConflictError("insert", 412, "conditionNotMet", "another generation")
        self._term, self._generation, self._updated = term, self._generation + 1, self._time.true
        self.writes += 1
        if self.lose_answer:
            self.lose_answer = False
            return self.write(term, generation)  # as the client does when it hears nothing
        return self._generation


def never() -> None:
    raise AssertionError("fenced")


def lease(
    file: FakeFile,
    clock: Clock,
    name: str = "me",
    fenced: Callable[[], None] = lambda: None,
    first: Lease | None = None,
    what: str = "pod",
) -> Lease:
    me = Identity("laptop", "run-1", id=name, holder=f"{name}@host", process="")
    made = Lease(file, clock, me, TERM, 3600.0, fenced, what=what, first=first)
    made._renew_loop = lambda stop: None  # type: ignore[method-assign]  # renewals are steps of the test
    return made


def test_the_first_one_acts_and_the_second_one_is_told_who_does() -> None:
    time = Time()
    file = FakeFile(time)
    first, second = lease(file, time, "anna"), lease(file, time, "ben")
    assert first.ensure() == 1
    assert first.current_other() is None
    with pytest.raises(LeaseHeldError, match=r"anna@host \(laptop\) for run-1 since"):
        second.ensure()


def test_a_run_has_one_controller_on_all_pods() -> None:
    """Each of two controllers has a pod of its own; they want the same run."""
    time = Time()
    run, pod_a, pod_b = FakeFile(time), FakeFile(time), FakeFile(time)
    anna = lease(pod_a, time, "anna", first=lease(run, time, "anna", what="run"))
    ben = lease(pod_b, time, "ben", first=lease(run, time, "ben", what="run"))
    anna.ensure()
    with pytest.raises(LeaseHeldError, match=r"anna@host \(laptop\) for run-1 since .* controls this run"):
        ben.ensure()
    assert pod_b.writes == 0, "nothing is changed on a pod whose run belongs to another controller"
    time.true += TERM
    assert ben.ensure() == 1
    with pytest.raises(LeaseLostError, match="ben@host"):  # of the run; its pod is free
        anna.ensure()
    with pytest.raises(LeaseLostError):
        anna.raise_if_lost()
    ben.release("finished", 0)
    assert [file.read().record.released for file in (run, pod_b) if file.read()] == [True, True]


def test_a_check_acquires_nothing_and_finds_another_holder() -> None:
    time = Time()
    run, pod = FakeFile(time), FakeFile(time)
    anna = lease(pod, time, "anna", first=lease(run, time, "anna", what="run"))
    ben = lease(pod, time, "ben", first=lease(run, time, "ben", what="run"))
    anna.check()
    assert (run.writes, pod.writes, anna.held) == (0, 0, False)
    anna.ensure()
    with pytest.raises(LeaseHeldError, match=r"anna@host .* controls this run"):
        ben.check()
    time.true += TERM
    ben.ensure()
    with pytest.raises(LeaseLostError, match="ben@host"):
        anna.check()


def test_to_be_sure_of_it_costs_nothing() -> None:
    time = Time()
    file = FakeFile(time)
    mine = lease(file, time)
    for _ in range(1000):
        mine.ensure()
    assert file.writes == 1


def test_who_was_silent_for_a_term_is_followed_and_fenced() -> None:
    time, woken = Time(), threading.Event()
    file = FakeFile(time)
    first, second = lease(file, time, "anna", woken.set), lease(file, time, "ben")
    first.ensure()
    time.true += TERM - 1
    with pytest.raises(LeaseHeldError):
        second.ensure()
    time.true += 1
    assert second.ensure() == 2
    with pytest.raises(LeaseLostError, match="ben@host"):
        first.ensure()
    assert woken.is_set()
    time.true += 10 * TERM
    with pytest.raises(LeaseLostError):  # for good, though the lease is free again
        first.ensure()


def test_who_was_silent_and_is_not_followed_goes_on() -> None:
    time = Time()
    file = FakeFile(time)
    mine = lease(file, time, fenced=never)
    mine.ensure()
    time.true += 5 * TERM
    assert mine.ensure() == 1


@pytest.mark.parametrize("first_back", ["anna", "ben"])
def test_after_an_outage_of_days_one_of_two_acts(first_back: str) -> None:
    """While the bucket is down nobody acts and nobody takes over; then the first writer holds the lease."""
    time = Time()
    file = FakeFile(time)
    both = {name: lease(file, time, name) for name in ("anna", "ben")}
    both["anna"].ensure()
    file.down = True
    for _ in range(3 * 24):
        time.true += 3600
        for controller in both.values():
            with pytest.raises(GoogleError):
                controller.ensure()
            controller.raise_if_lost()  # an outage alone fences nobody
    file.down = False
    last = "ben" if first_back == "anna" else "anna"
    both[first_back].ensure()
    with pytest.raises((LeaseHeldError, LeaseLostError), match=f"{first_back}@host"):
        both[last].ensure()
    time.true += TERM / 2
    assert both[first_back].ensure() == file.read().record.token  # type: ignore[union-attr]


def test_who_cannot_ask_does_not_act() -> None:
    time = Time()
    file = FakeFile(time)
    mine = lease(file, time, fenced=never)
    mine.ensure()
    file.down = True
    mine.ensure()  # still sure
    time.true += TERM * (1 - SAFETY_MARGIN)
    with pytest.raises(GoogleError):
        mine.ensure()
    file.down = False
    assert mine.ensure() == 1


def test_an_answer_that_is_lost_fences_nobody() -> None:
    time = Time()
    file = FakeFile(time)
    mine = lease(file, time, fenced=never)
    file.lose_answer = True
    token = mine.ensure()
    time.true += TERM
    file.lose_answer = True
    assert mine.ensure() == token


def test_a_holder_that_is_asked_lets_go_and_says_so() -> None:
    time = Time()
    file = FakeFile(time)
    first, second = lease(file, time, "anna"), lease(file, time, "ben")
    first.ensure()
    assert second.request_release("cancelled") is not None
    with pytest.raises(LeaseHeldError):  # it may be in the middle of something
        second.ensure()
    time.true += TERM - 1
    with pytest.raises(ReleaseRequestedError, match="cancelled by ben@host") as asked, first.released_on_exit():
        first.ensure()
    assert asked.value.ends_run
    last = second.read()
    assert last is not None
    assert (last.record.released, last.record.exit_code) == (True, 0)
    assert second.ensure() == 2


def test_one_that_is_asked_and_dead_is_waited_for() -> None:
    time = Time()
    file = FakeFile(time)
    first, second = lease(file, time, "anna"), lease(file, time, "ben")
    first.ensure()
    told: list[str] = []
    second.take_over("taken over", told.append)
    assert "anna@host" in told[0]
    assert time.true >= TERM
    with pytest.raises(LeaseLostError):
        first.ensure()


def test_last_words_are_left_for_who_watches() -> None:
    time = Time()
    file = FakeFile(time)
    mine = lease(file, time)
    mine.ensure()
    with pytest.raises(LeaseLostError), mine.released_on_exit():
        raise LeaseLostError("no more money")
    seen = mine.read()
    assert seen is not None
    assert (seen.record.said, seen.record.exit_code, seen.record.released) == ("no more money", 8, True)


def test_ctrl_c_stays_ctrl_c_where_the_bucket_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupted clock ends the retries of the last write as well."""
    time = Time()
    file = FakeFile(time)
    mine = lease(file, time)
    mine.ensure()
    time.interrupt()
    monkeypatch.setattr(file, "write", lambda term, generation: time.raise_if_interrupted())
    with pytest.raises(KeyboardInterrupt), mine.released_on_exit():
        raise KeyboardInterrupt
    assert not mine.held


def test_a_process_of_this_machine_that_is_dead_is_not_waited_for() -> None:
    me = Identity("laptop", "run-1")
    here, _, which = me.process.rpartition(":")
    if not here:
        pytest.skip("no /proc here")
    alive, dead = (
        me.new_record(1, 0.0, TERM),
        replace(me.new_record(1, 0.0, TERM), process=f"{here}:{which.split('/')[0]}/0"),
    )
    assert not me.is_known_dead(alive)
    assert me.is_known_dead(dead)
    assert not me.is_known_dead(replace(dead, process=f"elsewhere:{which}"))
    assert not me.is_known_dead(replace(dead, process=""))


STEPS = st.tuples(st.sampled_from(["anna", "ben", "cleo"]), st.sampled_from(["act", "begin", "end", "renew", "leave"]))


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.one_of(STEPS, st.floats(0.1, TERM)), max_size=40),
    st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)),
    st.lists(st.booleans(), max_size=40),
)
def test_no_order_of_steps_lets_two_act(steps: list[object], offs: tuple[float, ...], lost: list[bool]) -> None:
    """Acts of a holder that began while it was sure end before anyone else begins, though they take up to the margin.

    Their clocks differ, answers are lost; each may fall asleep between any two of its steps.
    """
    time = Time()
    file = FakeFile(time)
    leases = {
        name: lease(file, Skewed(time, off), name) for name, off in zip(("anna", "ben", "cleo"), offs, strict=True)
    }
    tokens: list[int] = []
    under_way: dict[str, float] = {}
    losses = iter(lost)
    for step in steps:
        if not isinstance(step, tuple):
            time.true += float(str(step))
            continue
        name, what = step
        mine = leases[name]
        file.lose_answer = next(losses, False)
        try:
            if what == "leave":
                under_way.pop(name, None)
                mine.release()
            elif what == "end":
                under_way.pop(name, None)
            elif what == "renew" and mine.held:
                mine._renew()
            elif what in ("act", "begin"):
                tokens.append(mine.ensure())
                others = [n for n, end in under_way.items() if n != name and time.true < end]
                assert others == []
                if what == "begin":
                    under_way[name] = time.true + TERM * SAFETY_MARGIN
        except (LeaseHeldError, LeaseLostError):
            continue
        finally:
            file.lose_answer = False
    assert tokens == sorted(tokens), "what was done under an older token came later"


def test_what_is_read_once_says_who_had_it_and_whether_it_is_to_be_had() -> None:
    """Read twice, a holder's last words and its successor's term might be taken for each other."""
    time = Time()
    file = FakeFile(time)
    first, second = lease(file, time, "anna"), lease(file, time, "ben")
    assert not second.is_held_by_other(second.read())
    first.ensure()
    held = second.read()
    assert second.is_held_by_other(held)
    assert not first.is_held_by_other(held)
    first.release("cancelled", 0)
    assert not second.is_held_by_other(second.read())
