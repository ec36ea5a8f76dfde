"""The lease of a pod: of two controllers one acts at a time, whatever the order of their steps and of what is lost."""

import contextlib
import threading
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller import lease as leases
from controller.core.errors import CloudError, LeaseLostError
from controller.core.this_process import InterruptedSleepError
from controller.gcp.google_errors import GoogleError, NotFoundError
from controller.lease import ASK_AGAIN_SECONDS, SAFETY_MARGIN, Lease, LeaseHeldError, ReleaseRequestedError
from controller.lease_store import Identity, LeaseRecord, ReleaseRequest
from tests.fakes.clock import ManualClock
from tests.fakes.leases import TERM, FakeFile, Skewed, last_words, lease


def never() -> None:
    raise AssertionError("fenced")


@pytest.fixture
def time() -> ManualClock:
    return ManualClock()


@pytest.fixture
def file(time: ManualClock) -> FakeFile:
    return FakeFile(time)


def test_the_first_one_acts_and_the_second_one_is_told_who_does(file: FakeFile) -> None:
    first, second = lease(file, "anna"), lease(file, "ben")
    assert not second.is_held_by_other(second.read())
    for _ in range(1000):
        assert first.ensure() == 1
    assert file.writes == 1, "to be sure of it costs nothing"
    assert first.current_other() is None
    # What is read once says who had it and whether it is to be had: read twice, it might be two holders.
    held = second.read()
    assert (second.is_held_by_other(held), first.is_held_by_other(held)) == (True, False)
    with pytest.raises(LeaseHeldError, match=r"anna@host \(laptop\) for run-1 since"):
        second.ensure()


def two_on_two_pods(time: ManualClock) -> tuple[Lease, Lease, list[FakeFile]]:
    """Two controllers with a pod of their own, which want the same run."""
    files = run, pod_a, pod_b = [FakeFile(time) for _ in range(3)]
    anna = lease(pod_a, "anna", first=lease(run, "anna", what="run"))
    return anna, lease(pod_b, "ben", first=lease(run, "ben", what="run")), files


def test_a_run_has_one_controller_on_all_pods(time: ManualClock) -> None:
    anna, ben, (run, pod_a, pod_b) = two_on_two_pods(time)
    anna.check()
    assert (run.writes, pod_a.writes, anna.held) == (0, 0, False), "a check acquires nothing"
    anna.ensure()
    for ask in (ben.check, ben.ensure):
        with pytest.raises(LeaseHeldError, match=r"anna@host \(laptop\) for run-1 since .* controls this run"):
            ask()
    assert pod_b.writes == 0, "nothing is changed on a pod whose run belongs to another controller"
    time.elapsed += TERM
    assert ben.ensure() == 1
    for ask in (anna.check, anna.ensure):
        with pytest.raises(LeaseLostError, match="ben@host"):  # of the run; its pod is free
            ask()
    with pytest.raises(LeaseLostError):
        anna.raise_if_lost()
    ben.release("finished", 0)
    assert [last_words(file).released for file in (run, pod_b)] == [True, True]


def test_who_was_silent_for_a_term_is_followed_and_fenced(time: ManualClock, file: FakeFile) -> None:
    woken = threading.Event()
    first, second = lease(file, "anna", woken.set), lease(file, "ben")
    first.ensure()
    time.elapsed += TERM - 1
    with pytest.raises(LeaseHeldError):
        second.ensure()
    time.elapsed += 1
    assert second.ensure() == 2
    with pytest.raises(LeaseLostError, match="ben@host"):
        first.ensure()
    assert woken.is_set()
    time.elapsed += 10 * TERM
    with pytest.raises(LeaseLostError):  # for good, though the lease is free again
        first.ensure()


@pytest.mark.parametrize("first_back", ["anna", "ben"])
def test_after_an_outage_of_days_one_of_two_acts(time: ManualClock, file: FakeFile, first_back: str) -> None:
    """While the bucket is down nobody acts and nobody takes over; then the first writer holds the lease."""
    both = {name: lease(file, name) for name in ("anna", "ben")}
    both["anna"].ensure()
    file.down = True
    for _ in range(3 * 24):
        time.elapsed += 3600
        for controller in both.values():
            with pytest.raises(GoogleError):
                controller.ensure()
            controller.raise_if_lost()  # an outage alone fences nobody
    file.down = False
    last = "ben" if first_back == "anna" else "anna"
    both[first_back].ensure()
    with pytest.raises((LeaseHeldError, LeaseLostError), match=f"{first_back}@host"):
        both[last].ensure()
    time.elapsed += TERM / 2
    assert both[first_back].ensure() == last_words(file).token


def test_neither_silence_nor_an_outage_nor_a_lost_answer_fences_anybody(time: ManualClock, file: FakeFile) -> None:
    mine = lease(file, fenced=never)
    file.lose_answer = True
    token = mine.ensure()
    time.elapsed += TERM
    file.lose_answer = True
    assert mine.ensure() == token
    time.elapsed += 5 * TERM
    assert mine.ensure() == token, "nobody has followed"
    file.down = True
    mine.ensure()  # still sure
    time.elapsed += TERM * (1 - SAFETY_MARGIN)
    with pytest.raises(GoogleError):  # who cannot ask does not act
        mine.ensure()
    file.down = False
    assert mine.ensure() == token


def test_a_holder_that_is_asked_lets_go_and_says_so(time: ManualClock, file: FakeFile) -> None:
    first, second = lease(file, "anna"), lease(file, "ben")
    first.ensure()
    assert second.request_release("cancelled") is not None
    with pytest.raises(LeaseHeldError):  # it may be in the middle of something
        second.ensure()
    time.elapsed += TERM - 1
    with pytest.raises(ReleaseRequestedError, match="cancelled by ben@host") as asked, first.released_on_exit():
        first.ensure()
    assert asked.value.ends_run
    assert (last_words(file).released, last_words(file).exit_code) == (True, 0)
    assert second.ensure() == 2


@pytest.mark.parametrize(
    ("pod", "said"),
    [("pod-1", "Pod pod-1 and its program go on, .*`slipway down` deletes it"), ("", "`slipway orphans` lists what")],
)
def test_a_controller_without_its_bucket_says_what_goes_on(file: FakeFile, pod: str, said: str) -> None:
    mine = lease(file)
    mine.identity = replace(mine.identity, pod=pod)
    mine.ensure()
    mine._store = cast(Any, GoneFile())
    with pytest.raises(
        LeaseLostError, match=rf"the lease and its bucket no longer exist; this controller stopped\. .*{said}"
    ):
        mine._renew()


class GoneFile:
    """In a bucket that was deleted."""

    def read(self) -> None:
        return None

    def write(self, *_: object) -> int:
        raise NotFoundError("insert", 404, "notFound", "the bucket does not exist")


def test_one_that_is_asked_again_has_its_next_term(file: FakeFile) -> None:
    """A request is to one controller: the next holder, and the same command again, do not find it meant for them."""
    lease(file, "anna").ensure()
    lease(file, "ben").request_release("cancelled")
    file.time.elapsed += TERM
    again = lease(file, "anna-again", fenced=never)
    again.listen()
    assert again.ensure() == 2
    file.time.elapsed += TERM
    assert again.ensure() == 2


@pytest.mark.parametrize(
    ("listens", "waited", "asks", "obeys"),
    [
        (True, 5.0, "down", True),
        (True, 0.05, "down", False),  # by the server's clock it may have been asked before this one began
        (False, 5.0, "down", False),  # a second `down` is not ended by the first
        (True, 5.0, "anna", False),
    ],
)
def test_all_that_have_begun_are_asked_before_they_hold_the_lease(
    file: FakeFile, listens: bool, waited: float, asks: str, obeys: bool
) -> None:
    file.time.elapsed = 100.4
    starting = lease(file, "anna")
    if listens:
        starting.listen()
    file.time.elapsed += waited
    lease(file, asks).request_from_all("deleted")
    if not obeys:
        assert starting.ensure() == 1
        return
    with pytest.raises(ReleaseRequestedError, match="deleted by down@host") as asked:
        starting.ensure()
    assert asked.value.ends_run
    starting.release("deleted", 0)
    assert (last_words(file).released, last_words(file).asked) == (True, "deleted by down@host")
    file.time.elapsed += 0.1
    afterwards = lease(file, "anna-again", fenced=never)
    afterwards.listen()
    file.time.elapsed += TERM
    assert afterwards.ensure() == 2


def test_a_request_that_is_overwritten_is_made_again(time: ManualClock, file: FakeFile) -> None:
    first, second = lease(file, "anna"), lease(file, "ben")
    first.ensure()

    def renew() -> None:
        first._renew()
        if time.elapsed < 5:
            file.write_request(ReleaseRequest("taken over by cleo@host", "cleo", "nobody"))
        else:
            with contextlib.suppress(ReleaseRequestedError):
                first.obey_requests()
                return
            first.release()
            time.on_sleep = lambda: None

    time.on_sleep = renew
    assert second.await_release("cancelled")
    assert ASK_AGAIN_SECONDS <= time.elapsed < ASK_AGAIN_SECONDS + 3
    assert not second.await_release("cancelled")


def test_whoever_takes_over_waits_for_the_lease_of_the_run_as_well(time: ManualClock) -> None:
    """Its holder releases that of the pod first; a third controller that drives the run elsewhere is not waited for."""
    run, pod = FakeFile(time), FakeFile(time)
    anna = lease(pod, "anna", first=lease(run, "anna", what="run"))
    anna.ensure()
    asked, ended = lease(pod, "ben", first=lease(run, "ben", what="run")), list[float]()
    assert anna._first is not None
    release = anna._first.release
    anna._first.release = lambda *_: ended.append(time.elapsed + 3)  # type: ignore[method-assign]

    def obey() -> None:
        if anna.held:
            with contextlib.suppress(ReleaseRequestedError):
                anna.obey_requests()
                return
            anna.release()
        elif time.elapsed >= ended[0]:
            time.on_sleep = lambda: None
            release()

    time.on_sleep = obey
    asked.take_over("taken over")
    assert ended[0] <= time.elapsed < ended[0] + 3
    cleo = lease(FakeFile(time), "cleo", first=lease(run, "cleo", what="run"))
    with pytest.raises(LeaseHeldError, match="ben@host"):
        cleo.take_over("taken over")


def test_the_last_write_waits_for_the_bucket_though_the_clock_does_not(
    file: FakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked would wait for the whole term: the client cannot wait out a 429 after an interrupt."""
    monkeypatch.setattr(leases, "WRITE_SECONDS", 0.01)
    mine = lease(file)
    mine.ensure()
    real, refused = file.write, [InterruptedSleepError()]

    def write(term: LeaseRecord, generation: int) -> int:
        if refused:
            raise refused.pop()
        return real(term, generation)

    monkeypatch.setattr(file, "write", write)
    mine.release("deleted", 0)
    assert (last_words(file).released, last_words(file).said) == (True, "deleted")


def test_one_that_is_asked_and_dead_is_waited_for(time: ManualClock, file: FakeFile) -> None:
    first, second = lease(file, "anna"), lease(file, "ben")
    first.ensure()
    told: list[str] = []
    second.take_over("taken over", told.append)
    assert "anna@host" in told[0]
    assert time.elapsed >= TERM
    assert (second.held, last_words(file).id) == (True, "ben")
    with pytest.raises(LeaseLostError):
        first.ensure()


@pytest.mark.parametrize(
    ("error", "drives", "said", "code"),
    [
        (LeaseLostError("no more money"), True, "no more money", 8),
        (CloudError("the network is in use"), False, "", None),  # of `down`: no concern of an `up` that waits
        (ZeroDivisionError("a bug"), True, None, None),
        (KeyboardInterrupt(), True, None, None),
    ],
)
def test_whatever_ends_the_work_releases_the_lease_and_is_raised(
    file: FakeFile, error: BaseException, drives: bool, said: str | None, code: int | None
) -> None:
    """Last words are left for who watches."""
    mine = lease(file)
    if drives:
        mine.listen()
    mine.ensure()
    with pytest.raises(type(error)), mine.released_on_exit():
        raise error
    last = last_words(file)
    assert last.released
    assert not mine.held
    if said is not None:
        assert (last.said, last.exit_code) == (said, code)


def test_ctrl_c_stays_ctrl_c_where_the_bucket_does_not_answer(
    time: ManualClock, file: FakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted clock ends the retries of the last write as well."""
    mine = lease(file)
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
    alive = me.new_record(1, 0.0, TERM)
    for process, is_dead in (
        (alive.process, False),
        (f"{here}:{which.split('/')[0]}/0", True),
        (f"elsewhere:{which}", False),
        ("", False),
    ):
        assert me.is_known_dead(replace(alive, process=process)) == is_dead


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
    time = ManualClock()
    file = FakeFile(time)
    names = ("anna", "ben", "cleo")
    leases = {name: lease(file, name, clock=Skewed(time, off)) for name, off in zip(names, offs, strict=True)}
    tokens: list[int] = []
    under_way: dict[str, float] = {}
    losses = iter(lost)
    for step in steps:
        if not isinstance(step, tuple):
            time.elapsed += float(str(step))
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
                others = [n for n, end in under_way.items() if n != name and time.elapsed < end]
                assert others == []
                if what == "begin":
                    under_way[name] = time.elapsed + TERM * SAFETY_MARGIN
        except (LeaseHeldError, LeaseLostError):
            continue
        finally:
            file.lose_answer = False
    assert tokens == sorted(tokens), "what was done under an older token came later"
