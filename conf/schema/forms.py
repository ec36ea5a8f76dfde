"""How a value of the config is written: what a type wants, in words, and a value mended so that it has that type."""

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from conf.schema.base import BREAKS
from conf.schema.text_keys import alternatives

MAX_SHOWN_CHARS = 600
"""Limit for a message, and for each value in it."""
SHORT, SURE = 6, 0.8
"""Letters of a name that may be another's but for one of them, and likeness of two words that is enough then."""
ALIKE = 0.75
"""Likeness of a short part of a name to its misspelling."""
PARTS = re.compile(r"[-_./]+")
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
EXAMPLES: dict[Any, Any] = {float: 1.0, int: 1, str: "VALUE"}
"""A value of a type, for a name that was given without one."""
PLAIN = re.compile(r"-{0,2}[\w./][\w./-]*", re.ASCII)
"""A word that Hydra's grammar takes without quotes."""

LISTED = re.compile(r"[^\s,\"'{}\[\]]+(\s*,\s*[^\s,\"'{}\[\]]+)+")
"""The words of a list without its brackets."""


def near_choices(word: str, choices: Iterable[str]) -> list[str]:
    """Return the choices that a word is probably meant to be, the nearest first.

    A short name with another letter is another thing, as ppo is not dpo: letters are swapped, missing or too many.
    """

    def is_part(short: str, long: str) -> bool:
        rest = iter(long)
        return all(letter in rest for letter in short)

    return [
        each
        for each in difflib.get_close_matches(word, choices, n=3)
        if len(word) > SHORT
        or difflib.SequenceMatcher(None, word, each).ratio() >= SURE
        or sorted(word) == sorted(each)
        or is_part(word, each)
        or is_part(each, word)
    ]


def misspelled(word: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return the names that a word is a misspelling of, the nearest first: another word is another thing.

    include is not exclude, and autoscale is not scale, however many letters they share. Names of the same number of
    parts differ by a few letters of each; of others, the shorter's parts are all in the longer.
    """
    ours = PARTS.split(word.lower())

    def is_near(one: str, other: str) -> bool:
        least = ALIKE if len(one) < SHORT else SURE
        return one == other or difflib.SequenceMatcher(None, one, other).ratio() >= least

    def is_meant(name: str) -> bool:
        theirs = PARTS.split(name.lower())
        if len(ours) == len(theirs):
            return all(map(is_near, ours, theirs))
        fewer, more = sorted(({*ours}, {*theirs}), key=len)
        return (len(fewer) > 1 and fewer < more) or is_near("".join(ours), "".join(theirs))

    found = difflib.get_close_matches(word, [*names], n=20, cutoff=cutoff)
    return [name for name in found if is_meant(name)]


def program_line(text: str) -> str:
    """Return the command that runs the program in a text that stands where none belongs; empty if it has none."""
    found = re.search(r"(?<!\S)([\w./-]+\.(py|sh))(?!\S)([^\n]*)", text)
    return f"slipway run -- {'python' if found[2] == 'py' else 'bash'} {found[1]}{found[3]}" if found else ""


def escape_line(text: str) -> str:
    """Return text on one line, with newlines and unprintable characters escaped and long text shortened."""
    if len(text) > MAX_SHOWN_CHARS:
        text = f"{text[: MAX_SHOWN_CHARS // 2]}… ({len(text)} characters) …{text[-MAX_SHOWN_CHARS // 2 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def expected(types: Iterable[Any]) -> str:
    """Return what alternatives of a type are, in words: `a whole number or end`, `a list of words`."""
    words = " or ".join(dict.fromkeys(map(_words, types))) or "another value"
    return re.sub(r"^a section with keys .*?kind.* or a section with .*", "a section with its kind and keys", words)


def _words(kind: Any) -> str:
    origin, inner = get_origin(kind), [one for one in get_args(kind) if one is not ...]
    if origin is Literal:
        return " or ".join(str(choice) for choice in inner)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping {{NAME: {_entry(inner[1])}, …}}"
    if isinstance(origin, type) and issubclass(origin, Sequence | frozenset | set):
        return "a list of words" if [*alternatives(inner[0])] == [str] else f"a list [{_entry(inner[0])}, …]"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"a section with keys {', '.join(kind.model_fields)}"
    return WORDS.get(kind, "a date such as 2026-12-31" if getattr(kind, "__name__", "") == "date" else "another value")


def _entry(annotation: Any) -> str:
    """Return a short word for what stands inside a list or a mapping."""
    kind = next(alternatives(annotation), str)
    origin = get_origin(kind)
    if origin is Literal:
        return "|".join(map(str, get_args(kind)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "{…}"
    if isinstance(origin, type) and issubclass(origin, Sequence | frozenset | set):
        return "[…]"
    return {int: "NUMBER", float: "NUMBER", bool: "true", str: "TEXT", Any: "VALUE"}.get(kind, "{KEY: VALUE}")


def repaired(kind: Any, given: Any) -> Any:
    """Return a value as a type wants it, `[64]` for 64, `{a: 1.0}` for a; None if it cannot be told what is meant."""
    origin, inner = get_origin(kind), [one for one in get_args(kind) if one is not ...]
    if origin is Literal:
        near = difflib.get_close_matches(str(given).lower(), [*map(str, inner)], n=1)
        return given if given in inner else near[0] if near else None
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _repaired_mapping(inner[1], given)
    if isinstance(origin, type) and issubclass(origin, Sequence | frozenset | set):
        of_text = [*alternatives(inner[0])] == [str]
        if isinstance(given, list) and _is_command(inner[0], given):
            given = [given]
        is_words = isinstance(given, str) and (of_text or LISTED.fullmatch(given))
        items = given if isinstance(given, list) else split(given) if is_words else [given]
        return _all([_repaired_one(inner[0], item) for item in items])
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return _repaired_section(kind, given)
    if kind is str:
        if isinstance(given, list):
            return repaired(kind, given[0]) if len(given) == 1 else None
        return None if isinstance(given, dict | list | bool | NoneType) else str(given)
    if kind in (int, float) and isinstance(given, str):
        try:
            return kind(given.replace("_", ""))
        except ValueError:
            value = _number(given)
            return value if value is None or kind is float else int(value) if value.is_integer() else None
    return given if isinstance(given, kind if isinstance(kind, type) else ()) else None


NUMBER = re.compile(  # m may be of minutes
    r"\$?(?P<value>[-+\d._]+(?:[eE][-+]?\d+)?)\s*(?P<of>[kKMbB%]|(?:/|\^|\*\*)(?P<other>[-+\d._]+))?"
)
THOUSANDS = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(,\d{3})+(?![\d,])")
TIMES = {"k": 1e3, "m": 1e6, "b": 1e9, "%": 0.01, "": 1.0}


def _number(text: str) -> float | None:
    """Return what `$5`, `1k`, `1,000`, `5%`, `1/1000` and `10^-3` mean; None for another text."""
    if (found := NUMBER.fullmatch(THOUSANDS.sub(lambda number: number[0].replace(",", ""), text.strip()))) is None:
        return None
    try:
        value, of, other = float(found["value"]), (found["of"] or "").lower(), float(found["other"] or 1)
        made = value * TIMES[of] if of in TIMES else value / other if of[0] == "/" else value**other
        return float(f"{made:.12g}")
    except (ValueError, TypeError, ArithmeticError):  # no number, or too large, or none of the real ones
        return None


def _is_command(item: Any, given: list[Any]) -> bool:
    """Return whether a list whose items are lists of words has the words of one of them."""
    of_lists = any([*alternatives(inner)] == [str] for kind in alternatives(item) for inner in get_args(kind)[:1])
    return of_lists and len(given) > 1 and all(isinstance(each, str) and " " not in each for each in given)


def _repaired_one(annotation: Any, given: Any) -> Any:
    return next((made for kind in alternatives(annotation) if (made := repaired(kind, given)) is not None), None)


def _repaired_mapping(annotation: Any, given: Any) -> Any:
    if isinstance(given, dict):
        made = _all([_repaired_one(annotation, value) for value in given.values()])
        return None if made is None else dict(zip(given, made, strict=True))
    pairs: dict[str, Any] = {}
    for each in given if isinstance(given, list) else [given]:
        if not isinstance(each, str):
            return None
        name, sign, value = each.partition("=" if "=" in each else ":")
        kind = next(alternatives(annotation), str)
        pairs[name.strip()] = _repaired_one(annotation, value.strip()) if sign else EXAMPLES.get(kind)
    return pairs if _all([*pairs.values()]) is not None else None


def _repaired_section(model: type[BaseModel], given: Any) -> Any:
    if isinstance(given, dict):
        return given
    if not isinstance(given, str) or not given:
        return None
    if "kind" in model.model_fields and (kind := _repaired_one(model.model_fields["kind"].annotation, given)):
        return {"kind": kind}
    name = "source" if "://" in given else "path"
    return {name: given} if name in model.model_fields else None


def _all(values: list[Any]) -> list[Any] | None:
    return None if any(value is None for value in values) else values


def split(text: str) -> list[str]:
    """Return the words of a text as it is written where a list is meant: between commas, or as in a shell."""
    if LISTED.fullmatch(text):
        return re.split(r"\s*,\s*", text)
    if BREAKS.fullmatch(text):
        return [text.replace(r"\n", "\n").replace(r"\t", "\t")]
    words = shlex.shlex(text, posix=True)
    words.whitespace_split, words.escape, words.commenters = True, "", ""  # a shell would drop a backslash
    try:
        return [*words] or [text]
    except ValueError:
        return [text]


def override(path: Sequence[str], value: Any) -> str:
    """Return `key=value` as a shell and Hydra's grammar take it; the value is YAML too."""
    cut = next((at for at, part in enumerate(path) if "." in part), len(path))
    for part in reversed(path[cut:]):  # a name with dots stands inside its section
        value = {part: value}
    word = f"{'.'.join(path[:cut])}={grammar(value)}"
    if not word.isprintable():  # $'…' of bash and zsh
        typed = word.replace("\\", r"\\").replace("'", r"\'")
        return f"$'{''.join(c if c.isprintable() else ascii(c)[1:-1] for c in typed)}'"
    return f"'{word}'" if "'" not in word else shlex.quote(word)


def grammar(value: Any) -> str:
    """Return a value in Hydra's grammar."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_name(name)}: {grammar(each)}' for name, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(grammar, value))}]"
    if isinstance(value, bool | NoneType):
        return {True: "true", False: "false", None: "null"}[value]
    if not isinstance(value, str) or PLAIN.fullmatch(value):
        return str(value)
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    return f'"{escaped}"'


def _name(name: Any) -> str:
    return re.sub(r"([:,{}\[\]() ])", r"\\\1", str(name))
