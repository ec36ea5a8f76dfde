"""Methods of Google's APIs: requests and connections, by google-api-python-client, and which of them change a pod.

The discovery documents come from that library's own cache, without network. `rootUrl` is replaced for the emulated
cloud, so production and emulation share every line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    import httplib2

VERSIONS = {
    "billingbudgets": "v1",
    "cloudbilling": "v1",
    "cloudresourcemanager": "v1",
    "compute": "v1",
    "iam": "v1",
    "iap": "v1",
    "secretmanager": "v1",
    "oauth2": "v2",
    "oslogin": "v1",
    "serviceusage": "v1",
    "storage": "v1",
    "tpu": "v2",
}
UNGUARDED_METHODS = frozenset({"getGuestAttributes", "listManagedInstances", "patch"})
"""Methods that the write guard skips: they change nothing that matters to another controller."""
POD_COLLECTIONS = frozenset({"instanceGroupManagers", "regionInstanceTemplates", "resourcePolicies"})
"""Collections of Compute Engine that hold nothing but parts of pods. Instances may be other machines."""


def is_of_pods(api: str, method: str) -> bool:
    """Return whether a method that is no GET changes a pod, so that the lease is confirmed before every try."""
    collection, _, verb = method.rpartition(".")
    return verb not in UNGUARDED_METHODS and (api == "tpu" or (api == "compute" and collection in POD_COLLECTIONS))


def make_connection(timeout: float | None = None) -> httplib2.Http:
    """Return a new connection; timeout: seconds, None: the library's."""
    from googleapiclient.http import build_http  # a plain Http takes the 308 of a resumable upload for a redirect

    http = build_http()
    http.proxy_info = _proxy
    if timeout is not None:
        http.timeout = timeout
    return http


def _proxy(scheme: Any) -> Any:
    """Return the proxy for a scheme, its name and password decoded, which httplib2 sends as they are in the address."""
    import httplib2

    found: Any = httplib2.proxy_info_from_environment(scheme)
    if found is not None and found.proxy_user:
        found.proxy_user, found.proxy_pass = unquote(found.proxy_user), unquote(found.proxy_pass or "")
    return found


@cache
def _discovery_document(api: str) -> dict[str, Any]:
    """Return the discovery document of `API` or `API:VERSION`. It is shared: do not change it."""
    from googleapiclient.discovery_cache import get_static_doc

    name, _, version = api.partition(":")
    return json.loads(str(get_static_doc(name, version or VERSIONS[name])))


@cache
def method_of(api: str, method: str, root: str | None) -> Callable[..., Any]:
    """Return the function that makes requests of a method; each is executed with a connection of its client.

    The library would build every method of a resource, and of its parents, for each request; here it sees only the part
    of the discovery document that describes this one.
    """
    from googleapiclient.discovery import build_from_document

    *parents, leaf = method.split(".")
    document = _cut_document(_discovery_document(api), parents, leaf.removesuffix("_media"))
    document["schemas"] = {"Any": {"id": "Any", "type": "any"}}
    if root:
        document["rootUrl"] = document["mtlsRootUrl"] = root
    node = build_from_document(document, http=make_connection())
    for parent in parents:
        node = getattr(node, parent)()
    return getattr(node, leaf)


def _cut_document(document: Mapping[str, Any], parents: Sequence[str], leaf: str) -> dict[str, Any]:
    """Return a copy of a discovery document that describes only one method, `leaf` of the resource at `parents`.

    Its request and response are any JSON: the library uses their schemas for docstrings only, and writing those takes
    longer than everything else.
    """
    rest = {key: value for key, value in document.items() if key not in ("methods", "resources")}
    if not parents:
        method = document["methods"][leaf]
        bodies = {key: {"$ref": "Any"} for key in ("request", "response") if key in method}
        return {**rest, "methods": {leaf: {**method, **bodies}}}
    first, *others = parents
    return {**rest, "resources": {first: _cut_document(document["resources"][first], others, leaf)}}
