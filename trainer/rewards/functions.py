"""Rewards: plain functions from (response, correct answer) to a number. `REWARDS` names them, as the schema does.

They must be deterministic. `pool.RewardPool` runs them in worker processes under a time limit, so a function that is
slow, hangs or crashes on some responses does not harm the run.
"""

from conf.extension import Reward
from trainer.extension import load_extension
from trainer.rewards.equal import is_equal
from trainer.rewards.extract import MAX_RESPONSE_CHARS, extract_answer, extract_boxed, has_marked_answer


def answer_match(response: str, answer: str) -> float:
    """Return 1 if the response's answer, in any form, is correct."""
    given = extract_answer(response)
    return float(given is not None and is_equal(given, answer))


def boxed(response: str, answer: str) -> float:
    """Return 1 if the boxed answer of the response is correct."""
    given = extract_boxed(response)
    return float(given is not None and is_equal(given, answer))


def answer_format(response: str, answer: str) -> float:
    """Return 1 if the response marks its answer, with `####` or a closed box, correct or not."""
    return float(has_marked_answer(response))


def length(response: str, answer: str) -> float:
    """Return the unused fraction of MAX_RESPONSE_CHARS for a correct answer; 0 for a wrong one.

    After the length reward of Kimi k1.5 (https://arxiv.org/abs/2501.12599, 2.3.3), which also gives no reward to short
    wrong answers; unlike there, it does not depend on the other samples of the group.
    """
    unused = 1 - min(len(response), MAX_RESPONSE_CHARS) / MAX_RESPONSE_CHARS
    return answer_match(response, answer) * unused


REWARDS: dict[str, Reward] = {"answer_match": answer_match, "boxed": boxed, "format": answer_format, "length": length}


def resolve(name: str) -> Reward:
    """Return a function by its name in REWARDS, or `module:function`. Raises RunFileError if it does not exist."""
    if name in REWARDS:
        return REWARDS[name]
    return load_extension("reward", name, "loop.rewards")
