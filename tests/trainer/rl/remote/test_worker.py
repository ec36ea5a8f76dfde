"""A sampler's dealings with the trainer: weights that stop, rewards that take long, a damaged address."""

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from conf.formats import RESULT_FILE, attempt_token
from trainer.rl.remote import worker
from trainer.rl.remote.identity import NO_TRAINER_EXIT_CODE, SamplerKey, attempt_mark
from trainer.rl.remote.leases import Task
from trainer.rl.remote.server import ADDRESS_FILE
from trainer.rl.remote.wire import Channel, WireError
from trainer.sampler import Completion


def raises(error: Exception) -> Any:
    def act(*_: object) -> None:
        raise error

    return act


class Answers:
    """A connection with the answers to come; one that is an exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), list[dict[str, Any]]()
        self.blocked = threading.Event()

    def ask(self, message: dict[str, Any], arrays: Any = None) -> Any:
        self.asked.append(message)
        if not self.answers:
            self.blocked.wait(10)
            raise WireError("closed")
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("error", [KeyError("version"), WireError("gone"), MemoryError("no room"), EOFError()])
def test_whatever_ends_the_thread_of_weights_reaches_the_sampler(error) -> None:
    feed = worker._WeightFeed(cast(Channel, Answers(({"version": 1}, {"0": np.ones(1)}), error)))
    with pytest.raises(WireError, match="no more weights"):
        feed.newest(2, 10.0)


def test_the_end_of_an_earlier_connection_is_none_of_the_next_one() -> None:
    old, new = Answers(), Answers(({"version": 4}, {"0": np.ones(1)}))
    before = worker._WeightFeed(cast(Channel, old))
    after = worker._WeightFeed(cast(Channel, new))
    assert before.newest(0, 0.0) is None
    old.blocked.set()
    with pytest.raises(WireError):
        before.newest(0, 10.0)
    newest = after.newest(4, 10.0)
    assert newest is not None
    assert newest[0] == 4
    assert after.newest(5, 0.0) is None
    new.blocked.set()


def bare(**members: Any) -> Any:
    """A sampler with these members only."""
    made = object.__new__(worker._SamplerProcess)
    vars(made).update({f"_{name}": value for name, value in members.items()} | {"_parent": os.getppid()})
    return made


@pytest.mark.parametrize("damaged", [b"[]", b'"text"', b"\xff\xfe", b"{", b"{}", b'{"attempt": 7, "port": []}'])
def test_a_damaged_address_is_read_again(damaged, tmp_path, monkeypatch) -> None:
    path = tmp_path / ADDRESS_FILE
    path.write_bytes(damaged)
    whole = json.dumps({"attempt": attempt_mark("secret"), "exit_code": 75})
    monkeypatch.setattr(worker.time, "sleep", lambda _: path.write_text(whole))
    assert bare(experiment=SimpleNamespace(dir=str(tmp_path)), key=SamplerKey("secret")).run() == 75


class Attempts:
    """The bucket and the trainer's attempts, as a pod of samplers meets them: a step each time that it sleeps."""

    def __init__(self, folder: Path, *steps: Callable[[], object]) -> None:
        self.folder, self.steps, self.now, self.worked = folder, list(steps), 0.0, list[str]()

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.steps:
            self.steps.pop(0)()

    def listen(self, number: int, **more: Any) -> None:
        mark = attempt_mark(attempt_token("of the run", number))
        (self.folder / ADDRESS_FILE).write_text(json.dumps({"attempt": mark, "number": number, **more}))

    def finish(self) -> None:
        (self.folder / RESULT_FILE).write_text("{}")

    def connect(self, _: dict[str, Any], token: str) -> Any:
        self.worked.append(token)
        return SimpleNamespace(close=lambda: None)

    def run(self, monkeypatch: pytest.MonkeyPatch, work: Callable[..., int]) -> int:
        monkeypatch.setattr(worker.time, "sleep", self.sleep)
        monkeypatch.setattr(worker.time, "monotonic", lambda: self.now)
        made = bare(experiment=SimpleNamespace(dir=str(self.folder)), key=SamplerKey(secret="of the run"))
        made._connect, made._work = self.connect, work
        return made.run()


def test_a_pod_of_samplers_works_for_each_attempt_in_turn_and_ends_with_the_run(tmp_path, monkeypatch) -> None:
    world = Attempts(tmp_path)
    world.steps = [
        lambda: world.listen(1),
        lambda: world.listen(1, exit_code=75),  # the trainer's pod is preempted
        lambda: world.listen(1, exit_code=75),
        lambda: world.listen(2),
        world.finish,
    ]
    ends = [75, 0]
    assert world.run(monkeypatch, lambda *_: ends.pop(0)) == 0
    tokens = [attempt_token("of the run", number) for number in (1, 1, 2, 2)]
    assert world.worked == tokens


def test_a_pod_of_samplers_whose_trainer_does_not_come_back_ends(tmp_path, monkeypatch) -> None:
    world = Attempts(tmp_path)
    world.listen(1)
    monkeypatch.setattr(Attempts, "connect", raises(ConnectionRefusedError()))
    assert world.run(monkeypatch, lambda *_: pytest.fail("nobody listens")) == NO_TRAINER_EXIT_CODE
    assert world.now >= worker.CONNECT_SECONDS


def test_an_address_with_another_secret_is_no_trainer(tmp_path, monkeypatch) -> None:
    world = Attempts(tmp_path, lambda: None)
    world.listen(1)
    told = json.loads((tmp_path / ADDRESS_FILE).read_text()) | {"number": 2}
    (tmp_path / ADDRESS_FILE).write_text(json.dumps(told))
    world.steps = [world.finish]
    assert world.run(monkeypatch, lambda *_: 1) == 0
    assert world.worked == []


class Trainer:
    """A connection to a trainer that has as many tasks of a prompt, and takes samples until it is told to stop."""

    def __init__(self, *tasks: Task) -> None:
        self.tasks, self.asked, self.arrays = list(tasks), list[dict[str, Any]](), dict[str, Any]()
        self.unwanted = set[int]()
        """Rollouts that another sampler has."""
        self.then: dict[int, Callable[[], object]] = {}
        """What happens at a request, by its number."""

    def ask(self, message: dict[str, Any], arrays: Any = None) -> Any:
        self.asked.append(message)
        self.then.get(len(self.asked), lambda: None)()
        if message["kind"] != "take":
            self.arrays |= arrays
            return {"go_on": message["rollout"] not in self.unwanted}, {}
        if self.tasks:
            return {"task": vars(self.tasks.pop(0)), "exit_code": None}, {}
        return {"task": None, "exit_code": None if message["held"] else 0}, {}

    @property
    def delivered(self) -> list[tuple[int, list[int]]]:
        """Rollout and numbers of the samples of each message that had any."""
        return [(said["rollout"], said["rows"]) for said in self.asked if said.get("rows")]


def work(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, checks: list[Future[Any]]) -> int:
    """Work for a trainer: each task has a prompt with a response for each of the next checks."""
    monkeypatch.setattr(worker, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(worker, "TAKE_SECONDS", 0.0)
    monkeypatch.setattr(worker, "reward_names", lambda _: [])
    monkeypatch.setattr(worker, "score_sample", lambda found, _: found)
    loop = SimpleNamespace(prompts_per_step=1, updates_per_rollout=1, group_size=2, temperature=1.0)

    def generate(*arguments: Any, **_: object) -> Any:
        between = arguments[5]
        for row in range(2):
            routes = np.full((3, 1, 1), row) if row else None
            yield Completion(row, np.array([row, 9]), np.full(2, -0.5), row % 2 == 0, np.full(2, 5), routes)
        between()

    question = SimpleNamespace(prompt_tokens=[1], answer="", prompt="", row=None)
    questions = SimpleNamespace(train=lambda *_: [question], prompt_encoder=SimpleNamespace(decode=lambda _: ""))
    left = list(checks)
    monkeypatch.setattr(worker, "_WeightFeed", lambda _: SimpleNamespace(newest=lambda *_: (-1, {})))
    made = bare(
        loop=loop,
        questions=questions,
        sampler=SimpleNamespace(generate=generate),
        checks=SimpleNamespace(submit=lambda *_: left.pop(0)),
        random_key=jax.random.key(0),
    )
    return made._work(trainer, cast(Any, None))


def test_a_sampler_that_waits_for_rewards_says_that_it_is_alive_and_sends_each_sample_once(monkeypatch) -> None:
    checks = [Future[Any]() for _ in range(2)]
    trainer = Trainer(Task(0, 0, 1, 0))
    trainer.then = {4: lambda: checks[1].set_result([0.5, 1, 0, 0]), 8: lambda: checks[0].set_result([0, 0, 0, 0])}
    assert work(monkeypatch, trainer, checks) == 0
    kinds = [message["kind"] for message in trainer.asked]
    assert kinds[:5] == ["take", "samples", "take", "samples", "take"]
    message = {"kind": "samples", "rollout": 0, "first": 0}
    sent = [said for said in trainer.asked if said.get("rows")]
    assert sent == [message | {"rows": [1], "finished": [False]}, message | {"rows": [0], "finished": [True]}]
    assert {name: array.tolist() for name, array in trainer.arrays.items() if name.startswith("1/")} == {
        "1/tokens": [1, 9], "1/logprobs": [-0.5, -0.5], "1/versions": [5, 5], "1/scores": [0.5, 1, 0, 0],
        "1/routes": [[[1]]] * 3,
    }  # fmt: skip
    assert "0/routes" not in trainer.arrays


def test_a_sampler_draws_the_next_task_while_the_rewards_of_the_last_one_are_computed(monkeypatch) -> None:
    checks = [Future[Any]() for _ in range(6)]
    trainer = Trainer(*(Task(rollout, 0, 1, 0) for rollout in range(3)))

    def all_of(first: int) -> Callable[[], object]:
        return lambda: [check.set_result([1.0] * 4) for check in checks[first : first + 2]]

    trainer.then = {8: all_of(0), 14: all_of(4), 20: all_of(2)}
    assert work(monkeypatch, trainer, checks) == 0
    held = [message["held"] for message in trainer.asked if message["kind"] == "take"]
    assert held[:3] == [[], [[0, 0]], [[1, 0]]], "two tasks at most wait for their rewards"
    assert held[-1] == []
    assert sorted(trainer.delivered) == [(rollout, [0, 1]) for rollout in range(3)]
    assert trainer.delivered[0] == (0, [0, 1])


@pytest.mark.parametrize("unwanted", [{0, 1}, {0}])
def test_rewards_of_a_task_that_another_sampler_has_are_not_computed(monkeypatch, unwanted) -> None:
    """Whether it is being drawn or scored; the other one goes on."""
    checks = [Future[Any]() for _ in range(4)]
    trainer = Trainer(Task(0, 0, 1, 0), Task(1, 0, 1, 0))
    trainer.then = {
        4: lambda: trainer.unwanted.update(unwanted),
        7: lambda: [c.set_result([0] * 4) for c in checks[2:]],
    }
    assert work(monkeypatch, trainer, checks) == 0
    assert [check.cancelled() for check in checks] == [True, True, 1 in unwanted, 1 in unwanted]
    assert trainer.delivered == ([] if 1 in unwanted else [(1, [0, 1])])


def test_when_the_connection_ends_no_reward_is_computed_for_it(monkeypatch) -> None:
    checks = [Future[Any]() for _ in range(2)]
    trainer = Trainer(Task(0, 0, 1, 0))
    trainer.then = {3: raises(WireError("closed"))}
    with pytest.raises(WireError):
        work(monkeypatch, trainer, checks)
    assert all(check.cancelled() for check in checks)


class Versions:
    """A feed whose newest version is set by the test; its arrays hold the version."""

    def __init__(self) -> None:
        self.version, self.arrays = 0, dict[str, np.ndarray]()
        self.bring(0)

    def bring(self, version: int) -> None:
        self.version, self.arrays = version, {"0": np.full(3, version, np.float32).view(np.uint8)}

    def newest(self, at_least: int, _: float) -> tuple[int, dict[str, np.ndarray]] | None:
        return (self.version, self.arrays) if self.version >= at_least else None


def test_weights_have_the_version_that_they_came_with_also_where_they_could_not_be_placed_at_first(monkeypatch) -> None:
    feed = Versions()
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {"w": jax.ShapeDtypeStruct((3,), np.float32, sharding=place)}
    sampler = bare(feed=feed, copy=(-1, {}), abstract=abstract)
    for version in (0, 0, 2, 3, 3):
        if version != feed.version:
            feed.bring(version)
            with monkeypatch.context() as patch:
                patch.setattr(worker.jax, "device_put", raises(MemoryError("no room")))
                with pytest.raises(MemoryError):
                    sampler._weights()
            feed.bring(version)
        copy, label = sampler._weights()
        assert (label, np.asarray(copy["w"]).tolist()) == (version, [version] * 3)
