"""Rewards: plain functions from (response, correct answer) to a number. `REWARDS` names them, as the schema does.

A reward of the user's own may also ask for the prompt and for columns of the question's row, by name.

They must be deterministic. `pool.RewardPool` runs them in worker processes under a time limit, so a function that is
slow, hangs or crashes on some responses does not harm the run.
"""

import inspect
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from conf.extension import ByName, Reward, wanted_by_name
from conf.formats import RunFileError
from trainer.extension import load_extension
from trainer.rewards.equal import is_equal
from trainer.rewards.extract import MAX_RESPONSE_CHARS, NEGATION, extract_answer, extract_boxed, has_marked_answer

UNITS = (
    *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year"),
    *("foot", "feet", "inch", "yard"),
)
"""Removed in this order: `centimeter` before `meter`."""
INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
WHOLE_TEXT = re.compile(r"\\text\{(.+?)\}")
PROPER_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")
BRACKETED = re.compile(r"[()\[\]]([^()\[\]]+)[()\[\]]")
MIXED_NUMBER = re.compile(r"(\d) +(\d)")


def last_box(response: str) -> str | None:
    r"""Return what the last `\boxed{` of a response holds; None if it is not closed, or if there is none."""
    start = response.rfind("\\boxed")
    if start < 0 or not response.startswith("\\boxed{", start):
        return None
    depth = 0
    for brace in re.finditer(r"[{}]", response[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return response[start + len("\\boxed{") : start + brace.start()]
    return None


def is_integer_answer(given: str, right: str) -> bool:
    """Return whether a text is this integer, as either of the two normalizations reads it.

    The rules are those of `ZeroShotBoxedInQuestionEvaluation` in Simply, the program of the first guide, and stricter
    than `equal`: the last box of the response counts, closed or not, and must hold the number alone. TeX spacing, `$`,
    `%`, thousands separators and units of time and length are ignored; `18 dollars` and `18 eggs` are wrong. An answer
    that takes itself back, or has digits of another script, is wrong here, though Simply accepts it.
    Source: `simply/utils/math_eval.py` and `evaluation_lib.py` of https://github.com/google-deepmind/simply.
    """
    return given.isascii() and not NEGATION.search(given) and right in (_as_latex(given), _as_number(given))


def _as_latex(text: str) -> str | None:
    """Read a text as the MATH benchmark's normalization does."""
    text = _unwrapped(text.strip()).strip().replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    for ignored in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(ignored, "")
    text, *units = text.split("\\text{ ")
    text = text.replace("\\%", "").replace("%", "")
    name, equals, value = text.partition("=")
    if equals and len(name) <= 2 and "=" not in value:
        text = value
    text = text.replace(" ", "")
    return text if len(units) <= 1 else None


def _as_number(text: str) -> str | None:
    """Read a text as a number with a unit of time or length, a currency or percent sign."""
    text = _unwrapped(text)
    for ignored in ("\\%", "\\$", "$", "%"):
        text = text.replace(ignored, "")
    for unit in UNITS:
        text = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", text)
    text = re.sub(r"\^ *\\circ", "", text)
    text = re.sub(r",\\! *", "", text)
    text = MIXED_NUMBER.sub(r"\1+\2", re.sub("- *", "-", text))
    text = re.sub(r"[ {}]", "", text).lower()
    alone = BRACKETED.fullmatch(text)
    return _integer(alone[1] if alone else text)


def _unwrapped(text: str) -> str:
    found = WHOLE_TEXT.fullmatch(text)
    return found[1] if found else text


def _integer(text: str) -> str | None:
    """Return the integer that a text writes, also as 1,800, 18.00 or 1.8e1."""
    text = PROPER_COMMA.sub("", text)
    try:
        value = float(text)
    except ValueError:
        return None
    return str(round(value)) if abs(value) < 2**53 and abs(value - round(value)) <= 1e-7 else None


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
    """Return 1 if the last box holds the right integer and nothing else, as Simply judges; see `is_integer_answer`.

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
