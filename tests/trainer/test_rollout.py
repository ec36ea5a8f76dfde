"""Between sampler and loss: sequences, scores, and how a rollout is dealt out to its updates."""

import numpy as np
import pytest

from conf.loop import GrpoLoop
from conf.runfile import RunFileError
from tests.groups import group
from tests.trainer.conftest import mesh_of
from trainer import rollout
from trainer.data.problem import Problem
from trainer.tokenizer import EOS, PAD, encode, encode_prompt, encode_response

LOOP = GrpoLoop(**group("loop/grpo") | {"prompt_length": 8, "response_length": 6, "samples": 2, "prompts": 2})
QUESTIONS = [Problem("1+1=", "2", "2"), Problem("2+3=", "5", "it is 5")]


def test_prompt_and_response_stand_end_to_end() -> None:
    tokens, mask = rollout.sequences([encode_prompt("ab"), encode_prompt("c")], [[65, EOS], []], LOOP)
    assert tokens.shape == (2, 14)
    assert tokens[0].tolist() == [*encode_prompt("ab"), 65, EOS, *[PAD] * 9]
    assert mask[0].nonzero()[0].tolist() == [2, 3]  # the positions before the response's tokens
    assert mask[1].sum() == 0


def test_worked_responses_are_cut_where_drawn_ones_would_be() -> None:
    batch = rollout.supervised(QUESTIONS, LOOP)
    assert batch["mask"].sum(axis=1).tolist() == [2, 6]
    assert batch["tokens"][0, 5:7].tolist() == encode_response("2")


def test_scores_are_by_group() -> None:
    texts = ["2", "3", "5", "5"]
    tokens = np.full((4, 6), PAD, np.int32)
    lengths = np.array([2, 2, 2, 6], np.int32)
    for row, text in enumerate(texts):
        tokens[row, :2] = [*encode(text), EOS]
    tokens[3] = encode("     5")  # never ended
    problems = [q for q in QUESTIONS for _ in range(2)]
    batch = rollout.scored(rollout.Drawn(tokens, lengths, [0, 1, 2, 3]), problems, LOOP)
    assert batch["accuracy"].tolist() == [1, 0, 1, 1]
    assert batch["pass_at_k"].tolist() == [1, 1, 1, 1]
    assert batch["zero_variance_groups"].tolist() == [0, 0, 1, 1]
    assert batch["truncated"].tolist() == [0, 0, 0, 1]
    assert batch["response_length"].tolist() == [2, 2, 2, 6]
    np.testing.assert_allclose(batch["advantage"], [1, -1, 0, 0], atol=1e-4)


def test_a_rollout_is_dealt_out_once_and_stays_on_its_device() -> None:
    batch = {"mask": np.arange(24)[:, None], "advantage": np.arange(24)}
    parts = rollout.split(batch, 3, 4, np.random.default_rng(0))
    assert sorted(np.concatenate([p["advantage"] for p in parts]).tolist()) == list(range(24))
    for part in parts:
        assert part["mask"][:, 0].tolist() == part["advantage"].tolist()
        assert (part["advantage"].reshape(4, 2) // 6 == np.arange(4)[:, None]).all()
    assert parts[0]["advantage"].tolist() != sorted(parts[0]["advantage"].tolist())
    assert rollout.split(batch, 1, 4, np.random.default_rng(0))[0] is batch


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RunFileError, match=r"loop\.prompt_length: a prompt has 10 tokens, more than 8"):
        rollout.place_prompts([Problem("a" * 9, "", "")], LOOP, mesh_of(1, 1, 1))
