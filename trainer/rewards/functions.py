"""Rewards: plain functions from (response, correct answer) to a number. `REWARDS` names them, as the schema does.

A reward of the user's own may also ask for the prompt and for columns of the question's row, by name.

They must be deterministic. `pool.RewardPool` runs them in worker processes under a time limit, so a function that is
slow, hangs or crashes on some responses does not harm the run.
"""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from conf.extension import ByName, Reward, wanted_by_name
from conf.schema.training.run_yaml import RunFileError
from trainer.extension import load_extension
from trainer.rewards.equal import is_equal
from trainer.rewards.extract import MAX_RESPONSE_CHARS, extract_answer, extract_boxed, has_marked_answer
from trainer.rewards.strict import INTEGER, is_integer_answer, last_box


def answer_match(response: str, answer: str) -> float:
    """Return 1 if the response's answer is correct, and written out where a number is right: not 9+9 for 18."""
    given = extract_answer(response)
    return float(given is not None and is_equal(given, answer))


def answer_match_lenient(response: str, answer: str) -> float:
    """Return 1 if the value of the response's answer is correct: also 9+9 for 18."""
    given = extract_answer(response)
    return float(given is not None and is_equal(given, answer, lenient=True))


def boxed(response: str, answer: str) -> float:
    """Return 1 if the boxed answer of the response is correct; see `answer_match`."""
    given = extract_boxed(response)
    return float(given is not None and is_equal(given, answer))


def boxed_lenient(response: str, answer: str) -> float:
    """Return 1 if the value of the boxed answer is correct; see `answer_match_lenient`."""
    given = extract_boxed(response)
    return float(given is not None and is_equal(given, answer, lenient=True))


def boxed_strict(response: str, answer: str) -> float:
    """Return 1 if the last box holds the right integer and nothing else, as Simply judges; see `strict`.

    An answer that is no integer is compared as in `boxed`.
    """
    given, right = last_box(response), answer.replace(",", "").strip()
    if not given:
        return 0.0
    return float(is_integer_answer(given, right) if INTEGER.fullmatch(right) else is_equal(given, right))


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


REWARDS: dict[str, Reward] = {
    "answer_match": answer_match,
    "answer_match_lenient": answer_match_lenient,
    "boxed": boxed,
    "boxed_lenient": boxed_lenient,
    "boxed_strict": boxed_strict,
    "format": answer_format,
    "length": length,
}


def resolve(name: str) -> Reward:
    """Return a function by its name in REWARDS, or `module:function`. Raises RunFileError if it does not exist."""
    if name in REWARDS:
        return REWARDS[name]
    return load_extension("reward", name, "loop.rewards")


def arguments(name: str, prompt: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reward takes by name: the prompt, the row, and columns of the row."""
    wanted = _wanted(name)
    given = {**row, "prompt": prompt, "row": row}
    if not wanted.takes_all:
        return {key: given[key] for key in wanted.names if key in given}
    return {key: value for key, value in given.items() if key not in ("response", "answer")}


def wants_row(name: str) -> bool:
    """Return whether a reward takes anything besides response and answer."""
    return name not in REWARDS and bool(_wanted(name).names or _wanted(name).takes_all)


def check_columns(name: str, row: Mapping[str, Any]) -> None:
    """Raise RunFileError if a reward requires a column that rows like this one lack."""
    missing = [key for key in _wanted(name).required if key not in ("prompt", "row", *row)]
    if missing:
        columns = ", ".join(map(repr, row)) or "none"
        message = f"takes {', '.join(map(repr, missing))}, which is no column of the data; columns: {columns}"
        raise RunFileError(f"loop.rewards: reward {name} {message}, and prompt and row")


@cache
def _wanted(name: str) -> ByName:
    try:
        signature = inspect.signature(resolve(name))
    except (TypeError, ValueError):  # without a signature, as some functions of C
        return ByName((), (), takes_all=False)
    return wanted_by_name(signature)
