"""Between sampler and loss: sequences, scores, and how a rollout is dealt out to its updates."""

import numpy as np
import pytest

from conf.loop import GrpoLoop
from conf.questions import ArithmeticData
from tests.groups import group
from tests.trainer.conftest import mesh_of
from trainer import rollout
from trainer.data.problem import Problem
from trainer.data.prompting import Prompting
from trainer.rewards.pool import Pool
from trainer.rollout import PAD
from trainer.tokenizer import BOS, EOS, decode, encode

LOOP = GrpoLoop(**group("loop/grpo") | {"prompt_length": 8, "response_length": 6, "samples": 2, "prompts": 2})
PROMPTING = Prompting(ArithmeticData(**group("data/arithmetic")))
QUESTIONS = PROMPTING.questions([Problem("1+1=", "2", "2"), Problem("2+3=", "5", "it is 5")])
ENDS = PROMPTING.ends


@pytest.fixture(scope="module")
def checks():
    with Pool(1, 5.0) as pool:
        yield pool


def drawn(texts: list[str], rows: list[int]) -> rollout.Drawn:
    """As a sampler would: a text of six tokens has no end."""
    tokens = np.full((len(texts), 6), PAD, np.int32)
    logprobs = -np.arange(1, 6 * len(texts) + 1, dtype=np.float32).reshape(tokens.shape)
    ids = [[*encode(text), EOS][:6] for text in texts]
    for row, found in enumerate(ids):
        tokens[row, : len(found)] = found
    lengths = np.array([len(found) for found in ids], np.int32)
    return rollout.Drawn(tokens, logprobs, lengths, np.array([found[-1] == EOS for found in ids]), rows, decode)


def test_prompt_and_response_stand_end_to_end() -> None:
    tokens, mask = rollout.sequences([[BOS, *encode("ab")], [BOS, *encode("c")]], [[65, EOS], []], LOOP)
    assert tokens.shape == (2, 14)
    assert tokens[0].tolist() == [BOS, *encode("ab"), 65, EOS, *[PAD] * 9]
    assert mask[0].nonzero()[0].tolist() == [2, 3]  # the positions before the response's tokens
    assert mask[1].sum() == 0


def test_worked_responses_are_cut_where_drawn_ones_would_be() -> None:
    batch = rollout.supervised(QUESTIONS, LOOP)
    assert batch["mask"].sum(axis=1).tolist() == [2, 6]
    assert batch["tokens"][0, 5:7].tolist() == [*encode("2"), EOS]


def test_scores_are_by_group(checks) -> None:
    problems = [q for q in QUESTIONS for _ in range(2)]
    batch = rollout.scored(drawn(["2", "3", "5", "     5"], [0, 1, 2, 3]), problems, LOOP, checks)
    assert batch["accuracy"].tolist() == [1, 0, 1, 1]
    assert batch["pass_at_k"].tolist() == [1, 1, 1, 1]
    assert batch["zero_variance_groups"].tolist() == [0, 0, 1, 1]
    assert batch["truncated"].tolist() == [0, 0, 0, 1]
    assert batch["response_length"].tolist() == [2, 2, 2, 6]
    np.testing.assert_allclose(batch["advantage"], [1, -1, 0, 0], atol=1e-4)
    assert batch["reward_std"].tolist() == [0.5, 0.5, 0, 0]
    assert batch["weight"].tolist() == [1, 1, 1, 1]


def test_the_samplers_log_probabilities_stand_where_the_mask_does(checks) -> None:
    problems = [q for q in QUESTIONS for _ in range(2)]
    batch = rollout.scored(drawn(["2", "", "55", "     5"], [0, 1, 2, 3]), problems, LOOP, checks)
    assert batch["sampler"].shape == batch["mask"].shape == (4, 13)
    start = len(QUESTIONS[0].tokens) - 1
    for row, length in enumerate([2, 1, 3, 6]):
        found = batch["sampler"][row]
        assert found[start : start + length].tolist() == [-(6 * row + i + 1) for i in range(length)]
        assert found.nonzero()[0].tolist() == batch["mask"][row].nonzero()[0].tolist()


def test_what_does_not_count_is_counted(checks) -> None:
    """A group of equal rewards, and a response that was cut off in another."""
    loop = LOOP.model_copy(update={"drop_equal_groups": True, "overlong": "drop"})
    problems = [q for q in QUESTIONS for _ in range(2)]
    batch = rollout.scored(drawn(["2", "2", "     4", "5"], [0, 1, 2, 3]), problems, loop, checks)
    assert batch["filtered_equal"].tolist() == [1, 1, 0, 0]
    assert batch["filtered_overlong"].tolist() == [0, 0, 1, 0]
    assert batch["weight"].tolist() == [0, 0, 0, 1]
    np.testing.assert_allclose(batch["advantage"], [0, 0, -1, 1], atol=1e-4)  # the baseline is that of all samples


def test_long_responses_lose_reward_but_make_no_group_unequal(checks) -> None:
    loop = LOOP.model_copy(update={"drop_equal_groups": True, "overlong": "penalize", "overlong_buffer": 0.5})
    problems = [q for q in QUESTIONS for _ in range(2)]
    batch = rollout.scored(drawn(["2", "     2", "5", "   5"], [0, 1, 2, 3]), problems, loop, checks)
    np.testing.assert_allclose(batch["reward_mean"], [1, 0, 1, 1 - 2 / 3], rtol=1e-6)
    assert batch["filtered_equal"].tolist() == [1, 1, 1, 1]
    assert batch["zero_variance_groups"].tolist() == [0, 0, 0, 0]


def test_rewards_are_weighed_and_what_fails_is_counted(checks) -> None:
    loop = LOOP.model_copy(update={"rewards": {"format": 0.5, "no_such_module_here:f": 1.0, "boxed": 2.0}})
    problems = [q for q in QUESTIONS for _ in range(2)]
    batch = rollout.scored(drawn(["#### 2", "3", "####5", "5"], [0, 1, 2, 3]), problems, loop, checks)
    assert batch["reward_mean"].tolist() == [0.5, 0, 0.5, 0]
    assert batch["accuracy"].tolist() == [1, 0, 1, 1]
    assert batch["checks_failed"].tolist() == [1, 1, 1, 1]
    assert batch["checks_timed_out"].tolist() == [0, 0, 0, 0]


def test_only_the_rows_of_this_process_are_scored(checks) -> None:
    problems = [q for q in QUESTIONS for _ in range(2)]
    found = drawn(["2", "2", "5", "5"], [2, 3])
    assert rollout.correct(found, problems, checks).tolist() == [0, 0, 1, 1]
    assert rollout.scored(found, problems, LOOP, checks)["accuracy"][2:].tolist() == [1, 1]


def test_a_rollout_is_dealt_out_once_and_stays_on_its_device() -> None:
    batch = {"mask": np.arange(24)[:, None], "advantage": np.arange(24)}
    parts = rollout.split(batch, 3, 4, np.random.default_rng(0))
    assert sorted(np.concatenate([p["advantage"] for p in parts]).tolist()) == list(range(24))
    for part in parts:
        assert part["mask"][:, 0].tolist() == part["advantage"].tolist()
        assert (part["advantage"].reshape(4, 2) // 6 == np.arange(4)[:, None]).all()
    assert parts[0]["advantage"].tolist() != sorted(parts[0]["advantage"].tolist())
    assert rollout.split(batch, 1, 4, np.random.default_rng(0))[0] is batch


def test_rows_are_scored_where_they_are_trained_on() -> None:
    assert rollout.own_rows(mesh_of(2, 2, 1), 8) == list(range(8))  # one process has them all
    assert rollout.own_rows(mesh_of(8, 1, 1), 13) == list(range(13))
