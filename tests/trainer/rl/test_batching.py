"""Prompts and responses as rows of a batch."""

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.prompts import ArithmeticData
from tests.groups import load_group
from trainer.data.problem import Problem
from trainer.data.prompting import PromptEncoder
from trainer.rl import batching
from trainer.rl.batching import PAD_ID
from trainer.tokenizer.byte_level import BOS_ID, EOS_ID, encode


def test_prompt_and_response_stand_end_to_end() -> None:
    tokens, mask = batching.pad_sequences([[BOS_ID, *encode("ab")], [BOS_ID, *encode("c")]], [[65, EOS_ID], []], 14)
    assert tokens.shape == (2, 14)
    assert tokens[0].tolist() == [BOS_ID, *encode("ab"), 65, EOS_ID, *[PAD_ID] * 9]
    assert mask[0].nonzero()[0].tolist() == [2, 3]  # the positions before the response's tokens
    assert mask[1].sum() == 0


def test_worked_responses_are_cut_where_drawn_ones_would_be() -> None:
    loop = GrpoLoop(**load_group("loop/grpo") | {"max_prompt_length": 8, "max_new_tokens": 6})
    prompting = PromptEncoder(ArithmeticData(**load_group("data/arithmetic")))
    questions = prompting.encode([Problem("1+1=", "2", "2"), Problem("2+3=", "5", "it is 5")])
    batch = batching.supervised_batch(questions, loop)
    assert batch["mask"].sum(axis=1).tolist() == [2, 6]
    assert batch["tokens"][0, 5:7].tolist() == [*encode("2"), EOS_ID]
