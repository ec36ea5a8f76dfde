r"""Read the number that an answer is.

It may stand beside a unit, a currency, a percent sign, a word of magnitude or the variable it is the value of: `18`,
`18.00`, `$18`, `18%`, `x=18`, `18 dollars` and `0.018 thousand` are 18. `18 or 19`, `18x`, `half of 18`, `18 to 20` and
digits of other scripts are no numbers. `0.\overline{3}` is 1/3. The parts of `x = 6*3 = 18` must have one value.
"""

import ast
import operator
import re
from fractions import Fraction
from math import gcd, prod
from typing import NamedTuple

from trainer.rewards.extract import NEGATION, NUMBER

TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
FRACTION = re.compile(r"\\frac\s*(?:\{\s*(\d+(?:\.\d+)?)\s*\}|(\d))\s*(?:\{\s*(\d+(?:\.\d+)?)\s*\}|(\d))", re.ASCII)
REPEATING = re.compile(
    r"(?<![\d.,])(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))(?!\s*(?:\d|\\(?:overline|bar|dot)))",
    re.ASCII,
)
MIXED = re.compile(r"(?<![\d.,/])(\d+)\s+(?:and\s+)?(\d+)\s*/\s*(\d+)(?![\d.,/])", re.ASCII)
SCIENTIFIC = re.compile(
    r"(?<![\d.])([1-9](?:\.\d+)?)\s*(?:\\times|\\cdot|[*x])\s*10\s*(?:\^|\*\*)"
    r"\s*(?:\{\s*([-+]?\d{1,3})\s*\}|([-+]?\d{1,3}))(?![\d.^])",
    re.ASCII,
)
SQUARED_UNIT = re.compile(r"(?<=[A-Za-z])\s*\^\s*\{?\s*[23]\s*\}?")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)
SPACED_THOUSANDS = re.compile(r"(?<![\d.,/])\d{1,3}(?: \d{3})+(?!\d|\s*/)", re.ASCII)
SEPARATOR = re.compile(r"[,;]|\b(?:and|or)\b", re.IGNORECASE)
EQUALS = re.compile(r"((?<![<>!=])=+(?![=>])|\u2248|\\approx(?![a-zA-Z]))")
ARITHMETIC = re.compile(r"[\d.+*/() -]+", re.ASCII)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
CURRENCY = "$£¥¢\u20a0-\u20bf"
SURROUNDING_TEXT = (
    re.compile(rf"[A-Za-z\s{CURRENCY}:.,('\"“‘]*"),
    re.compile(rf"[A-Za-z\s{CURRENCY}%.,;/()'\"”’—-]*"),
)
"""Text allowed before and after a number."""
NEGATIVE = re.compile(r"^\s*(?:negative|minus)\s+(?=[$\d.])", re.IGNORECASE)
NUMBER_WORD = re.compile(
    r"\b(?:zero|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|sixty|seventy"
    r"|eighty|ninety|(?:thir|four|fif|six|seven|eigh|nine)teen)\b(?!-)",
    re.IGNORECASE,
)
QUALIFIED = re.compile(
    r"\b(?:or|plus|minus|versus|squared|cubed|factorial|at\s+(?:the\s+)?(?:very\s+)?(?:least|most)"
    r"|[a-z]*(?:tenth|hundredth|thousandth)s?|fifths|halves|thirds|fourths|(?:six|seven|eigh|nin)ths"
    r"|maybe|perhaps|possibly|probably|might|if|unless|but|depending|assuming|except"
    r"|i\s+(?:think|guess|believe|suppose|hope))\b"
    r"|\band\s+(?:up|over|above|below|under|more|less"
    r"|(?:a|an|one|two|three)[\s-]+(?:half|third|quarter|fourth|fifth))\b",
    re.IGNORECASE,
)
"""Beside an answer, what makes another of it, or takes half of it back: `18 and a half`, `18 if Tom is right`."""
CHANGED = re.compile(
    r"\b(?:(?:more|less|fewer|greater|higher|lower)\s+than|up\s+to|almost|near|nearly|over|under|above|below"
    r"|sin|cos|tan|log|ln|(?:minimum|maximum|half|third|quarter|fourth|fifth|tenth|percent|root|square|cube"
    rf"|twice|thrice|double|triple|negative)(?:\s+of)?(?:\s+(?:the|a))?)[\s{CURRENCY}]*$",
    re.IGNORECASE,
)
"""Right before an answer, what makes it a bound or another number."""
NAMED = re.compile(r"(?:(?<![A-Za-z])[A-Za-z]|[A-Za-z]\()$")
"""A letter right before the number makes it a name, x18, or an argument, f(18)."""
VARIABLE = re.compile(r"[\s(]*(?:(?:over|and|times|by)\s+)?(?:[abeiknxyz]|pi)[\s)]*")
CIRCUMSTANCE = re.compile(
    r"(?:[\s$]+[A-Za-z][A-Za-z-]*)+?"
    r"(?=(?P<rest>[\s,]+"
    r"(?:(?:for|in|on|at|over|during|within)\s+(?![\d.,]+\W*$)|(?:that|from|after|before)\s+[a-z]).*))",
    re.DOTALL,
)
"""After a number with its unit, what says when or what for: `18 dollars for 3 days`. Not `1 chance in 5`."""
LISTED = re.compile(rf"(?:[,;&]|\b(?:and|to|then)\b).*(?:\d|{NUMBER_WORD.pattern})", re.IGNORECASE | re.DOTALL)
MAGNITUDE = re.compile(r"(?i:\s*(?:hundred|thousand|million|billion|trillion)\b)+|(?:[kKMB]|bn|mn)(?![A-Za-z])")
MAGNITUDES = {
    **{"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12},
    **{"k": 10**3, "K": 10**3, "M": 10**6, "mn": 10**6, "B": 10**9, "bn": 10**9},
}
PERCENT = re.compile(r"\s*(?:%|percent\b|per\s+cent\b)", re.IGNORECASE)
UNIT = re.compile(r"[\s$(-]*(?:(?:square|cubic)\s+)?([A-Za-z]+)")
UNITS = {
    name: names.split()[0]
    for names in (
        *("mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre"),
        *("inch inche", "foot feet ft", "yard yd", "mile mi", "second sec", "minute min", "hour hr h", "day", "week"),
        *("month", "year yr", "mg milligram", "g gram", "kg kilogram", "ounce oz", "pound lb"),
        *("ml milliliter millilitre", "liter l litre", "gallon", "cent", "dollar"),
    )
    for name in names.split()
}
"""Units of which one is not the other, without the s of the plural."""


class Number(NamedTuple):
    """The number in an answer. is_written_out: false for a fraction that is not in lowest terms."""

    value: Fraction
    is_written_out: bool
    is_percent: bool
    unit: str

    def is_same(self, right: "Number") -> bool:
        """Return whether this is the right one: 50 and 0.5 are 50%, 50% is 0.5; 18 km is 18, but not 18 m."""
        values = [self.value]
        if self.is_percent and not right.is_percent:
            values.append(self.value / 100)
        if right.is_percent and not self.is_percent and self.value.denominator > 1:
            values.append(self.value * 100)
        return right.value in values and not (self.unit and right.unit and self.unit != right.unit)


class ContradictionError(ValueError):
    """An answer equates what is not equal: `17 = 18`."""


def read_number(text: str) -> Number | None:
    """Return the number in a text; of `18 = 9+9`, the one that is written out. None if there is none or more than one.

    Also None for a division by zero and for more digits than Python converts (4300). Raises ContradictionError.
    """
    text = SPACED_THOUSANDS.sub(lambda m: m[0].replace(" ", ""), TEXT.sub(r" \1 ", text))
    text = REPEATING.sub(_as_fraction, THOUSANDS.sub("", text))
    pieces = EQUALS.split(SCIENTIFIC.sub(r"\1e\2\3", text))
    parts, signs = pieces[::2], ["=", *pieces[1::2]]
    numbers = [_read_part(part) for part in parts]
    known = None
    for part, sign, number in zip(parts, signs, numbers, strict=True):
        value = number.value if number else _compute(part) if len(parts) > 1 else None
        if value is None or known is None or (number and number.is_percent and value == 100 * known):
            known = known if value is None else value
        elif abs(value - known) > (0 if "=" in sign else Fraction(1, 2 * 10 ** _decimals(part))):
            raise ContradictionError(text)
    found = [number for number in numbers if number]
    if not found or any(SEPARATOR.search(part) for part in (parts if numbers[-1] is None else parts[:-1])):
        return None
    return next((number for number in reversed(found) if number.is_written_out), found[-1])


def _read_part(text: str) -> Number | None:
    text = FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]}", text)
    text = NEGATIVE.sub("-", SQUARED_UNIT.sub("", text))
    whole = Fraction(0)
    if mixed := MIXED.search(text):
        text = text[: mixed.start(1)] + text[mixed.start(2) :]
        whole = _fraction(mixed[1], "1") or whole
    found = NUMBER.search(text)
    if found is None:
        return None
    before, after = text[: found.start()], _without_circumstance(text[found.end() :])
    times = 1
    if scale := MAGNITUDE.match(after):
        names = re.findall(r"[A-Za-z]+", scale[0])
        times = prod(MAGNITUDES[name if len(name) < 3 else name.lower()] for name in names)
        after = after[scale.end() :]
    allowed_before, allowed_after = SURROUNDING_TEXT
    if not (allowed_before.fullmatch(before) and allowed_after.fullmatch(after)):
        return None
    if NAMED.search(before) or CHANGED.search(before) or VARIABLE.fullmatch(after):
        return None
    if any(pattern.search(beside) for pattern in (NEGATION, QUALIFIED, NUMBER_WORD) for beside in (before, after)):
        return None
    above, _, below = re.sub(r"[\s,$+]", "", found[0]).partition("/")
    value = _fraction(above, below or "1")
    if value is None:
        return None
    value += -whole if above.startswith("-") else whole
    unit = UNIT.match(after)
    return Number(
        value * times,
        not below or _is_reduced(above, below),
        PERCENT.match(after) is not None,
        UNITS.get(unit[1].lower().removesuffix("s"), "") if unit else "",
    )


def _as_fraction(repeating: re.Match[str]) -> str:
    """Return a decimal with a period as an integer or a fraction in lowest terms."""
    before, fixed, period = repeating[1] or "0", repeating[2], repeating[3] or repeating[4]
    above = int(before + fixed + period) - int(before + fixed)
    return str(Fraction(above, 10 ** len(fixed) * (10 ** len(period) - 1)))


def _without_circumstance(after: str) -> str:
    """Return what follows a number without its circumstance, if that names no other answer."""
    found = CIRCUMSTANCE.match(after)
    if found is None or any(pattern.search(found["rest"]) for pattern in (NEGATION, QUALIFIED, LISTED, EQUALS)):
        return after
    return found[0]


def _compute(text: str) -> Fraction | None:
    """Return the value of sums and products of numbers; None for anything else."""
    text = re.sub(r"\\times|\\cdot", "*", text.replace("\\div", "/")).replace("$", "").strip()
    if not ARITHMETIC.fullmatch(text):
        return None
    try:
        return _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value):
            return Fraction(str(value))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](_evaluate(left), _evaluate(right))
    raise ValueError(node)


def _decimals(text: str) -> int:
    found = re.search(r"\.(\d+)", text)
    return len(found[1]) if found else 0


def _is_reduced(above: str, below: str) -> bool:
    return above.lstrip("-").isdecimal() and below.isdecimal() and int(below) > 1 and gcd(int(above), int(below)) == 1


def _fraction(above: str, below: str) -> Fraction | None:
    try:
        return Fraction(above) / Fraction(below)
    except (ValueError, ZeroDivisionError):
        return None
