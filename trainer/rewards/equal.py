r"""Compare a given answer with the correct one: numbers exactly, words as words, the rest as mathematics.

A choice may be said with its text, `C`, `(C)`, `C. mitochondria` and `C - mitochondria`; a time of day in either form,
`5:30 PM`, `17:30`.

An expression that is left to compute (`9+9`, `36/2`, `2/4`) is no answer where an integer or a fraction in lowest terms
is right, as in Simply (`simply/utils/math_eval.py`, `match`); the lenient comparison accepts it.

math-verify compares what is no number. Numbers are compared here: on the answers of test_equal.py, math-verify 0.9
alone judges 20 of 86 wrongly (`x=3, y=18`, `18x` and `18i` are 18; `1.8e1`, `3 1/2` and `Paris` are unreadable), and
takes 0.46 ms per number instead of 0.05.
"""

import logging
import re
import unicodedata
from functools import cache, lru_cache
from typing import Any, NamedTuple

from trainer.rewards.extract import DENIAL, INVISIBLE, NEGATION
from trainer.rewards.number import (
    CHANGED,
    QUALIFIED,
    SEPARATOR,
    TEXT,
    THOUSANDS,
    ContradictionError,
    Number,
    read_number,
)
from trainer.rewards.process import uncounted_cpu_time

MAX_ANSWER_CHARS = 300
"""Maximum characters of an answer; longer text is not an answer."""

WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("{", "}"))
WRAPPER_COMMAND = re.compile(r"\\(?:boxed|fbox|framebox|text|textbf|mathbf|mathrm|mbox)\s*\{([^{}]*)\}")
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
SYMBOLS = str.maketrans(
    {"\u2010": "-", "\u2011": "-", "\u2012": "-", "–": "-", "\u2212": "-", "\u2044": "/", "\u2215": "/"}
    | {"×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap "}
    | {"≤": r"\le ", "≥": r"\ge "}
)
REPLACEMENTS = (
    (INVISIBLE, ""),
    (re.compile(r"[⁰¹²³⁴-⁹⁻⁺]+"), lambda m: f"^{{{m[0].translate(SUPERSCRIPTS)}}}"),
    (re.compile(r"[¼-¾⅐-⅞]"), lambda m: f" {unicodedata.normalize('NFKC', m[0])}"),
    (re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[a-zA-Z]))"), r"\\sqrt{\1\2}"),
    (re.compile(r"(?<![\w*])(\*{1,3}|`)(?=[^\s*`])([^*`]+)(?<!\s)\1(?![\w*])"), r"\2"),
    # a backslash before the command makes two, which end a row of a matrix
    (re.compile(r"\{,\}|(?<!\\)\\[,!]|\\(?:left|right|displaystyle)(?![a-zA-Z])|\^\s*\{?\s*\\circ\s*\}?|°"), ""),
    (re.compile(r"(?<!\\)\\[;: ]|~|\\q?quad(?![a-zA-Z])|\s+"), " "),
    (re.compile(r"(?<!\\)\\([%$#&])"), r"\1"),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
)
PUNCTUATION = re.compile(r"\s*([,;:()\[\]{}=+&])\s*")
DASH = r"[-\u2014]+(?=\s+(?!(?:sin|cos|tan|log|exp|ln|pi)\b)[A-Za-z][a-z])"
"""Between a choice and its words; no minus."""
CHOICE = re.compile(
    r"(?i:(?:the\s+)?(?:option|choice|answer)\s+)?"
    r"(?:(?:\(\s*(?P<round>[A-Ja-j])\s*\)|\[\s*(?P<square>[A-Ja-j])\s*\])(?=[\s.:]|$)"
    rf"|(?P<bare>[A-Ja-j])(?=\s*(?:[:)]|\.(?:\s|$)|$)|\s+is\s|\s+\(\w{{2}}|\s+{DASH}))"
    rf"\s*(?:[.:)]|{DASH})?\s*(?P<text>(?:[^,;/&+=^*].*)?)",
    re.DOTALL,
)
"""A letter of a multiple choice, alone or with its text: `A`, `(A)`, `A. mitochondria`."""
ANOTHER_CHOICE = re.compile(
    r"(?<!\S)\([A-Ja-j]\)|\[[A-J]\]|(?<![A-Za-z'])[A-J]\s*(?:[:)]|\.(?:\s|$))|\b(?:or|and|not|nor)\s+\(?[A-J]\b"
)
CLOCK = re.compile(
    r"(?:at\s+)?(?P<hour>\d{1,2})(?::(?P<minute>[0-5]\d))?(?::(?P<second>[0-5]\d))?\s*(?:(?P<half>[ap])\.?\s?m\b\.?)?",
    re.IGNORECASE | re.ASCII,
)
COLLECTION = re.compile(
    r"\\begin\{([a-zA-Z]*matrix)\}(?P<rows>.*)\\end\{\1\}|[(\[](?P<tuple>.*)[)\]]|\\\{(?P<set>.*)\\\}", re.DOTALL
)
ELEMENT_END = re.compile(r",|&|\\\\")
LAST_OF_LIST = re.compile(r"\s*,?\s*\band\b\s*", re.IGNORECASE)
ROUNDED = re.compile(r"\u2248|\\approx(?![a-zA-Z])")
MEMBER = re.compile(r"^[a-zA-Z]\s*\\in(?![a-zA-Z])\s*")
RATIO = re.compile(r"\s*(?::|\bto\b)\s*")
NAMING = (
    r"(?:(?:the|an?(?=\s+[a-z]{3})|ordered|open|closed|point|interval|set|vector|matrix|pair|triple|tuple|coordinates?"
    r"|expression|polynomial|function|equation|number|fraction|value|simply|exactly|equal|to|be)\s+)*"
)
MATHEMATICS = re.compile(
    NAMING + r"(?:\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]|([(\[].*[)\]]|\\\{.*\\\}))(?P<rest>[A-Za-z\s.]*)"
)
"""Mathematics with words around it: `the interval $[2, 5)$`, `$3\\sqrt{2}$ meters`."""
MATHEMATICAL = re.compile(r"[\d\\^+*/=<>()\[\]|]", re.ASCII)


@lru_cache(maxsize=4096)  # the samples of a group give the same answers, and several rewards ask about each
def is_equal(given: str, right: str, *, lenient: bool = False) -> bool:
    """Return whether an answer is correct. Deterministic; symbolic comparison needs a time limit around it.

    lenient: accept an expression whose value is right.
    """
    if len(given) > MAX_ANSWER_CHARS:
        return False
    left, gold = strip_formatting(given), strip_formatting(right)
    if not left:
        return False
    if _normalized_words(left) == _normalized_words(gold):
        return True
    choice, said = _choice(gold), _choice(left)
    if choice is not None and said is not None and choice.letter != said.letter:
        return False
    if choice is not None and not (choice.text and (said is None or said.text)):
        return said is not None
    if choice is not None or (said is not None and said.text):
        given, right = (text if part is None else part.text for part, text in ((said, left), (choice, gold)))
        return is_equal(given, right, lenient=lenient)
    if NEGATION.search(left) and not NEGATION.search(gold):
        return False
    if (time := _clock(gold)) and (told := _clock(left)):
        return told.of_day == time.of_day or (not time.half and told[:3] == time[:3])
    try:
        a, b = read_number(left), read_number(gold)
    except ContradictionError:
        return False
    exact, *rounded = ROUNDED.split(left, maxsplit=1)
    if rounded and is_equal(exact, right, lenient=lenient):
        return True
    if a is not None and b is not None:
        is_decimal = b.value.denominator > 1 and "." in gold
        return a.is_same(b) and (lenient or a.is_written_out or is_decimal)
    return _is_equal_mathematics(left, gold, lenient)


def _is_equal_mathematics(given: str, gold: str, lenient: bool) -> bool:
    """Return whether two ratios, lists, tuples or expressions are equal, where one of them at least is no number."""
    if not (MATHEMATICAL.search(given) and MATHEMATICAL.search(gold)):
        return False
    if ":" in gold:
        is_same = _normalized_words(RATIO.sub(":", given)) == _normalized_words(gold)
        if is_same or (":" in given and not lenient):
            return is_same
    is_list = SEPARATOR.search(gold) is not None
    if is_list:
        given, gold = (LAST_OF_LIST.sub(", ", text) for text in (given, gold))
        if _normalized_words(given) == _normalized_words(gold):
            return True
    given = MEMBER.sub("", given)
    if found := MATHEMATICS.fullmatch(given):
        given = next(filter(None, found.groups()))
        if any(pattern.search(found["rest"]) for pattern in (QUALIFIED, SEPARATOR)):
            return False
    said = TEXT.sub(r" \1 ", THOUSANDS.sub("", given))
    if not (is_list or COLLECTION.fullmatch(gold)) and SEPARATOR.search(said):
        return False
    if (QUALIFIED.search(said) and not QUALIFIED.search(gold)) or CHANGED.search(MATHEMATICAL.split(said, 1)[0]):
        return False
    if not (lenient or _is_computed(given, gold)):
        return False
    return _is_equal_expression(TEXT.sub("", given), TEXT.sub("", gold))


def _is_computed(given: str, gold: str) -> bool:
    """Return whether numbers are written out where integers are right, also in tuples, sets and matrices."""
    said, wanted = _elements(given), _elements(gold)
    numbers = [_read(text) for text in wanted]
    is_integer = [number is not None and number.value.denominator == 1 for number in numbers]
    if not all(is_integer) and (len(said) != len(wanted) or gold.startswith("\\{")):  # a set has no order
        return True
    must = is_integer if len(said) == len(wanted) else [True] * len(said)
    found = [_read(text) for text in said]
    return all(not m or (number is not None and number.is_written_out) for m, number in zip(must, found, strict=True))


def _elements(text: str) -> list[str]:
    """Return the elements of a list, tuple, set or matrix; the whole text if it is none."""
    text = THOUSANDS.sub("", text)
    found = COLLECTION.fullmatch(text)
    if found is None:
        return [text] if re.search(r"[(\[{\\]", text) else [part.strip() for part in text.split(",")]
    inside = next(part for part in (found["rows"], found["tuple"], found["set"]) if part is not None)
    return [part.strip() for part in ELEMENT_END.split(inside) if part.strip()]


class Choice(NamedTuple):
    """A letter of a multiple choice in lower case, and its text."""

    letter: str
    text: str


def _choice(text: str) -> Choice | None:
    """Return the choice that an answer is; None if it is none, names another as well, or is taken back."""
    found = CHOICE.fullmatch(TEXT.sub(r" \1 ", text).replace("$", " ").strip())
    if found is None:
        return None
    said = found["text"].strip(" .:")
    is_denied = DENIAL.match(said.lstrip(" (")) and said.casefold() != "false"
    if is_denied or ANOTHER_CHOICE.search(found["text"]):
        return None
    return Choice((found["round"] or found["square"] or found["bare"]).lower(), said)


class Clock(NamedTuple):
    """A time of day; half: `a`, `p` or none."""

    hour: int
    minute: int
    second: int
    half: str

    @property
    def of_day(self) -> tuple[int, int, int]:
        """The same by 24 hours."""
        hour = self.hour % 12 + (12 if self.half == "p" else 0) if self.half else self.hour
        return hour, self.minute, self.second


def _clock(text: str) -> Clock | None:
    found = CLOCK.fullmatch(TEXT.sub(r" \1 ", text).strip())
    if found is None or not (found["minute"] or found["half"]):
        return None
    hour, minute, second = (int(found[part] or 0) for part in ("hour", "minute", "second"))
    return Clock(hour, minute, second, (found["half"] or "").lower())


def canonicalize(answer: str) -> str | None:
    """Return equal text for answers with equal numbers or words, or of one choice; None if it is not an answer."""
    if len(answer) > MAX_ANSWER_CHARS or not (text := strip_formatting(answer)):
        return None
    if choice := _choice(text):
        return choice.letter
    number = _read(text)
    return _normalized_words(text) if number is None else str(number.value)


def strip_formatting(text: str) -> str:
    """Return the answer without surrounding text and typography, of TeX, Markdown or Unicode."""
    for pattern, by in REPLACEMENTS:
        text = pattern.sub(by, text)
    text = text.translate(SYMBOLS)
    while True:
        stripped = text.strip().rstrip(".,;").strip("* ")
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


def _read(text: str) -> Number | None:
    try:
        return read_number(text)
    except ContradictionError:
        return None


def _normalized_words(text: str) -> str:
    words = " ".join(TEXT.sub(r" \1 ", text).casefold().split())
    return re.sub(r"(?<=[a-z]{2})!+$", "", PUNCTUATION.sub(r"\1", words).strip(' ."“”'))


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
