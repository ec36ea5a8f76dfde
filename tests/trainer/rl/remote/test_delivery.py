"""Samples that wait for their rewards: each is sent once, when it is scored, while the next task is drawn."""

from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest

from conf.schema.training.loop import GrpoLoop
from tests.groups import load_group
from trainer.rewards.pool import RewardPool, RewardResult, Submission
from trainer.rl.remote.delivery import AbandonedError, Deliveries
from trainer.rl.remote.leases import Task
from trainer.rl.remote.wire import Arrays, Channel
from trainer.sampler import Completion

LOOP = GrpoLoop(**load_group("loop/grpo") | {"rewards": {"answer_match": 0.5}, "accuracy_reward": "answer_match"})
FIRST, SECOND = Task(0, 0, 1, 5), Task(0, 2, 1, 6)


class Trainer:
    """The other end of the connection: notes what arrives, and says whether it wants the rest of a task."""

    def __init__(self) -> None:
        self.arrived: list[tuple[dict[str, Any], Arrays]] = []
        self.unwanted: set[int] = set()

    def ask(self, message: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        self.arrived.append((message, arrays))
        return {"go_on": message["first"] not in self.unwanted}, {}

    def rows(self) -> list[tuple[int, list[int]]]:
        """Return the task and the rows of what has arrived since, without messages that have none."""
        arrived, self.arrived = self.arrived, []
        return [(message["first"], message["rows"]) for message, _ in arrived if message["rows"]]


class Rewards:
    """Rewards that are computed when the test says so."""

    def __init__(self) -> None:
        self.checks: dict[str, Future[RewardResult]] = {}

    def submit(self, names: list[str], submission: Submission) -> Future[RewardResult]:
        assert names == ["answer_match"]
        return self.checks.setdefault(submission.response, Future())

    def finish(self, *responses: str, score: float = 1.0) -> None:
        for response in responses:
            self.checks[response].set_result(RewardResult({"answer_match": score}, 0, 0))


def opened() -> tuple[Deliveries, Trainer, Rewards]:
    trainer, rewards = Trainer(), Rewards()
    return Deliveries(cast(Channel, trainer), cast(RewardPool, rewards), LOOP), trainer, rewards


def draw(deliveries: Deliveries, numbers: list[int]) -> None:
    for number in numbers:
        tokens = np.array([number, 9], np.int32)
        drawn = Completion(number, tokens, np.full(2, -0.5, np.float32), number % 2 == 0, np.full(2, 5, np.int32))
        deliveries.add(number, drawn, Submission(f"response {number}", "9"))


def test_samples_are_sent_once_each_as_they_are_scored() -> None:
    deliveries, trainer, rewards = opened()
    deliveries.begin(FIRST)
    draw(deliveries, [0, 1])
    deliveries.send()
    rewards.finish("response 1")
    deliveries.send()
    [(nothing, _), (message, arrays)] = trainer.arrived
    assert (nothing["rows"], nothing["finished"]) == ([], [])  # which says that the sampler is alive
    assert message == {"kind": "samples", "rollout": 0, "first": 0, "rows": [1], "finished": [False]}
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "1/tokens": [1, 9], "1/logprobs": [-0.5, -0.5], "1/versions": [5, 5], "1/scores": [0.5, 1.0, 0.0, 0.0],
    }  # fmt: skip
    trainer.rows()
    rewards.finish("response 0")
    deliveries.send()
    deliveries.send()
    assert trainer.rows() == [(0, [0])]


@pytest.mark.parametrize("drawn", [True, False])
def test_a_task_that_another_sampler_has_is_dropped_while_it_is_drawn_or_scored(drawn) -> None:
    deliveries, trainer, rewards = opened()
    deliveries.begin(FIRST)
    draw(deliveries, [0, 1])
    trainer.unwanted = {FIRST.first}
    if drawn:
        with pytest.raises(AbandonedError):
            deliveries.send()
        deliveries.end(whole=False)
    else:
        deliveries.end(whole=True)
        deliveries.begin(SECOND)
        draw(deliveries, [4])
        deliveries.send()  # the task that is being drawn goes on
        rewards.finish("response 4")
        trainer.rows()
        deliveries.send()
        assert trainer.rows() == [(2, [4])]
    assert deliveries.tasks == []
    assert rewards.checks["response 0"].cancelled()
    assert rewards.checks["response 1"].cancelled()
