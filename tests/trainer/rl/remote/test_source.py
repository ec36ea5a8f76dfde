"""What process 0 finds while it waits for a rollout, and what all processes make of it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conf.schema.training.run_yaml import RunFileError
from trainer.rl.remote.journal import DrawnSample, encode
from trainer.rl.remote.leases import TaskLostError
from trainer.rl.remote.presence import SamplersLostError
from trainer.rl.remote.source import RemoteRollouts

EMPTY = SimpleNamespace(read=lambda _: None)


def bare(**members: Any) -> Any:
    """Rollouts with these members only."""
    made = object.__new__(RemoteRollouts)
    loop = SimpleNamespace(replay=None, prompts_per_step=1, updates_per_rollout=1, group_size=2)
    members = {"loop": loop, "first": True, "server": None, "journal": EMPTY} | members
    vars(made).update({f"_{name}": value for name, value in members.items()})
    return made


def raises(error: Exception) -> Any:
    def act(*_: object) -> None:
        raise error

    return act


@pytest.mark.parametrize("error", [TaskLostError("prompts 0 to 1"), SamplersLostError("worker 3")])
def test_errors_of_the_samplers_are_raised_by_all(error) -> None:
    found = {TaskLostError: ("wait", error), SamplersLostError: ("report_silence", error)}[type(error)]
    server = SimpleNamespace(begin_wait=lambda: None, wait=lambda *_: None, report_silence=lambda: None)
    setattr(server, found[0], raises(error))
    with pytest.raises(type(error), match=str(error)):
        bare(server=server)._wait(0, lambda: None)


def test_a_replay_without_the_rollout_names_the_key() -> None:
    loop = SimpleNamespace(replay="folder")
    with pytest.raises(RunFileError, match=r"loop\.replay: folder has no rollout 7"):
        bare(loop=loop)._wait(7, lambda: None)


def test_a_rollout_of_another_config_is_an_error() -> None:
    drawn = DrawnSample(np.arange(3, dtype=np.int32), np.ones(3, np.float32), np.zeros(3, np.int32), np.ones(4), True)
    assert len(bare()._decode(4, encode(4, [drawn] * 2))) == 2
    with pytest.raises(RunFileError, match=r"rollout 4 has 3 samples, not the 2 of loop\.prompts_per_step"):
        bare()._decode(4, encode(4, [drawn] * 3))
    with pytest.raises(RunFileError, match="rollout 4: it holds rollout 5"):
        bare()._decode(4, encode(5, [drawn] * 2))
