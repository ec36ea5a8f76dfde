r"""The rules of `ZeroShotBoxedInQuestionEvaluation` in Simply, the program of the first guide, for integer answers.

They are stricter than `equal`: the last box of the response counts, closed or not, and must hold the number alone. TeX
spacing, `$`, `%`, thousands separators and units of time and length are ignored; `18 dollars` and `18 eggs` are wrong.
An answer that takes itself back, or has digits of another script, is wrong here, though Simply accepts it.
Source: `simply/utils/math_eval.py` and `evaluation_lib.py` of https://github.com/google-deepmind/simply.
"""

import re

from trainer.rewards.extract import NEGATION

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
    """Return whether a text is this integer, as either of the two normalizations reads it."""
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
