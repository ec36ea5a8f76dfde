"""Partial responses (https://cloud.google.com/storage/docs/json_api#partial-response)."""

import re
from typing import Any

from controller.localcloud.http.errors import ApiError

_FieldMask = dict[str, "_FieldMask"]  # field -> its own mask; an empty mask keeps everything

_TOKEN = re.compile(r"[^,()/\s]+|[,()/]")


def select_fields(document: Any, fields: str) -> Any:
    """Return the parts of a document that `fields` selects, e.g. "items(name,size),nextPageToken" or "items/name"."""
    tokens = _TOKEN.findall(fields)
    mask, rest = _parse_selection(tokens, fields)
    if rest:
        raise ApiError(400, f"Invalid field selection {fields}")
    return _select(document, mask)


def _parse_selection(tokens: list[str], fields: str) -> tuple[_FieldMask, list[str]]:
    """Parse comma-separated selections up to a closing parenthesis or the end; return the mask and the other tokens."""
    mask: _FieldMask = {}
    while tokens:
        node = mask
        while True:
            if not tokens or tokens[0] in ",()/":
                raise ApiError(400, f"Invalid field selection {fields}")
            node = node.setdefault(tokens[0], {})
            tokens = tokens[1:]
            if not tokens or tokens[0] != "/":
                break
            tokens = tokens[1:]
        if tokens and tokens[0] == "(":
            inner, tokens = _parse_selection(tokens[1:], fields)
            if not tokens or tokens[0] != ")":
                raise ApiError(400, f"Invalid field selection {fields}")
            node.update(inner)
            tokens = tokens[1:]
        if not tokens or tokens[0] != ",":
            break
        tokens = tokens[1:]
    return mask, tokens


def _select(value: Any, mask: _FieldMask) -> Any:
    if not mask or "*" in mask:
        return value
    if isinstance(value, list):
        return [_select(item, mask) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _select(value[name], inner) for name, inner in mask.items() if name in value}
