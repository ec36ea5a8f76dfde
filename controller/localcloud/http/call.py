"""Arguments of API method handlers, and helpers for their responses."""

import base64
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from controller.localcloud.http.discovery import Method
from controller.localcloud.http.errors import ApiError

if TYPE_CHECKING:
    from controller.localcloud.iam import Judgement

PROJECT = "slipway-local"
PROJECT_NUMBER = "314159265358"
DEFAULT_ACCOUNT = f"{PROJECT_NUMBER}-compute@developer.gserviceaccount.com"
"""Compute Engine's default account, an editor of most projects."""


@dataclass(frozen=True)
class ApiCall:
    """Validated request: path parameters, query, JSON body; `root_url` is for the client."""

    method: Method
    path: Mapping[str, str]
    query: Mapping[str, str]
    body: Mapping[str, Any]
    root_url: str
    judgement: "Judgement | None" = None
    """Of the rights of its caller; without one it has all."""

    def require_permission(self, permission: str, resource: str) -> None:
        """Raise ApiError 403 unless the caller holds a permission that only some calls of the method need."""
        if self.judgement is not None:
            self.judgement.require(permission, resource)

    def require_account(self, email: str) -> None:
        """Raise ApiError 403 unless the caller may attach a service account to a VM."""
        self.require_permission("iam.serviceAccounts.actAs", f"projects/{PROJECT}/serviceAccounts/{email}")

    def test_permissions(self, resource: str) -> dict[str, Any]:
        """Answer `testIamPermissions`, whose body or query names permissions: those that the caller holds."""
        asked = self.query.get("permissions", "").split(",") if self.method.http == "GET" else ()
        permissions = list(asked or self.body.get("permissions", ()))
        held = permissions if self.judgement is None else self.judgement.test(permissions, resource)
        return {"permissions": held} if held else {}

    @property
    def mask(self) -> list[str]:
        """Fields that `updateMask` names."""
        return [name for name in self.query.get("updateMask", "").split(",") if name]

    def masked_body(self) -> dict[str, Any]:
        """Return the fields of the body that `updateMask` names; all of them without a mask."""
        return {key: value for key, value in self.body.items() if not self.mask or key in self.mask}

    def flag(self, name: str) -> bool:
        """Return a boolean query parameter; clients send `true` and `True`."""
        return self.query.get(name, "").lower() == "true"

    def required(self, name: str) -> str:
        """Return a required query parameter; raise ApiError 400 if it is missing."""
        value = self.query.get(name)
        if not value:
            raise ApiError(400, f"Required parameter: {name}", reason="required")
        return value


# A handler returns the response document; only handlers that wait are coroutines.
Handler = Callable[[ApiCall], dict[str, Any] | Awaitable[dict[str, Any]]]
Handlers = Mapping[str, Handler]  # by Method.key


def check_project(name: str) -> None:
    """Raise ApiError 403 unless `name` is the emulator's project, as Google does for projects of others."""
    if name not in (PROJECT, PROJECT_NUMBER):
        raise ApiError(403, f"The caller does not have permission on project '{name}' (here it is '{PROJECT}')")


def without_secrets(query: Mapping[str, str]) -> dict[str, str]:
    secret = ("access_token", "oauth_token", "key", "upload_id")
    return {name: "..." if name in secret else value for name, value in query.items()}


def timestamp(seconds: float) -> str:
    """Format as RFC 3339 in UTC, as Google does."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def fingerprint(value: Any) -> str:
    """Return what changes with a document, as Compute's optimistic locking shows it."""
    return base64.b64encode(hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()[:8]).decode()


def check_fingerprint(given: Any, value: Any, what: str) -> None:
    """Raise ApiError 412 unless a change names the fingerprint of what it changes; none is as wrong as an old one."""
    if given != fingerprint(value):
        raise ApiError(412, f"Supplied fingerprint does not match current {what} fingerprint.")


MAP_FIELDS = frozenset({"labels", "metadata"})
"""Maps of a user's keys: their empty values stay."""


def as_proto(value: Any) -> Any:
    """Return a document as proto3 JSON shows it: without false, zero, "" and empty lists. Empty messages stay.

    https://protobuf.dev/programming-guides/json
    """
    if isinstance(value, Mapping):
        shown = {name: item if name in MAP_FIELDS else as_proto(item) for name, item in value.items()}
        return {name: item for name, item in shown.items() if item not in (None, False, "", [])}
    return [as_proto(item) for item in value] if isinstance(value, list) else value


def with_number(path: str) -> str:
    """Return the name of a resource with the project's number, as some answers spell it."""
    return path.replace(f"projects/{PROJECT}/", f"projects/{PROJECT_NUMBER}/")


PAGE = 20
"""Items of a list's page: an API may answer fewer than were asked for, with a token for the rest."""


def paginate(call: ApiCall, items: list[Any]) -> dict[str, Any]:
    """Return one page of a list response; the page token is the index of the page's first item."""
    lists = (call.method.answer or {})["properties"].items()
    field = next(name for name, schema in lists if "$ref" in schema.get("items", {}))
    start = int(call.query.get("pageToken", "0"))
    size = call.query.get("maxResults" if "maxResults" in call.method.parameters else "pageSize", "0")
    end = start + min(int(size) or PAGE, PAGE)
    response: dict[str, Any] = {field: items[start:end]} if items[start:end] else {}
    if end < len(items):
        response["nextPageToken"] = str(end)
    return response


def merge_patch(old: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a JSON merge patch (RFC 7396): objects merge, arrays and scalars replace, null removes."""
    merged = dict(old)
    for key, value in change.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            merged[key] = merge_patch(merged.get(key) or {}, value)
        else:
            merged[key] = value
    return merged


_FieldMask = dict[str, "_FieldMask"]  # field -> its own mask; an empty mask keeps everything
_NESTED = re.compile(r"([^,()]+)\(([^()]+)\)(?=[,)]|$)")
"""The innermost `NAME(FIELDS)` of a selection, which is `NAME/FIELD` for each of them."""


def select_fields(document: Any, fields: str) -> Any:
    """Return the parts of a document that `fields` selects, e.g. "items(name,size),nextPageToken" or "items/name"."""
    paths = "".join(fields.split())
    while found := _NESTED.search(paths):
        inner = ",".join(f"{found[1]}/{field}" for field in found[2].split(","))
        paths = paths[: found.start()] + inner + paths[found.end() :]
    if not re.fullmatch(r"([^,()/]+([,/][^,()/]+)*,?)?", paths):
        raise ApiError(400, f"Invalid field selection {fields}")
    mask: _FieldMask = {}
    for path in filter(None, paths.split(",")):
        node = mask
        for name in path.split("/"):
            node = node.setdefault(name, {})
    return _select(document, mask)


def _select(value: Any, mask: _FieldMask) -> Any:
    if not mask or "*" in mask:
        return value
    if isinstance(value, list):
        return [_select(item, mask) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _select(value[name], inner) for name, inner in mask.items() if name in value}


def matches_filter(condition: str, resource: Mapping[str, Any]) -> bool:
    """Evaluate a simple list filter, `field = value` or `field eq regex`; raise ApiError 400 for a richer one."""
    if not condition:
        return True
    parts = re.fullmatch(r"\(?(\w+)\s*(=|!=|eq|ne)\s*\"?([^\"()]*)\"?\)?", condition)
    if parts is None:
        raise ApiError(400, f"Invalid value for field 'filter': '{condition}'. Known here: FIELD = VALUE.")
    field, operator, wanted = parts.groups()
    value = str(resource.get(field, ""))
    equal = re.fullmatch(wanted, value) is not None if operator in ("eq", "ne") else value == wanted
    return equal == (operator in ("=", "eq"))
