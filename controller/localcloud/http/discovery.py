"""Routes of Google's APIs, read from the discovery documents that ship with google-api-python-client."""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

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
    "secretmanager.v1": "secretmanager/",
    "oslogin.v1": "oslogin/",
    "oauth2.v2": "oauth2/",
}


@dataclass(frozen=True)
class Method:
    """Method of an API, e.g. `tpu.v2` + `projects.locations.nodes.create`."""

    document: str
    name: str
    http: str
    body: str | None  # name of the request's schema
    answers: bool  # without a response schema, the answer is 204 No Content
    parameters: Mapping[str, Mapping[str, Any]] = field(repr=False)
    scopes: tuple[str, ...] = ()  # a token needs one of them

    @property
    def api(self) -> str:
        return self.document.partition(".")[0]

    @property
    def key(self) -> str:
        return f"{self.document}:{self.name}"


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
            answers="response" in raw,
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
    return None


def _methods(resource: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from resource.get("methods", {}).values()
    for child in resource.get("resources", {}).values():
        yield from _methods(child)


def documents_folder() -> Path:
    """Return the folder of the discovery documents, without importing the package (which takes 0.2 s)."""
    spec = importlib.util.find_spec("googleapiclient")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("google-api-python-client is not installed: its discovery documents are needed")
    return Path(spec.submodule_search_locations[0]) / "discovery_cache" / "documents"
