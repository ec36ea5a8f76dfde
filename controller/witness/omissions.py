"""Leave out of a request or an answer what belongs to others in the project: their resources and their metadata.

It is applied before anything is recorded. What the replay needs is kept.
"""

from typing import Any

from controller.gcp.names import is_labelled
from controller.witness.stand_ins import REMOVED

LISTS = {
    "compute.disks.list": "items",
    "compute.instances.list": "items",
    "storage.buckets.list": "items",
    "tpu.projects.locations.nodes.list": "nodes",
    "tpu.projects.locations.queuedResources.list": "queuedResources",
}
"""Lists of which only items with our label are recorded, and the field that holds them."""
AGGREGATED_LISTS = {"compute.disks.aggregatedList": "disks", "compute.instances.aggregatedList": "instances"}
"""The same for lists that are grouped by zone."""
METADATA = frozenset({"metadata", "commonInstanceMetadata"})
"""Fields of nodes, VMs and the project that hold what people set."""
KEPT_KEYS = frozenset({"enable-oslogin"})
"""Keys of metadata whose values are recorded whoever set them."""
OUR_KEYS = frozenset({"startup-script", "slipway"})
"""Keys of metadata whose values are recorded if we set them."""
SWITCH = "END_OF_DEAD_MANS_SWITCH"
"""A line of every startup script that starts our dead man's switch."""


def omit_others(method_id: str, document: Any) -> Any:
    """Return the JSON of a request or an answer without the resources of others and the values of their metadata."""
    if isinstance(document, dict):
        if field := LISTS.get(method_id):
            document = _only_ours(document, field)
        elif field := AGGREGATED_LISTS.get(method_id):
            document = _aggregated(document, field)
    if method_id.startswith(("compute.", "tpu.")):
        return _clean(document)
    return document


def _only_ours(document: dict[str, Any], field: str) -> dict[str, Any]:
    """Return a list without the items of others; Google omits the field of an empty list."""
    if not isinstance(document.get(field), list):
        return document
    ours = [item for item in document[field] if isinstance(item, dict) and _is_ours(item)]
    rest = {name: value for name, value in document.items() if name != field}
    return {**rest, field: ours} if ours else rest


def _aggregated(document: dict[str, Any], field: str) -> dict[str, Any]:
    """Return a list grouped by zone without the items of others, and without the zones that had nothing else."""
    if not isinstance(document.get("items"), dict):
        return document
    cleaned = {
        zone: _only_ours(listed, field) if isinstance(listed, dict) else {}
        for zone, listed in document["items"].items()
    }
    return {**document, "items": {zone: listed for zone, listed in cleaned.items() if listed}}


def _is_ours(item: dict[str, Any]) -> bool:
    """Return whether an item carries our label; a queued resource has it on the nodes that it asks for."""
    tpu = item.get("tpu")
    specs = tpu.get("nodeSpec", []) if isinstance(tpu, dict) else []
    return _has_label(item) or any(_has_label(spec.get("node", {})) for spec in specs)


def _has_label(item: dict[str, Any]) -> bool:
    return isinstance(item.get("labels"), dict) and is_labelled(item)


def _clean(value: Any) -> Any:
    """Return JSON data without the values of metadata that others set, at any depth."""
    if isinstance(value, list):
        return [_clean(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if _is_operation(value):
        return {name: inner if name == "metadata" else _clean(inner) for name, inner in value.items()}
    ours = _has_label(value)
    return {
        name: _clean_metadata(inner, ours) if name in METADATA and isinstance(inner, dict) else _clean(inner)
        for name, inner in value.items()
    }


def _is_operation(value: dict[str, Any]) -> bool:
    """Return whether this is a long-running operation, whose metadata Google sets."""
    name, metadata = value.get("name"), value.get("metadata")
    named = isinstance(name, str) and ("/operations/" in name or name.startswith("operations/"))
    return named or "done" in value or (isinstance(metadata, dict) and "@type" in metadata)


def _clean_metadata(metadata: dict[str, Any], ours: bool) -> dict[str, Any]:
    """Return metadata in the form of the TPU API, an object, or of Compute Engine, a list of keys and values."""
    items = metadata.get("items")
    if isinstance(items, list):
        cleaned = [
            {**item, "value": _shown(item.get("key", ""), item["value"], ours)} if "value" in item else item
            for item in items
        ]
        return {**metadata, "items": cleaned}
    if metadata.get("kind") == "compute#metadata":  # without items
        return metadata
    return {key: _shown(key, value, ours) for key, value in metadata.items()}


def _shown(key: str, value: Any, ours: bool) -> Any:
    """Return what is recorded of one value; of SSH keys not the comments, which name people and machines."""
    if not isinstance(value, str):
        return REMOVED
    if key == "ssh-keys":
        return "\n".join(" ".join(line.split()[:2]) for line in value.splitlines())
    if key in KEPT_KEYS or (key in OUR_KEYS and (ours or (key == "startup-script" and SWITCH in value))):
        return value
    return REMOVED
