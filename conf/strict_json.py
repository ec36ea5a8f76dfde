"""The one place that writes JSON for others, and reads theirs: JSON has no NaN and no infinity.

Such a number becomes null, and the object says so: `"not_finite": {"metrics/loss": "nan"}`, by JSON pointers
(https://www.rfc-editor.org/rfc/rfc6901) without the first slash.
"""

import copy
import json
import math
from typing import Any

REASONS = "not_finite"


def dumps(value: Any, **how: Any) -> str:
    """Serialize as `json.dumps` does, strictly. A list of objects has the reasons in each of them."""
    try:
        return json.dumps(value, allow_nan=False, **how)
    except ValueError:
        return json.dumps(_explained(value), allow_nan=False, **how)


def loads(text: str | bytes | bytearray) -> Any:
    """Parse as `json.loads` does; an integer that no float can hold is infinite, as 1e999 is: no reader overflows."""
    return json.loads(text, parse_int=_integer)


def _integer(text: str) -> int | float:
    number = float(text)
    return int(text) if math.isfinite(number) else number


def restored(body: Any) -> Any:
    """Return the object that `dumps` wrote with the numbers that it could not write; others as they are."""
    if not isinstance(body, dict) or not isinstance(reasons := body.get(REASONS), dict):
        return body
    found = copy.deepcopy({key: value for key, value in body.items() if key != REASONS})
    for pointer, number in reasons.items():
        *above, last = (part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/"))
        place: Any = found
        try:
            for part in above:
                place = place[int(part) if isinstance(place, list) else part]
            place[int(last) if isinstance(place, list) else last] = float(number)
        except (LookupError, TypeError, ValueError):
            return body  # somebody else's
    return found


def _explained(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_explained(each) for each in value]
    reasons: dict[str, str] = {}
    found = _finite(value, (), reasons)
    if not reasons or not isinstance(found, dict) or not isinstance(theirs := found.get(REASONS, {}), dict):
        return found  # or a program has a key of this name
    return {**found, REASONS: {**theirs, **reasons}}


def _finite(value: Any, where: tuple[str, ...], reasons: dict[str, str]) -> Any:
    """Return a copy with null for what is not finite. where: its keys; reasons: gets what was replaced."""
    if isinstance(value, dict):
        names = {key: key if isinstance(key, str) else json.dumps(key) for key in value}  # as JSON has them
        return {names[key]: _finite(each, (*where, names[key]), reasons) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each, (*where, str(i)), reasons) for i, each in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        reasons["/".join(part.replace("~", "~0").replace("/", "~1") for part in where)] = str(float(value))
        return None
    return value
