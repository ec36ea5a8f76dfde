"""What process 0 finds while it waits for a rollout, and what all processes make of it."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conf.formats import RunFileError
from trainer.checkpoint.outage import ReplacedError
from trainer.distributed.checksums import CorruptionError
from trainer.distributed.preemption import PREEMPTED_EXIT_CODE, PreemptedError
from trainer.rl.remote.journal import DrawnSample, encode
from trainer.rl.remote.leases import (
    REPORT_SECONDS,
    SILENCE_LIMIT_SECONDS,
    Leases,
    Presence,
    SamplersLostError,
    TaskLostError,
)
from trainer.rl.remote.server import RolloutServer
from trainer.rl.remote.source import RemoteRollouts
from trainer.rl.remote.wire import Channel

EMPTY = SimpleNamespace(read=lambda _: None)


def bare(**members: Any) -> Any:
    """Rollouts with these members only."""
    made = object.__new__(RemoteRollouts)
    loop = SimpleNamespace(replay=None, replay_routes=False, prompts_per_step=1, updates_per_rollout=1, group_size=2)
    members = {"loop": loop, "first": True, "server": None, "journal": EMPTY} | members
    vars(made).update({f"_{name}": value for name, value in members.items()})
    return made


DRAWN = DrawnSample(np.arange(3, dtype=np.int32), np.ones(3, np.float32), np.zeros(3, np.int32), np.ones(4), True)
SERVER = SimpleNamespace(begin_wait=lambda: None, wait=lambda *_: [DRAWN] * 2, report_silence=lambda: None)


def raises(error: Exception) -> Any:
    def act(*_: object) -> None:
        raise error

    return act


@pytest.mark.parametrize("error", [TaskLostError("prompts 0 to 1"), SamplersLostError("worker 3")])
def test_errors_of_the_samplers_are_raised_by_all(error) -> None:
    fails = {TaskLostError: {"wait": raises(error)}, SamplersLostError: {"report_silence": raises(error)}}[type(error)]
    server = SimpleNamespace(**vars(SERVER) | {"wait": lambda *_: None} | fails)
    with pytest.raises(type(error), match=str(error)):
        bare(server=server)._wait(0, lambda: None)


def test_a_replacement_by_a_later_attempt_is_raised_by_all() -> None:
    journal = SimpleNamespace(read=lambda _: None, write=raises(ReplacedError("0002.json exists")))
    content, problem = bare(server=SERVER, journal=journal)._look_for(0)
    assert (content, problem) == (None, ("ReplacedError", "0002.json exists"))
    with pytest.raises(ReplacedError, match=r"0002\.json exists"):
        bare(server=SERVER, journal=journal)._wait(0, lambda: None)


def test_the_samples_that_the_journal_has_count() -> None:
    journal = SimpleNamespace(read=lambda _: None, write=lambda *_: b"another attempt's")
    assert bare(server=SERVER, journal=journal)._wait(0, lambda: None) == b"another attempt's"


class Ending:
    """A journal and a server that note how they end."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.codes, self.problem = list[int](), problem
        self.close, self.summary = self.codes.append, lambda: ""

    def upload(self) -> int:
        if self.problem:
            raise self.problem
        return 0


@pytest.mark.parametrize(
    ("error", "code"),
    [(CorruptionError("bits"), 0), (RuntimeError("x"), 0), (KeyboardInterrupt(), 0),
     (PreemptedError(""), PREEMPTED_EXIT_CODE)],
)  # fmt: skip
@pytest.mark.parametrize("problem", [None, ReplacedError("0002.json exists"), OSError("no room")])
def test_the_samplers_end_hides_no_error_of_the_trainer_and_neither_does_the_journals(error, code, problem) -> None:
    ending = Ending(problem)
    with pytest.raises(type(error)) as raised, bare(server=ending, journal=ending):
        raise error
    assert raised.value is error
    assert ending.codes == [code]


def test_a_journal_that_cannot_be_completed_is_an_error_of_a_run_without_another() -> None:
    ending = Ending(ReplacedError("0002.json exists"))
    with pytest.raises(ReplacedError), bare(server=ending, journal=ending):
        pass
    assert ending.codes == [0]


ARRAYS, ARRAY_BYTES = 16, 1 << 20


def test_publishing_and_sending_keep_one_copy_of_the_weights() -> None:
    """The devices are arrays of this host here, from which each array is copied, as from a TPU."""
    source, size = [np.full(ARRAY_BYTES // 4, i, np.float32) for i in range(ARRAYS)], ARRAYS * ARRAY_BYTES
    server = RolloutServer(Leases(group_size=1, seconds=100.0), {}, "secret")
    samplers = [Channel.connect("127.0.0.1", server.port, "secret") for _ in range(2)]
    for sampler in samplers:
        sampler.ask({"name": "one", "facts": {}})
    gathered = lambda leaf: SimpleNamespace(addressable_data=lambda _: leaf.copy())  # noqa: E731
    made = bare(server=server, sampler=SimpleNamespace(load_params=lambda params: list(params)), everywhere=gathered)
    tracemalloc.start()
    try:
        for version in range(3):
            made._publish(source, version)
        _, published = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        with ThreadPoolExecutor() as pool:  # what is allocated is what the samplers of this process receive
            found = list(pool.map(lambda one: one.ask({"kind": "weights", "version": -1}), samplers))
        _, sent = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        server.close(0)
    assert size <= published < size + 2 * ARRAY_BYTES
    assert 3 * size <= sent < 3.25 * size
    for (message, received), sampler in zip(found, samplers, strict=True):
        assert message == {"version": 2}
        assert {name: received[name].view(np.float32)[-1] for name in received} == {str(i): i for i in range(ARRAYS)}
        sampler.close()


def test_a_replay_without_the_rollout_names_the_key() -> None:
    loop = SimpleNamespace(replay="folder")
    with pytest.raises(RunFileError, match=r"loop\.replay: folder has no rollout 7"):
        bare(loop=loop)._wait(7, lambda: None)


def test_a_rollout_of_another_config_is_an_error() -> None:
    assert len(bare()._decode(4, encode(4, [DRAWN] * 2))) == 2
    with pytest.raises(RunFileError, match=r"rollout 4 has 3 samples, not the 2 of loop\.prompts_per_step"):
        bare()._decode(4, encode(4, [DRAWN] * 3))
    with pytest.raises(RunFileError, match="rollout 4: it holds rollout 5"):
        bare()._decode(4, encode(5, [DRAWN] * 2))


@pytest.mark.parametrize("wanted", [False, True])
def test_routes_are_as_the_config_says_or_an_error(wanted: bool) -> None:
    made = bare()
    made._loop.replay_routes = wanted
    routed = DRAWN._replace(routes=np.arange(30, dtype=np.uint8).reshape(5, 3, 2))
    for sample in made._decode(4, encode(4, [routed] * 2)):
        assert (None if sample.routes is None else sample.routes.tolist()) == (
            routed.routes.tolist() if wanted else None
        )
    if wanted:
        with pytest.raises(
            RunFileError, match=r"loop\.replay_routes: rollout 4 of the run's journal has no routes; use f"
        ):
            made._decode(4, encode(4, [DRAWN] * 2))


def test_a_silence_of_all_samplers_is_reported_and_ends() -> None:
    presence = Presence(["worker 2", "sampler pod 1"])
    presence.begin(100.0)
    presence.hear("sampler pod 1", 110.0)
    assert presence.report(110.0 + REPORT_SECONDS - 1) == ""
    line = presence.report(110.0 + REPORT_SECONDS)
    assert line.startswith("waiting for a sampler (loop.sampler), for at most 30 minutes: ")
    assert line.endswith("worker 2 has never connected, sampler pod 1 was last heard 60 s ago")
    assert presence.report(110.0 + REPORT_SECONDS + 1) == ""
    assert presence.report(110.0 + 2 * REPORT_SECONDS) != ""
    with pytest.raises(SamplersLostError, match=r"^loop\.sampler: .* 30 minutes: worker 2 has never connected"):
        presence.report(110.0 + SILENCE_LIMIT_SECONDS)


def test_one_sampler_that_works_is_enough_and_the_time_before_the_wait_does_not_count() -> None:
    presence = Presence(["worker 1", "worker 2"])
    presence.hear("worker 1", 0.0)
    presence.begin(2 * SILENCE_LIMIT_SECONDS)
    for now in range(int(2 * SILENCE_LIMIT_SECONDS) + 30, int(5 * SILENCE_LIMIT_SECONDS), 30):
        assert presence.report(float(now - 29)) == ""
        presence.hear("worker 1", float(now))
        assert presence.report(float(now)) == ""
