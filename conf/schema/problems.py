"""What pydantic refuses in a config, in our words: the key, what it takes, and how the given value is written so.

Its own words name types of Python and regular expressions, and one mistake is several errors: each alternative of a
type has one, and each key that a section lacks.
"""

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

import conf
from conf.schema.base import key_path
from conf.schema.config import Config
from conf.schema.forms import PLAIN, escape_line, expected, near_choices, override, program_line, repaired, split
from conf.schema.text_keys import alternatives, types_at
from conf.schema.unknown_keys import assignment, choices_at, foreign_keys, is_model, kinds_of, sibling_keys, unknown_key

NAMED_SOURCES = "use env, env:NAME, file:PATH or secretmanager:projects/P/secrets/S"
MOST_SHOWN = 6
"""Keys of a section that a message lists as missing."""
PATTERN_HINTS = {
    r"^[a-z][-a-z0-9]*$": "use lowercase letters, digits and hyphens, such as e2-small",
    r"^[^/\\\x00-\x1f\x7f]+(/[^/\\\x00-\x1f\x7f]+)*$": "use a relative path such as train/a.jsonl",
    r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$": "use 1 to 63 characters a-z, 0-9 and -, starting with a letter",
    r"^[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}$": "use a billing account ID such as 012345-6789AB-CDEF01",
    r"^3\.\d+(\.\d+)?$": "use a version such as 3.13",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "use letters, digits and _, not starting with a digit",
    r"^([a-z0-9][a-z0-9.-]*:[a-z0-9]|[a-z])[a-z0-9-]{0,62}$": "use a project ID such as my-project "
    "or example.com:my-project, not its number; `gcloud projects list` shows both",
    r"^[a-z0-9][a-z0-9.-]*$": "use a service name such as tpu.googleapis.com",
    r"^([a-z]([-a-z0-9]{0,61}[a-z0-9])?|[a-z0-9-]+@[a-z0-9.-]+\.gserviceaccount\.com)$": "use an account ID such as "
    "slipway-worker, or a full address such as me@my-project.iam.gserviceaccount.com",
    r"^(roles|projects/[^/\s]+/roles|organizations/\d+/roles)/[\w.]+$": "use a role such as roles/tpu.viewer",
    r"^[a-z]+(-[a-z]+\d+)?$": "use a region or multi-region such as us-central1 or us",
    r"^\d{1,3}(\.\d{1,3}){3}/\d{1,2}$": "use a range of IPv4 addresses such as 10.0.0.0/24, or 203.0.113.7/32 for one",
    r"^[a-z][a-z0-9_]{0,27}$": "use 1 to 28 characters a-z, 0-9 and _, starting with a letter",
    r"^[/~]": "use an absolute path, or one that begins with ~",
    r"^gs://[^/]+": "use gs://BUCKET/FOLDER",
    r"^[LGlgD]+$": "use L for local and G for global attention, such as LG; l and g: without rotation",
    r"^https?://[^\s/]\S*$": "must start with http:// or https:// and contain no spaces",
    r"^[0-9a-f]{64}$": "use the file's SHA-256, 64 characters 0-9 and a-f, as sha256sum prints it",
    r"^(https?://|ssh://|git@|file://|/)[^\s-]\S*$": "use an address such as https://github.com/OWNER/NAME",
    r"^[0-9a-f]{40}$": "use a full commit ID, 40 characters 0-9 and a-f, as git rev-parse prints it",
    r"^[a-z0-9]([-_a-z0-9]{0,40}[a-z0-9])?$": "use 1 to 42 characters a-z, 0-9, _ and -, with a letter or digit "
    "at both ends",
    r"^[a-z_][a-z0-9_-]{0,31}$": "use 1 to 32 characters a-z, 0-9, _ and -, starting with a letter",
    r"^[A-Za-z0-9][-\w]{0,40}$": "use 1 to 41 letters, digits, _ and -, starting with a letter or digit",
    r"^[a-z]+-[a-z]+\d+-[a-z0-9]+$": "use a zone such as us-central1-a; conf/tpu_types.yaml lists zones with TPUs",
    r"^[^/\\#?%:\s]+$": "leave out spaces and / \\ # ? % :",
}
"""What a text must be that a pattern of the schema refuses."""
MISTYPED = frozenset(
    f"{name}_type" for name in ("model", "model_attributes", "dict", "tuple", "list", "int", "float", "bool", "string",
                                "frozen_set", "set", "date", "mapping")
) | {"int_parsing", "int_from_float", "float_parsing", "bool_parsing", "literal_error", "date_from_datetime_parsing",
     "date_parsing", "int_parsing_size"}  # fmt: skip
"""Kinds of pydantic's errors for a value of another type."""
NUMBER = r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\s*(?:-|–|\.\.+|:|to)\s*({NUMBER})")
NOTHING = {"none", "nil", "unlimited", "infinite", "infinity", "inf", "never", "no", "off", "false", "disabled"}
"""What is written for null, which is no limit, or never."""
UNITS = {"hours", "minutes", "seconds", "days", "gb", "mb", "gib", "mib", "usd", "bytes"}
"""Last words of keys of numbers."""


@dataclass(frozen=True)
class ConfigProblem:
    """A problem in the config: the key to change, the reason, and file and line, if a file of the user's sets it."""

    key: str
    message: str
    place: str = ""

    def __str__(self) -> str:
        return escape_line(f"{self.key}: {self.message}") + (f" ({self.place})" if self.place else "")


def problems_of(raw: dict[str, Any], errors: Sequence[Any]) -> list[ConfigProblem]:
    """Return a line for each mistake that pydantic's errors are about; last those that explain the least.

    raw: the composed data.
    """
    found: dict[tuple[str, str], ConfigProblem] = {}
    missing: dict[tuple[str, ...], list[str]] = {}
    of_others: dict[tuple[str, ...], list[str]] = {}
    keys = [".".join(key_path(raw, error)) for error in errors if error["type"] != "literal_error"]
    for error in errors:
        path = key_path(raw, error)
        if error["type"] == "literal_error" and ".".join(path) in keys:  # another alternative says more
            continue
        if error["type"] == "missing" and not path[-1].isdigit():
            missing.setdefault(tuple(path[:-1]), []).append(path[-1])
        elif error["type"] == "extra_forbidden" and path[-1] in sibling_keys(path):
            of_others.setdefault(tuple(path[:-1]), []).append(path[-1])
        else:
            problem = _problem(raw, path, error)
            cure = problem.message.partition("; did you mean ")[2]  # of a list, the items have the same
            found.setdefault((problem.key, cure or problem.message), problem)
    said = " ".join(problem.message for problem in found.values())
    meant = re.findall(r"did you mean ([\w.]+)\?", said)  # a key that is misspelt is not missing too
    missing = {at: [name for name in names if ".".join([*at, name]) not in meant] for at, names in missing.items()}
    missing = {at: names for at, names in missing.items() if names}
    changed = of_others.keys() & missing.keys()  # their kind was set, and not the keys that belong to it
    for section in changed:
        problem = _other_kind_chosen(section, missing.pop(section), of_others.pop(section))
        found[problem.key, problem.message] = problem
    others = [_other_kind(raw, section, names) for section, names in of_others.items()]
    return [*found.values(), *others, *(_lacking(section, names) for section, names in missing.items())]


def _problem(raw: dict[str, Any], path: list[str], error: Any) -> ConfigProblem:
    kind, given = error["type"], error["input"]
    whole = path[: next((at for at, part in enumerate(path) if all(p.isdigit() for p in path[at:])), len(path))]
    key = ".".join(whole)  # without the numbers of a list, which nobody types
    is_path = str(given).startswith("file:")  # which is no secret
    is_name = error["loc"][-1] == "[key]"
    hides = path[:2] in (["env", "secrets"], ["notify", "webhook"])
    if hides and not is_path and not is_name and kind != "extra_forbidden":
        reason = f"names where a secret is, and never holds it; {NAMED_SOURCES} (what you gave is not shown)"
        reason = f"a secret has a name: env.secrets.NAME=env; {reason}" if path[-1] == "secrets" else reason
        return ConfigProblem(".".join(path), reason)
    if kind == "extra_forbidden":
        return ConfigProblem(".".join(path), unknown_key(raw, path, given))
    if given == "???":  # what Hydra's files write for a value that has to be given
        about = re.split(r"(?<!e\.g)\.(?: |$)", next(_descriptions(path), ""))[0]
        return ConfigProblem(key, f"is not set yet; write {key}=…{f' ({about})' if about else ''}")
    if kind == "invalid_key":
        reason = "a value stands where `key: value` belongs; a number has no comma, and a text with one is quoted"
        return ConfigProblem(key, f"{reason}; if it is a key, which YAML reads as {given!r}, quote it")
    if is_name:
        return _wrong_name(path, error)
    if kind == "union_tag_not_found":
        program = (raw.get("program") or {}).get("kind")
        if len(path) == 1 and key in ("loop", "model", "data", "optimizer") and program not in (None, "trainer"):
            keys = ", ".join(f"{key}.{name}" for name in given)
            reason = f"program={program} has no {key}; pass it to the program, or choose program=trainer"
            return ConfigProblem(keys, reason)
        way = f"choose its group: {key}=…, in a file `override /{key}: …` in `defaults`" if len(path) == 1 else "set it"
        return ConfigProblem(key, f"has no `kind`; {way}")
    if kind == "union_tag_invalid":
        tag = error["ctx"]["tag"]
        is_file = Path(conf.__file__).with_name(key).joinpath(f"{tag}.yaml").is_file()
        base = f"; {key}={tag} is a file of the group, and the base of yours with `defaults: [{tag}, _self_]`"
        return ConfigProblem(
            f"{key}.kind", f"unknown kind {_choice(tag, kinds_of(types_at((*path,))))}{base * is_file}"
        )
    if kind == "float_parsing" and path[:-1] == ["loop", "rewards"] and ":" in str(given):
        function, _, weight = str(given).rpartition(":")
        name = f"{path[-1]}\\:{function}"
        reason = f"a colon in a name is written \\: on the command line: {{{name}: {weight.strip()}}}"
        return ConfigProblem("loop.rewards", reason)
    is_endless = str(given).lower() in NOTHING and kind == "finite_number" and _is_nullable(path)
    if kind in MISTYPED or is_endless:
        return ConfigProblem(key, _mistyped(raw, path, whole, error))
    if kind == "string_pattern_mismatch":
        words = "".join(f", or {choice}" for choice in _choices(types_at((*path,))))
        return ConfigProblem(
            key, f"{escape_line(repr(given))} is invalid; {PATTERN_HINTS[error['ctx']['pattern']]}{words}"
        )
    if kind in ("too_short", "string_too_short") and not given:
        return ConfigProblem(key, "is empty; set a value, or leave it out")
    if isinstance(given, bool):
        return ConfigProblem(key, f"must be a number, not {json.dumps(given)}; YAML reads off and no as false")
    # A whole section would hide the message, which names the keys that matter.
    got = "" if isinstance(given, dict) else f" (got {escape_line(repr(given))})"
    cure = f"; did you mean {key}=null?" if str(given) == "-1" and _is_nullable(path) else ""
    return ConfigProblem(key, f"{_said(error)}{got}{cure}")


def _said(error: Any) -> str:
    message = error["msg"].removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}"


def _mistyped(raw: dict[str, Any], path: list[str], whole: list[str], error: Any) -> str:
    """Say what a key takes in place of what it was given, and how the value is written if it can be meant."""
    types, key, given = types_at((*path,)), ".".join(path), error["input"]
    if error["type"] == "literal_error" and isinstance(error["loc"][-1], int):
        types = types_at((*whole, "0"))  # of a list, which the schema makes of one word
    shown = escape_line(json.dumps(given) if isinstance(given, NoneType | bool) else repr(given))
    shown = "what you gave, which is not shown" if path in (["env"], ["notify"]) else shown
    models = [each for each in types if is_model(each)]
    if models and not isinstance(given, dict | NoneType) and (len(models) == len(types) or not isinstance(given, list)):
        kinds, keys = kinds_of(types), sorted({name for model in models for name in model.model_fields})
        made = repaired(models[0], given) if len(models) == 1 else None
        fields = models[0].model_fields.items()
        needed = [name for name, each in fields if name != "kind" and NoneType not in get_args(each.annotation)]
        first = next((name for name in ("name", *needed) if name in keys and str in types_at((*path, name))), "")
        meant = f"set one of them, such as {key}.{first or (needed or keys)[0]}=…"
        meant = f"set {key}.kind={kinds[0]}, or another" if kinds else meant
        is_switch = given in ("true", "false", "yes", "no")
        if first and isinstance(given, str) and not is_switch and not _still_wrong(raw, whole, {first: given}):
            word = override([*path, first], given)
            meant = f"did you mean {word.strip(chr(39)) if PLAIN.fullmatch(str(given)) else word}"
        of_value = [f"{key}.{name}={given}" for name in keys if given in choices_at(f"{key}.{name}")]
        foreign = [assignment(each, str(given)) for each in foreign_keys(raw, key) if each.startswith(f"{key}.")]
        named = [f"{key}.{given}=…"] if given in keys else []
        if found := foreign or named or of_value * (len(of_value) < 4):
            meant = f"did you mean {' or '.join(found)}"
        same = [name for name in Config.model_fields if models[0] in types_at((name,)) and name != key]
        if same and Path(conf.__file__).with_name(same[0]).joinpath(f"{given}.yaml").is_file():
            meant = f"did you mean {same[0]}@{key}={given}"
        meant = f"did you mean {override(whole, _mended(raw, whole))}" if made is not None else meant
        meant = f"did you mean {key}.kind={given}" if given in kinds else meant
        line = program_line(str(given)) if len(path) == 1 else ""
        meant = f"did you mean `{line}`" if line else meant
        listed = f"kinds: {', '.join(kinds)}" if kinds else f"keys: {', '.join(keys)}"
        return f"is a section with keys, not {shown}; {meant}; {listed}"
    if {*types} == {str} and isinstance(given, dict) and [*given.values()] == [None]:  # braces make a mapping of a word
        return f"""must be text, not a mapping; quote it: {path[-1]}: "{{{next(iter(given))}}}\""""
    if types == [str] and isinstance(given, NoneType | bool | int | float):
        text = json.dumps(given)
        quoted = f"""{path[-1]}: "{text}" in YAML, '{key}="{text}"' in a shell"""
        return f"must be text, not {text}; if it is meant as text, quote it: {quoted}"
    if key == "env.requirements" and isinstance(given, list):
        return f"must be the name of a file, not {shown}; write them into it, one a line"
    if path[:2] == ["sweep", "params"] and isinstance(given, dict):
        name, values = next(iter(given.items()), ("KEY", "…"))
        return f"a key of params is written with its dots: `{'.'.join([*path[2:], str(name)])}: {values}`"
    if isinstance(given, str) and re.fullmatch(r"\[.*\]|\{.*\}", given) and not any(kind is str for kind in types):
        return f"quotes make a text of a list or a mapping; leave them out: {path[-1]}: {given}"
    choices = _choices(types)
    if error["type"] == "literal_error" and len(types) > 1 and all(get_origin(each) is Literal for each in types):
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])  # of the kind that was chosen
        types = types[:1] if choices else types
    if isinstance(error["loc"][-1], int) and isinstance(given, str) and {*(words := split(given))} <= {*choices}:
        return f"must be a list: {override(whole, words)}"
    if choices and len(types) == 1 and not isinstance(given, dict | list):
        return f"unknown choice {_choice(json.dumps(given) if given is None else str(given), choices)}"
    said = f"{'each ' if path != whole else ''}must be {expected(types)}, not {shown}"
    if str(given).lower() in NOTHING and _is_nullable(path):
        return f"{said}; did you mean {key}=null?"
    is_clock = ":" in str(given) and path[-1].rpartition("_")[2] in UNITS  # 1:30, of hours
    if not is_clock and (said_of := _range_of_words(types, key, given)):
        return f"{said}; {said_of}"
    parts = [part for each in (given if isinstance(given, list) else [given]) for part in _parts(each)]
    is_scalar = path == whole and path[0] != "sweep" and types[0] in (str, int, float)
    if len(parts) > 1 and is_scalar and all(repaired(types[0], part) is not None for part in parts):
        if path[-1].endswith("path"):
            folder, slash, file = str(parts[0]).rpartition("/")
            pattern = f"{folder}{slash}*{Path(file).suffix}"
            return f"{said}; several files are one pattern, such as {pattern}"
        return f"{said}; several values, of a sweep (-m), are written {key}={','.join(map(str, parts))}"
    if (key := re.fullmatch(r"\$([\w.]+)", str(given))) and types_at((*key[1].split("."),)):
        return f"{said}; another key's value is ${{{key[1]}}}"
    unit = path[-1].rpartition("_")[2]
    if isinstance(given, str) and given[:1].isdigit() and unit in UNITS:
        return f"{said}; write the number alone, in {unit.upper() if unit[-1] == 'b' else unit}"
    if given is not None and (mended := _mended(raw, whole)) is not None:
        wrong = _still_wrong(raw, whole, mended)
        return f"{said}; did you mean {override(whole, mended)}?{f' Then {wrong}' if wrong else ''}"
    about = next(iter(_descriptions(whole)), "")
    tells = "e.g." in about or (about and re.match(r"\d+ ?[a-z]", str(given)))  # 10m, of what?
    return f"{said}; {about[0].lower()}{about[1:].rstrip('.')}" if tells else said


def _parts(given: Any) -> list[Any]:
    """Return the values that a text may stand for; another value alone."""
    return re.split(r"[\s;|]+", given.strip()) if isinstance(given, str) else [given]


def _range_of_words(types: Sequence[Any], key: str, given: Any) -> str:
    """Return how all numbers between two are written, for `0-3`, `0..3`, `0:3` and `0 to 3`; "" for another value."""
    found = RANGE.fullmatch(given.strip()) if isinstance(given, str) and {int, float} & {*types} else None
    if found is None or float(found[1]) >= float(found[2]):
        return ""
    if int in types and found[1].isdigit() and found[2].isdigit():
        first, last = int(found[1]), int(found[2])
        return f"{first} to {last}, of a sweep (-m), are written '{key}=range({first},{last + 1})'"
    return f"several values, of a sweep (-m), are written {key}={found[1]},{found[2]}"


def _is_nullable(path: Sequence[str]) -> bool:
    fields = [each.model_fields.get(path[-1]) for each in types_at((*path[:-1],)) if is_model(each)]
    return any(each is not None and NoneType in get_args(each.annotation) for each in fields)


def _descriptions(path: list[str]) -> Iterator[str]:
    """Yield what the schema says of a key, for each kind of its section."""
    for each in types_at((*path[:-1],)):
        if is_model(each) and path[-1] in each.model_fields:
            yield each.model_fields[path[-1]].description or ""


def _mended(raw: Any, path: list[str]) -> Any:
    """Return the value of a key as its type wants it; None if it cannot be told."""
    given = _at(raw, path)
    is_flat = isinstance(given, list) and not any(isinstance(one, list | dict) for one in given)
    if path[:2] == ["sweep", "params"] and is_flat:
        return ",".join(map(str, given))
    return next((made for each in types_at((*path,)) if (made := repaired(each, given)) is not None), None)


def _at(raw: Any, path: Sequence[str]) -> Any:
    return reduce(lambda at, part: at[int(part)] if isinstance(at, list) else at[part], path, raw)


def _still_wrong(raw: Mapping[str, Any], path: Sequence[str], value: Any) -> str:
    """Return what a key's value would be refused for next, if it had the shape that the key takes; empty if nothing."""
    tried = copy.deepcopy({**raw})
    at = _at(tried, path[:-1])
    at[int(path[-1]) if isinstance(at, list) else path[-1]] = value
    try:
        Config.model_validate(tried)
    except ValidationError as error:
        for each in error.errors():
            if key_path(tried, each)[: len(path)] == [*path] and each["type"] not in (*MISTYPED, "missing"):
                return _problem(tried, key_path(tried, each), each).message
    return ""


def _other_kind(raw: dict[str, Any], section: tuple[str, ...], names: list[str]) -> ConfigProblem:
    """Say which keys belong to another kind of their section."""
    key, is_top = ".".join(section), len(section) == 1
    way = f"choose its group ({key}=…)" if is_top else f"set the section whole ({key}={{kind: …}})"
    if len(names) == 1:
        full = f"{key}.{names[0]}"
        own = [each for each in foreign_keys(raw, names[0], section[0]) if each.startswith(f"{key}.")]
        way = f"did you mean {' or '.join(own)}? Else {way}" if own else way
        models = [each for each in types_at(section) if is_model(each) and names[0] in each.model_fields]
        return ConfigProblem(full, f"is of {key}.kind={'|'.join(kinds_of(models))}; {way}, or remove the key (~{full})")
    them = " ".join(f"~{key}.{name}" for name in names)
    reason = f"{', '.join(names)} belong to another kind of this section; {way}, or remove them: {them}"
    return ConfigProblem(key, reason)


def _other_kind_chosen(section: tuple[str, ...], lacking: list[str], names: list[str]) -> ConfigProblem:
    """Say that a section has the keys of another kind than it names."""
    key = ".".join(section)
    way = f"choose its group, {key}=NAME, which sets both" if len(section) == 1 else f"set it whole: {key}={{kind: …}}"
    reason = f"has keys of another kind ({_listed(names)}) and lacks those of its own ({_listed(lacking)})"
    return ConfigProblem(key, f"{reason}; {way}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return f"{', '.join(names[:MOST_SHOWN])}{more}"


def _lacking(section: tuple[str, ...], names: list[str]) -> ConfigProblem:
    """Say which keys a section lacks, and what sets them."""
    key = ".".join(section)
    if not section:
        shown = " ".join(f"{name}=…" for name in names)
        return ConfigProblem(names[0], f"missing; choose a file of the group{'s' * (len(names) > 1)}: {shown}")
    if len(section) == 1 and Path(conf.__file__).with_name(key).is_dir():
        way = f"choose a file of the group that has them: {key}=NAME, in a file `defaults: [NAME, _self_]`"
        return ConfigProblem(key, f"lacks {_listed(names)}; {way}")
    return ConfigProblem(key, f"lacks {', '.join(names)}; set {' '.join(f'{key}.{name}=…' for name in names)} too")


def _wrong_name(path: list[str], error: Any) -> ConfigProblem:
    """Say what is wrong with a name that the user chose, such as that of a variable or an asset."""
    name, section = error["input"], ".".join(path[:-1])
    if not isinstance(name, str) and error["type"] in MISTYPED:
        return ConfigProblem(section, f"a key is read as {json.dumps(name)}, not as text; quote it in YAML")
    if error["type"] == "string_pattern_mismatch":
        hint = PATTERN_HINTS[error["ctx"]["pattern"]]
        return ConfigProblem(section, f"{escape_line(repr(name))} cannot be a name here; {hint}")
    if error["type"] in MISTYPED:
        kind = expected([*_types_of_names(path[:-1])])
        return ConfigProblem(section, f"{escape_line(repr(name))} cannot be a name here, which must be {kind}")
    said = _said(error)
    return ConfigProblem(
        section, said if repr(name) in said else f"{escape_line(repr(name))} cannot be a name here: {said}"
    )


def _types_of_names(path: list[str]) -> Iterator[Any]:
    """Yield the types that the names of a mapping's entries may have."""
    for each in types_at((*path,)):
        if isinstance(get_origin(each), type) and issubclass(get_origin(each), Mapping):
            yield from alternatives(get_args(each)[0])


def _choices(types: Sequence[Any]) -> list[str]:
    return [str(choice) for each in types if get_origin(each) is Literal for choice in get_args(each)]


def _choice(given: str, choices: Sequence[str]) -> str:
    """Return the end of the line about a word that is no choice."""
    near = near_choices(given.lower(), choices)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{escape_line(repr(given))}; {hint}choices: {', '.join(choices)}"
