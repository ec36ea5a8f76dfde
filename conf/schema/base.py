"""What all sections of the config build on: their base class, volatile keys, uneven batches, places of errors."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints


class Strict(BaseModel):
    """A section: immutable, and unknown keys are errors, because Hydra would silently merge a typo."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class Volatile:
    """Marks a key that affects where a run executes or how long it waits, but not what it computes.

    Volatile keys are not part of a run's identity: an experiment stays the same in another zone.
    """


VOLATILE = Volatile()


class Later:
    """Marks a key that is newer than some runs: at its default it is not part of a run's identity."""


LATER = Later()

Name = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")]
"""Name of a Google resource (RFC 1035 label)."""


def check_home(value: str) -> str:
    """Reject `~anna/…` or `file:~anna/…` of a user that this machine does not have."""
    try:
        Path(value.removeprefix("file:")).expanduser()
    except RuntimeError:
        raise ValueError(f"this machine has no user {value.partition('~')[2].partition('/')[0]!r}") from None
    return value


LocalPath = Annotated[str, AfterValidator(check_home)]
"""Path of this machine, which may begin with `~`; or another source that cannot."""
Zone = Annotated[str, StringConstraints(pattern=r"^[a-z]+-[a-z]+\d+-[a-z0-9]+$")]


BREAKS = re.compile(r"(\\[nt])+")
"""What somebody types who means line breaks or tabs, and a shell leaves as it is."""


def check_breaks(value: str) -> str:
    """Reject a backslash and a letter alone, which no text of a model has."""
    if BREAKS.fullmatch(value):
        way = f"write \"{value}\" in a file, in a shell the word in $'…'"
        raise ValueError(f"'{value}' is no line break but a backslash and a letter; {way}")
    return value


Separator = Annotated[str, AfterValidator(check_breaks)]
"""Text between texts of a model."""


def without_volatile(section: BaseModel) -> dict[str, Any]:
    """Return the section as plain JSON data, at any depth without volatile keys, and later ones at their default."""
    plain = section.model_dump(mode="json")  # once: each section's own serializer would have to be built
    _drop_volatile(section, plain)
    return plain


def _drop_volatile(section: BaseModel, plain: dict[str, Any]) -> None:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        marks = field.metadata
        is_as_before = value == field.default and any(isinstance(mark, Later) for mark in marks)
        if is_as_before or any(isinstance(mark, Volatile) for mark in marks):
            del plain[name]
        elif isinstance(value, BaseModel):
            _drop_volatile(value, plain[name])
        elif isinstance(value, dict):
            for key, item in value.items():
                if isinstance(item, BaseModel):
                    _drop_volatile(item, plain[name][key])


class UnevenError(ValueError):
    """Rows that cannot be split evenly; `key` is the config key to change."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message


def nearest_multiples(number: int, of: int) -> list[int]:
    """Return the multiples of `of` on either side of a number that is not one."""
    below = number // of * of
    return [n for n in (below, below + of) if n]


def key_path(raw: dict[str, Any], error: Any) -> list[str]:
    """Return the dotted key of an error without pydantic's tags of unions, which are no keys of the data."""
    path: list[str] = []
    at: Any = raw
    loc = error["loc"][:-1] if error["loc"][-1] == "[key]" else error["loc"]
    for number, part in enumerate(loc):
        is_key = part in at if isinstance(at, dict) else isinstance(at, list) and isinstance(part, int)
        is_absent = number == len(loc) - 1 and error["type"] == "missing"
        if not is_key and not is_absent:
            continue
        path.append(str(part))
        inside = isinstance(at, dict) or (is_key and part < len(at))  # pyright: ignore[reportOperatorIssue]
        at = at[part] if is_key and inside else None  # pyright: ignore[reportCallIssue, reportArgumentType]
    return path
