r"""Compare a given answer with the correct one: numbers exactly, words as words, the rest as mathematics.

A number may stand beside a unit, a currency, a percent sign or the variable it is the value of: `18`, `18.00`, `$18`,
`18%`, `x=18` and `18 dollars` are equal; `18 or 19`, `18x` and digits of other scripts are no numbers.

An expression that is left to compute (`9+9`, `36/2`, `2/4`) is no answer where an integer or a fraction in lowest terms
is right, as in Simply (`simply/utils/math_eval.py`, `match`); the lenient comparison accepts it.

math-verify compares what is no number. Numbers are compared here: on the answers of test_equal.py, math-verify 0.9
alone judges 20 of 86 wrongly (`x=3, y=18`, `18x` and `18i` are 18; `1.8e1`, `3 1/2` and `Paris` are unreadable), and
takes 0.46 ms per number instead of 0.04.
"""

import logging
import re
from fractions import Fraction
from functools import cache, lru_cache
from math import gcd
from typing import Any, NamedTuple

from trainer.rewards.extract import NEGATION, NUMBER
from trainer.rewards.process import uncounted_cpu_time

MAX_ANSWER_CHARS = 300
"""Maximum characters of an answer; longer text is not an answer."""

WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("{", "}"), ("`", "`"))
WRAPPER_COMMAND = re.compile(r"\\(?:boxed|fbox|framebox|text|textbf|mathbf|mathrm|mbox)\s*\{([^{}]*)\}")
TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
REPLACEMENTS = (
    # a backslash before the command makes two, which end a row of a matrix
    (re.compile(r"\{,\}|(?<!\\)\\[,!]|\\(?:left|right|displaystyle)(?![a-zA-Z])|\^\s*\{?\s*\\circ\s*\}?|°"), ""),
    (re.compile(r"(?<!\\)\\[;: ]|~|\\q?quad(?![a-zA-Z])|\s+"), " "),
    (re.compile(r"(?<!\\)\\([%$#&])"), r"\1"),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\u2212"), "-"),
)
FRACTION = re.compile(r"\\frac\s*(?:\{\s*(\d+(?:\.\d+)?)\s*\}|(\d))\s*(?:\{\s*(\d+(?:\.\d+)?)\s*\}|(\d))", re.ASCII)
MIXED = re.compile(r"(?<![\d.,/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.,/])", re.ASCII)
SQUARED_UNIT = re.compile(r"(?<=[A-Za-z])\s*\^\s*\{?\s*[23]\s*\}?")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)
SPACED_THOUSANDS = re.compile(r"(?<![\d.,/])\d{1,3}(?: \d{3})+(?!\d|\s*/)", re.ASCII)
CHOICE = re.compile(r"\(?\s*([A-J])\s*\)?[.:]?")
"""A letter of a multiple choice, `A` or `(A)`."""
COLLECTION = re.compile(
    r"\\begin\{([a-zA-Z]*matrix)\}(?P<rows>.*)\\end\{\1\}|[(\[](?P<tuple>.*)[)\]]|\\\{(?P<set>.*)\\\}", re.DOTALL
)
ELEMENT_END = re.compile(r",|&|\\\\")
SEPARATOR = re.compile(r"[,;]|\b(?:and|or)\b", re.IGNORECASE)
EQUALS = re.compile(r"=|\u2248|\\approx(?![a-zA-Z])")
BEFORE_VARIABLE = re.compile(r"(?:.*(?:[^A-Za-z]|[A-Za-z]{2}))?", re.DOTALL)
"""A single letter directly before the number makes it a name: x18."""
SURROUNDING_TEXT = (re.compile(r"[A-Za-z\s$€£¥:.,('\"]*"), re.compile(r"[A-Za-z\s$€£¥%.,;/)'\"²³-]*"))
"""Text allowed before and after a number."""
QUALIFIED = re.compile(
    r"\b(?:or|plus|minus|versus|squared|cubed|at\s+(?:least|most)|[a-z]*(?:tenth|hundredth|thousandth)s?|fifths|halves)\b"
    r"|\band\s+(?:a|an|one|two|three)[\s-]+(?:half|third|quarter|fourth|fifth)"
    r"|\b(?:zero|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|sixty|seventy"
    r"|eighty|ninety|(?:thir|four|fif|six|seven|eigh|nine)teen)\b(?!-)",
    re.IGNORECASE,
)
"""Beside a number, what makes another number of it: `18 or nineteen`, `18 and a half`; not `18 ten-dollar bills`."""
BOUND = re.compile(
    r"\b(?:(?:more|less|fewer|greater|higher|lower)\s+than|up\s+to|almost|nearly|over|under|above|below)[\s$€£¥]*$",
    re.IGNORECASE,
)
"""Before a number, what makes it a bound."""
VARIABLE = re.compile(r"\s*(?:[abeiknxyz]|pi)\s*")
MAGNITUDE = re.compile(r"\s*(hundred|thousand|million|billion|trillion)\b", re.IGNORECASE)
MAGNITUDES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
MATHEMATICAL = re.compile(r"[\d\\^+*/=<>()\[\]|]", re.ASCII)


class Number(NamedTuple):
    """The number in an answer. is_written_out: false for a fraction that is not in lowest terms."""

    value: Fraction
    is_written_out: bool


@lru_cache(maxsize=4096)  # the samples of a group give the same answers, and several rewards ask about each
def is_equal(given: str, right: str, *, lenient: bool = False) -> bool:
    """Return whether an answer is correct. Deterministic; symbolic comparison needs a time limit around it.

    lenient: accept an expression whose value is right.
    """
    if len(given) > MAX_ANSWER_CHARS:
        return False
    left, gold = strip_formatting(given), strip_formatting(right)
    if not left or (NEGATION.search(left) and not NEGATION.search(gold)):
        return False
    if _normalized_words(left) == _normalized_words(gold):
        return True
    a, b = _parse_number(left), _parse_number(gold)
    if a is not None and b is not None:
        is_decimal = b.value.denominator > 1 and "." in gold
        return a.value == b.value and (lenient or a.is_written_out or is_decimal)
    if choice := CHOICE.fullmatch(TEXT.sub(r" \1 ", gold).strip()):
        said = CHOICE.fullmatch(TEXT.sub(r" \1 ", left).strip())
        return said is not None and said[1] == choice[1]
    if not (MATHEMATICAL.search(left) and MATHEMATICAL.search(gold)) or not (lenient or _is_computed(left, gold)):
        return False
    return _is_equal_expression(TEXT.sub("", left), TEXT.sub("", gold))


def _is_computed(given: str, gold: str) -> bool:
    """Return whether numbers are written out where integers are right, also in tuples, sets and matrices."""
    said, wanted = _elements(given), _elements(gold)
    numbers = [_parse_number(text) for text in wanted]
    is_integer = [number is not None and number.value.denominator == 1 for number in numbers]
    if not all(is_integer) and (len(said) != len(wanted) or gold.startswith("\\{")):  # a set has no order
        return True
    must = is_integer if len(said) == len(wanted) else [True] * len(said)
    found = [_parse_number(text) for text in said]
    return all(not m or (number is not None and number.is_written_out) for m, number in zip(must, found, strict=True))


def _elements(text: str) -> list[str]:
    """Return the elements of a tuple, set or matrix; the whole text if it is none."""
    found = COLLECTION.fullmatch(THOUSANDS.sub("", text))
    if found is None:
        return [text]
    inside = next(part for part in (found["rows"], found["tuple"], found["set"]) if part is not None)
    return [part.strip() for part in ELEMENT_END.split(inside) if part.strip()]


def canonicalize(answer: str) -> str | None:
    """Return equal text for answers with equal numbers or words; None if it is not an answer."""
    if len(answer) > MAX_ANSWER_CHARS or not (text := strip_formatting(answer)):
        return None
    value = parse_number(text)
    return _normalized_words(text) if value is None else str(value)


def strip_formatting(text: str) -> str:
    """Return the answer without surrounding text and TeX typography."""
    for pattern, by in REPLACEMENTS:
        text = pattern.sub(by, text)
    while True:
        stripped = text.strip().rstrip(".,;").strip()
        if wrapped := WRAPPER_COMMAND.fullmatch(stripped):
            stripped = wrapped[1]
        for begin, end in WRAPPERS:
            inside = stripped[len(begin) : -len(end)]
            is_wrapped = len(stripped) > len(begin) + len(end) and stripped == begin + inside + end
            if is_wrapped and begin not in inside and end not in inside:
                stripped = inside
        if stripped == text:
            return text
        text = stripped


def parse_number(text: str) -> Fraction | None:
    """Return the number in a text, ignoring unit or currency; None if there is none, or more than one.

    Also None for a division by zero and for more digits than Python converts (4300).
    """
    found = _parse_number(text)
    return None if found is None else found.value


def _parse_number(text: str) -> Number | None:
    text = SPACED_THOUSANDS.sub(lambda m: m[0].replace(" ", ""), TEXT.sub(r" \1 ", text))
    *names, text = EQUALS.split(THOUSANDS.sub("", text))
    if SEPARATOR.search(" ".join(names)):
        return None
    text = FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]}", text)
    text = SQUARED_UNIT.sub("", text)
    whole = Fraction(0)
    if mixed := MIXED.search(text):
        text = text[: mixed.start(1)] + text[mixed.start(2) :]
        whole = _fraction(mixed[1], "1") or whole
    found = list(NUMBER.finditer(text))
    if len(found) != 1:
        return None
    before, after = text[: found[0].start()], text[found[0].end() :]
    allowed_before, allowed_after = SURROUNDING_TEXT
    if not (allowed_before.fullmatch(before) and allowed_after.fullmatch(after) and BEFORE_VARIABLE.fullmatch(before)):
        return None
    is_other = VARIABLE.fullmatch(after) or after.startswith(("\u00b2", "\u00b3")) or BOUND.search(before)
    if is_other or any(pattern.search(text) for pattern in (NEGATION, QUALIFIED) for text in (before, after)):
        return None
    digits = re.sub(r"[\s,$+]", "", found[0][0])
    above, _, below = digits.partition("/")
    value = _fraction(above, below or "1")
    if value is None:
        return None
    times = MAGNITUDE.match(after)
    value += -whole if digits.startswith("-") else whole
    return Number(value * MAGNITUDES[times[1].lower()] if times else value, not below or _is_reduced(above, below))


def _is_reduced(above: str, below: str) -> bool:
    return above.lstrip("-").isdecimal() and below.isdecimal() and int(below) > 1 and gcd(int(above), int(below)) == 1


def _fraction(above: str, below: str) -> Fraction | None:
    try:
        return Fraction(above) / Fraction(below)
    except (ValueError, ZeroDivisionError):
        return None


def _normalized_words(text: str) -> str:
    return " ".join(TEXT.sub(r" \1 ", text).casefold().split()).strip(" .!")


def _is_equal_expression(given: str, right: str) -> bool:
    """Return whether two LaTeX expressions, without `$` around them, are equal; False if one is unreadable.

    math-verify's parser never evaluates Python; it and SymPy may never return, so call this under a limit.
    """
    math_verify = _load_math_verify()
    left, gold = ([*_parse(math_verify, text)] for text in (given, right))
    return bool(left and gold and math_verify.verify(gold, left, timeout_seconds=None))


@cache
def _load_math_verify() -> Any:
    with uncounted_cpu_time():
        import math_verify
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of every unreadable expression
    return math_verify


def _parse(math_verify: Any, text: str) -> list[Any]:
    where = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
    return math_verify.parse(
        f"\\boxed{{{text}}}", extraction_config=where, fallback_mode="no_fallback", parsing_timeout=None
    )
