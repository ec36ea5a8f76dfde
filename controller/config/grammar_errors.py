"""Why Hydra's grammar refuses an override, and how it is written: the open quote or bracket, the malformed key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

SECRET = re.compile(r"[+~]*(env|env\.secrets|notify|notify\.webhook)(\.[^.]*)?")
"""Keys below which somebody may have typed a secret: no message shows what."""
TYPOGRAPHIC = re.compile("[\u2018-\u201f\u00ab\u00bb\u2032\u2033]")
QUOTED_KEY = re.compile(r"[\"'][^\"']*[\"']\s*:")
PAIR = re.compile(r"(?P<name>[A-Za-z_][\w.-]*)=(?P<value>.+)", re.DOTALL)
SECOND = re.compile(r"\s+([+~]*([A-Za-z_][\w.-]*)=)")
CLOSING = {"[": "]", "{": "}", "(": ")"}


def is_secret(key: str) -> bool:
    """Return whether a key may have a secret as its value, however it is misspelled."""
    plain = re.sub(r"[\s.]+", ".", key).strip(".")
    return SECRET.fullmatch(plain) is not None and not plain.lstrip("+~").startswith("env.vars")


HOLDS_SECRET = re.compile(
    r"[-+~]*(env(\.?secrets?\b.*)?|notify|.*webhook.*)|--?[\w-]*(secret|token(?!iz)|password|slack|api-?key)[\w-]*"
)
"""Keys, however they are written, and flags of other tools, whose value may be a secret."""
SOURCE = re.compile(r"env(:|$)|file:|secretmanager:|null$")


def typed_secrets(argv: Sequence[str]) -> Iterator[str]:
    """Yield what may be a secret among the words of a command line, whole and in parts, the longest first.

    Also of words that are no overrides yet, as `key = value`, `--key=value`, `key:value` and `--flag value`.
    """
    found: set[str] = set()
    for word, *behind in zip(argv, [*argv[1:], ""], [*argv[2:], "", ""], strict=False):
        key, sign, value = word.partition("=" if "=" in word.partition(":")[0] else ":")
        if HOLDS_SECRET.fullmatch(key.strip()) and (sign or key not in ("env", "notify") or behind[0] in ("=", ":")):
            given = value if sign and value else " ".join(behind) if behind[0] in ("=", ":") else behind[0]
            found |= {
                given,
                *(part.rpartition("=")[2] for part in re.split(r"[\s,{}\[\]\"']+", given) if part[-1:] != ":"),
            }
    keys = {part for word in argv if "=" in word for part in word.partition("=")[0].split(".")}
    kept = (each for each in found if len(each) > 5 and not SOURCE.match(each) and each not in keys)
    yield from sorted(kept, key=len, reverse=True)


def hidden(key: str, problem: str) -> str:
    from conf.schema.problems import NAMED_SOURCES  # verbs that need no config import no schema

    return f"{key}: {problem}; {NAMED_SOURCES}"


def unparsable(key: str, value: str, error: Exception) -> str:
    """Return why Hydra's grammar refuses a value: what a function of it says, or else how to write the value."""
    if is_secret(key):
        return hidden(key, "its value, which is not shown, cannot be parsed")
    if said := malformed_key(key, value):
        return said
    reason = " ".join(str(error).split())
    if "while evaluating" in reason or "Unknown function" in reason:
        return f"{key}: {_function_error(key, value, reason)}"
    return f"{key}: {value!r} cannot be parsed; {_cure(key, value)}"


FORMS = {
    "range": "range(START,STOP,STEP)",
    "interval": "interval(LOW,HIGH), of sweep.search",
    "choice": "choice(A,B)",
    "glob": "glob(PATTERN)",
    "tag": "tag(log,interval(LOW,HIGH)), of sweep.search",
}
"""How functions of Hydra's grammar are written."""
ELSEWHERE = {
    **dict.fromkeys(("uniform", "randint"), "interval"),
    **dict.fromkeys(("loguniform", "log_uniform"), "tag"),
    "arange": "range",
}
"""What other tools call them."""


def _function_error(key: str, value: str, reason: str) -> str:
    """Return why a function of a value cannot be called, and how it is written."""
    from conf.schema.text_keys import types_at

    if re.search(r"Sweep is incompatible|nesting choices", reason):
        return f"{reason}; list the values in its place"
    if found := re.search(r"Unknown function '(\w+)'", reason):
        near = difflib.get_close_matches(found[1], FORMS, n=1, cutoff=0.7)
        if name := ELSEWHERE.get(found[1].lower()) or next(iter(near), ""):
            return f"unknown function {found[1]!r}; did you mean {FORMS[name]}?"
        if types_at((*key.lstrip("+~").split("."),))[:1] in ([int], [float]):
            way = "write the values, 1,2, or range(START,STOP,STEP), or for sweep.search interval(LOW,HIGH)"
            return f"unknown function {found[1]!r}; {way}"
        return f'unknown function {found[1]!r}; a text with ( is quoted, as in [python, -c, "print(1)"]'
    said = re.sub(r"^\w+ (?=while)", "", reason)
    called = re.match(r"while evaluating '(\w+)\(", said)
    return f"{said}; write {FORMS[called[1]]}" if called and called[1] in FORMS else said


def malformed_key(key: str, value: str) -> str:
    """Return what is wrong with the key of an override, without the signs before it; empty if nothing is."""
    from conf.schema.problems import PATTERN_HINTS
    from conf.schema.text_keys import types_at

    bare = re.sub(r"\s*\.[\s.]*", ".", key).strip(". ")
    shown = f"{bare}=…" if is_secret(key) or len(value) > 60 else f"{bare}={value}"
    if bare != key:
        return f"{key}: one dot stands between the parts of a key; write {shown}"
    if key[:1] in ("'", '"') and key.count(key[0]) == 1:
        return f"{key}: the quote {key[0]} stands before the key; quotes go around the value"
    if TYPOGRAPHIC.search(key):
        return f"{key}: a typographic quote stands in the key; write keys without quotes"
    parts = key.partition("@")[0].replace("/", ".").split(".")
    if wrong := next((part for part in parts if not re.fullmatch(r"[A-Za-z_][\w-]*|\d+", part)), None):
        hint, meant = PATTERN_HINTS[r"^[A-Za-z_][A-Za-z0-9_]*$"], re.sub(r"\W+", ".", key).strip(".")
        if meant.split(".") != parts and types_at((*meant.split("."),)) and not is_secret(meant):
            return f"{key}: a key has dots between its parts; write {meant}={value}"
        return f"{key}: {wrong!r} cannot be a part of a key; {hint}"
    return ""


def _cure(key: str, value: str) -> str:
    """Say how a value must be written that Hydra's grammar does not accept."""
    from conf.schema.forms import expected, override, repaired
    from conf.schema.text_keys import types_at

    path = key.lstrip("+~").split(".")
    types = types_at((*path,))
    stripped = value.strip()
    if value.startswith("="):
        return f"one = sets a value: {key}={value.lstrip('= ')}"
    if TYPOGRAPHIC.match(stripped):
        return f"{stripped[0]} is no quote for a program; write {override(path, TYPOGRAPHIC.sub('', stripped))}"
    if opened := open_sign(value):
        return opened
    if value.startswith("{") and QUOTED_KEY.search(value):
        return f"write keys without quotes, and a colon in a key as \\:, as in '{key}={{module\\:name: 0.1}}'"
    if (pair := PAIR.fullmatch(stripped)) and types and str not in types:
        return f"did you mean {override([*path, pair['name']], pair['value'])}?"
    if (second := SECOND.search(stripped)) and types_at((*second[2].split("."),)):
        both = " ".join(f"'{each}'" for each in (f"{key}={stripped[: second.start()]}", stripped[second.start(1) :]))
        return f"two overrides in one pair of quotes; quote each alone: {both}"
    if (letters := [sign for sign in value if not sign.isascii()]) and (str in types or not types):
        return f"quote a value with the character {letters[0]}: '{key}=\"{value}\"'"
    if stripped.startswith("{") and {*types} == {str}:  # a placeholder, such as {bucket}
        return f"quote it: {override(path, stripped)}"
    inside = [item.strip() for item in stripped[1:-1].split(",") if item.strip()]
    made = repaired(types[0], inside) if types and re.fullmatch(r"[\[{][^{}\[\]\"'\\]*[\]}]", stripped) else None
    if isinstance(made, dict) or (made is not None and stripped[0] == "{"):
        return f"write {override(path, made)}"
    if stripped.startswith("{") and re.search(r"[\"']?\w[\"']? *=", stripped):
        with_colons = re.sub(r"[\"']?(\w+)[\"']? *= *", r"\1: ", stripped)
        return f"a colon sets a value: '{key}={with_colons}'"
    parts = [part for part in re.split(r"[\s,;|]+", stripped.strip("[](){}")) if part]
    if types[:1] in ([int], [float]) and len(parts) > 1 and all(repaired(types[0], part) is not None for part in parts):
        return f"it must be {expected(types)}; several values, of a sweep (-m), are written {key}={','.join(parts)}"
    if re.fullmatch(r"\[[^\[\]{}\"']*\]", stripped):
        return f"quote its items: {override(path, [item.strip() for item in stripped[1:-1].split(',')])}"
    if types and not any(kind is str for kind in types) and stripped[:1] not in ("[", "{"):
        made = repaired(types[0], value.split(",") if "," in value else value)
        return f"it must be {expected(types)}" + (f": {override(path, made)}" if made is not None else "")
    if "'" not in value and stripped[:1] not in ("[", "{"):
        return f"quote it: {override(path, value)}"
    return f"quote texts with commas, brackets or spaces inside it: '{key}=…\"a text\"…'"


def open_sign(value: str) -> str:
    """Say which quote or bracket of a value is not closed, or closes nothing; empty if all match."""
    opened: list[str] = []
    quote = ""
    for at, sign in enumerate(value):
        if at and value[at - 1] == "\\":
            continue
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'" and (at == 0 or value[at - 1] in "[{(,: "):
            quote = sign
        elif sign in CLOSING:
            opened.append(sign)
        elif sign in CLOSING.values():
            if not opened:
                return f"the {sign} closes nothing that is open"
            if CLOSING[last := opened.pop()] != sign:
                return f"the {last} is closed by {sign}"
    if quote:
        return f"the quote {quote} is not closed"
    return f"the {opened[-1]} is not closed" if opened else ""


def torn(words: Sequence[str]) -> str:
    """Return the override that a shell has torn into words at its spaces, in quotes; empty if there is none."""
    for at, word in enumerate(words):
        key, equals, value = word.partition("=")
        behind = words[at + 1 : at + 2]
        if equals and key[:1] != "-" and value[-1:] == "," and behind and not re.match(r"-|.*=", behind[0]):
            return f"{key}=…" if is_secret(key.lstrip("+~")) else f"{word} {behind[0]}"
        if not equals or key[:1] == "-" or not (said := open_sign(value)) or "closed" not in said or "by" in said:
            continue
        for end in range(at + 1, len(words) + 1):
            whole = " ".join(words[at:end])
            if end > at + 1 and not open_sign(whole.partition("=")[2]):
                return f"{key}=…" if is_secret(key.lstrip("+~")) else whole
    return ""
