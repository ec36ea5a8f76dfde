"""Routes and schemas of Google's APIs, from the discovery documents that ship with google-api-python-client."""

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.protocols import Validator

from controller.localcloud.http.errors import ApiError

# Mount point of each document's API. compute and storage have their own paths (/compute/v1, /storage/v1), which clients
# join to the server's root; the others would collide there (two have /v1/operations).
MOUNTS: Mapping[str, str] = {
    "tpu.v2": "tpu/",
    "tpu.v2alpha1": "tpu/",
    "compute.v1": "",
    "storage.v1": "",
    "serviceusage.v1": "serviceusage/",
    "serviceusage.v1beta1": "serviceusage/",
    "cloudbilling.v1": "cloudbilling/",
    "billingbudgets.v1": "billingbudgets/",
    "cloudresourcemanager.v1": "cloudresourcemanager/",
    "cloudresourcemanager.v3": "cloudresourcemanager/",
    "iam.v1": "iam/",
    "iap.v1": "iap/",
    "secretmanager.v1": "secretmanager/",
    "oslogin.v1": "oslogin/",
    "oauth2.v2": "oauth2/",
}


_ANY_RESOURCE = "v1Id"
"""Parameter for resources of several kinds, so of several segments."""


@dataclass(frozen=True)
class Method:
    """Method of an API, e.g. `tpu.v2` + `projects.locations.nodes.create`."""

    document: str
    name: str
    http: str
    body: str | None  # name of the request's schema
    answer: Mapping[str, Any] | None = field(repr=False)  # its schema; without one, the answer is 204 No Content
    parameters: Mapping[str, Mapping[str, Any]] = field(repr=False)
    scopes: tuple[str, ...] = ()  # a token needs one of them

    @property
    def api(self) -> str:
        return self.document.partition(".")[0]

    @property
    def key(self) -> str:
        return f"{self.document}:{self.name}"

    @property
    def kind(self) -> dict[str, str]:
        """What an answer says of itself, such as `{"kind": "compute#network"}`, in the APIs where it does."""
        said = (self.answer or {}).get("properties", {}).get("kind", {}).get("default")
        return {"kind": said} if said else {}


@dataclass
class _Segment:
    """Node of the route trie: the next path segment is a literal, or a parameter with an optional :verb."""

    literals: dict[str, "_Segment"] = field(default_factory=dict)
    parameters: dict[tuple[str, str], "_Segment"] = field(default_factory=dict)  # (verb suffix, name)
    methods: dict[str, Method] = field(default_factory=dict)  # by HTTP method


class Discovery:
    def __init__(self) -> None:
        self.schemas: dict[str, dict[str, Any]] = {}
        self._root = _Segment()
        folder = documents_folder()
        for document, mount in MOUNTS.items():
            content = json.loads((folder / f"{document}.json").read_text())
            self.schemas[document] = content["schemas"]
            for raw in _methods(content):
                self._add(document, mount + content["servicePath"], raw, content["parameters"])

    def _add(self, document: str, base: str, raw: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
        method = Method(
            document=document,
            name=raw["id"].partition(".")[2],
            http=raw["httpMethod"],
            body=raw.get("request", {}).get("$ref"),
            answer=self.schemas[document][raw["response"]["$ref"]] if "response" in raw else None,
            parameters={**shared, **raw.get("parameters", {})},
            scopes=tuple(raw.get("scopes", ())),
        )
        segment = self._root
        # storage has no flatPath.
        for part in (base + raw.get("flatPath", raw["path"])).split("/"):
            if part.startswith("{"):
                name, _, verb = part[1:].partition("}")
                segment = segment.parameters.setdefault((verb, name), _Segment())
            else:
                segment = segment.literals.setdefault(part, _Segment())
        segment.methods[method.http] = method

    def match(self, http: str, raw_path: str) -> tuple[Method, dict[str, str]] | None:
        """Return the method for a percent-encoded path (an object name may hold %2F), and its decoded parameters."""
        return _match(self._root, http, raw_path.strip("/").split("/"), 0)


@cache
def load_discovery() -> Discovery:
    """Return the routes of all APIs; reading them takes most of the time of a start."""
    return Discovery()


def _match(segment: _Segment, http: str, parts: list[str], at: int) -> tuple[Method, dict[str, str]] | None:
    if at == len(parts):
        method = segment.methods.get(http)
        return (method, {}) if method else None
    part = parts[at]
    if (child := segment.literals.get(part)) and (found := _match(child, http, parts, at + 1)):
        return found
    # Longest verb first: "{name}:stop" before "{name}".
    for (verb, name), child in sorted(segment.parameters.items(), key=lambda item: -len(item[0][0])):
        if part.endswith(verb) and len(part) > len(verb) and (found := _match(child, http, parts, at + 1)):
            found[1][name] = unquote(part.removesuffix(verb))
            return found
        if name == _ANY_RESOURCE and verb and parts[-1].endswith(verb) and http in child.methods:
            return child.methods[http], {name: unquote("/".join(parts[at:]).removesuffix(verb))}
    return None


def _methods(resource: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from resource.get("methods", {}).values()
    for child in resource.get("resources", {}).values():
        yield from _methods(child)


def documents_folder() -> Path:
    """Return the folder of the discovery documents, without importing the package (which takes 0.2 s)."""
    spec = importlib.util.find_spec("googleapiclient")
    assert spec is not None, "a dependency of Slipway"
    return Path(str(spec.origin)).with_name("discovery_cache") / "documents"


_INTEGER = {"type": ["integer", "string"], "pattern": r"^-?\d+$"}  # proto3 JSON takes both
_FORMATS: Mapping[str, dict[str, Any]] = {
    "int64": _INTEGER,
    "uint64": _INTEGER,
    "byte": {"type": "string", "pattern": r"^[A-Za-z0-9+/_=-]*$"},
    "google-duration": {"type": "string", "pattern": r"^-?\d+(\.\d+)?s$"},
}
# Clients send these although no document declares them.
_UNDECLARED_QUERY = frozenset({"returnPartialSuccess", "tensorstore", "upload_id", "$alt", "upload_protocol", "key"})


class Validation:
    """Validators of request schemas, each made on first use."""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery
        self._definitions: dict[str, dict[str, Any]] = {}
        self._validators: dict[tuple[str, str], Validator] = {}

    def check_body(self, method: Method, body: Any) -> Any:
        """Return the body without the fields that only Google writes, which it ignores in a request.

        Raises ApiError 400 unless the body matches the method's request schema.
        """
        if method.body is None or body is None:
            return body
        if not isinstance(body, dict):
            raise ApiError(400, 'Invalid JSON payload received. Root element must be a "message".')
        error = next(self._validator(method.document, method.body).iter_errors(_without_nulls(body)), None)
        if error is not None:
            raise _validation_error(error)
        return self._writable(body, {"$ref": method.body}, self._discovery.schemas[method.document])

    def _writable(self, value: Any, schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Any:
        schema = schemas.get(schema.get("$ref", ""), schema)
        if isinstance(value, list):
            return [self._writable(item, schema.get("items", {}), schemas) for item in value]
        if not isinstance(value, dict):
            return value
        fields, extra = schema.get("properties", {}), schema.get("additionalProperties", {})
        kept = {name: item for name, item in value.items() if not is_output_only(fields.get(name, {}))}
        return {name: self._writable(item, fields.get(name, extra), schemas) for name, item in kept.items()}

    def check_query(self, method: Method, query: Mapping[str, str]) -> None:
        """Raise ApiError 400 on an unknown or missing parameter, or a value of the wrong type or outside its enum."""
        for name, parameter in method.parameters.items():
            if parameter.get("required") and parameter["location"] == "query" and not query.get(name):
                raise ApiError(400, f"Required parameter: {name}", reason="required")
        for name, value in query.items():
            parameter = method.parameters.get(name)
            if parameter is None and name in _UNDECLARED_QUERY:
                continue
            if parameter is None:
                unknown = f'Invalid JSON payload received. Unknown name "{name}": Cannot bind query parameter.'
                raise ApiError(400, f"{unknown} Field '{name}' could not be found in request message.")
            kind = str(parameter.get("type"))
            form = {"integer": r"-?\d+", "boolean": "(?i)true|false"}.get(kind, "(?s).*")
            if not re.fullmatch(form, value) or value not in parameter.get("enum", (value,)):
                raise ApiError(400, f"Invalid value at '{name}' ({kind}), \"{value}\"")

    def _validator(self, document: str, schema: str) -> Validator:
        key = (document, schema)
        if key not in self._validators:
            definitions = self._definitions.setdefault(document, {})
            self._define(schema, self._discovery.schemas[document], definitions)
            self._validators[key] = Draft202012Validator({"$ref": f"#/$defs/{schema}", "$defs": definitions})
        return self._validators[key]

    def _define(self, name: str, schemas: Mapping[str, Any], definitions: dict[str, Any]) -> None:
        """Convert a schema and those it refers to; a document has hundreds that no request names."""
        if name not in definitions:
            definitions[name] = _convert(schemas[name])
            for other in _references(schemas[name]):
                self._define(other, schemas, definitions)


def is_output_only(schema: Mapping[str, Any]) -> bool:
    """Return whether only Google writes a field; Compute Engine says so in words alone."""
    said = schema.get("description", "").lower()
    return bool(schema.get("readOnly")) or said.startswith(("[output only]", "output only"))


def _references(schema: Any) -> Iterator[str]:
    """Yield the names of the schemas that a schema refers to."""
    if isinstance(schema, Mapping):
        if isinstance(name := schema.get("$ref"), str):
            yield name
        for part in schema.values():
            yield from _references(part)


def _convert(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a discovery schema (JSON Schema draft 3 with omissions) to strict draft 2020-12."""
    if "$ref" in schema:
        return {"$ref": f"#/$defs/{schema['$ref']}"}
    kind = schema.get("type", "any")
    if kind == "any":
        return {}
    if kind == "array":
        return {"type": "array", "items": _convert(schema.get("items", {}))}
    if kind == "object":
        fields = {name: _convert(value) for name, value in schema.get("properties", {}).items()}
        extra = schema.get("additionalProperties")
        more = _convert(extra) if extra is not None else "properties" not in schema
        return {"type": "object", "properties": fields, "additionalProperties": more}
    if kind == "integer":
        return dict(_INTEGER)
    result = dict(_FORMATS.get(schema.get("format", ""), {"type": kind}))
    if "pattern" in schema:
        result["pattern"] = f"^(?:{schema['pattern']})$"
    if "enum" in schema:
        result["enum"] = schema["enum"]
    return result


def _without_nulls(value: Any) -> Any:
    """Drop nulls, which mean "not set" in proto3 JSON."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _validation_error(error: ValidationError) -> ApiError:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path).lstrip(".")
    if error.validator == "additionalProperties":
        instance: Any = error.instance
        schema: Any = error.schema
        place = f" at '{where}'" if where else ""
        message = "\n".join(
            f'Invalid JSON payload received. Unknown name "{name}"{place}: Cannot find field.'
            for name in sorted(instance.keys() - schema["properties"])
        )
    elif error.validator == "pattern":
        words = f"Must be a match of regex '{str(error.validator_value).removeprefix('^').removesuffix('$')}'"
        message = f"Invalid value for field 'resource.{where}': '{error.instance}'. {words}"
    else:
        message = f"Invalid value at '{where}': {error.message}"
    violations = [{"field": where, "description": line} for line in message.splitlines()]
    detail = {"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": violations}
    return ApiError(400, message, details=[detail])
