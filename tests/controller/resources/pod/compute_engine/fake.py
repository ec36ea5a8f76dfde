"""A Google client that judges each request by the discovery document of Compute Engine, and keeps what is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from controller.context import Context
from controller.gcp.errors import ConflictError, GoogleError, NotFoundError
from controller.resources.pod.compute_engine.spec import VmSpec
from controller.resources.pod.provisioner import Place, SliceSpec
from tests.fakes.clock import HurriedClock
from tests.fakes.context import make_context

ZONE, REGION = "us-east5-b", "us-east5"
SPEC = SliceSpec(
    workers=2,
    accelerator_type="v6e-8",
    runtime_version="ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
    network="net1",
    external_ip=False,
    service_account="sa",
    own=VmSpec("ct6e-standard-4t", "2x4", boot_disk_gb=200),
    data_disk_kind="hyperdisk-balanced",
)
PLACE = Place(ZONE, "spot", "sub1", "mig")


class Stopped(BaseException):
    """The controller is killed."""


@cache
def schemas() -> dict[str, Any]:
    return discovery()["schemas"]


@cache
def discovery() -> dict[str, Any]:
    import json

    from googleapiclient.discovery_cache import get_static_doc

    return json.loads(str(get_static_doc("compute", "v1")))


def judge(value: Any, schema: dict[str, Any], where: str) -> None:
    """Fail if the discovery document does not know a field of a body, or its type or choices."""
    schema = schemas()[schema["$ref"]] if "$ref" in schema else schema
    kinds = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}
    kind = kinds[schema["type"]]
    assert isinstance(value, kind), f"{where} is {value!r}, not of type {schema['type']}"
    if "enum" in schema:
        assert value in schema["enum"], f"{where} is {value!r}, not one of {schema['enum']}"
    if kind is list:
        for index, item in enumerate(value):
            judge(item, schema["items"], f"{where}[{index}]")
    if kind is dict and "additionalProperties" not in schema:
        for key, item in value.items():
            assert key in schema["properties"], f"{where}.{key} is unknown"
            assert not schema["properties"][key].get("readOnly"), f"{where}.{key} is for answers only"
            judge(item, schema["properties"][key], f"{where}.{key}")


@dataclass
class FakeGoogle:
    """Holds resources by (collection, name). `refuse` maps a method to the error it gives.

    `dies_after`: requests until the controller is killed.
    """

    refuse: dict[str, GoogleError] = field(default_factory=dict)
    held: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    managed: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    bodies: dict[str, Any] = field(default_factory=dict)
    dies_after: int | None = None
    on_resize: Callable[[FakeGoogle], None] = lambda google: None

    def root(self, api: str) -> str:
        return f"https://{api}.googleapis.com/"

    def change_pod(self, api: str, method: str, **parameters: Any) -> dict[str, Any]:
        return self.call(api, method, **parameters)

    def call(self, api: str, method: str, **parameters: Any) -> dict[str, Any]:
        collection, _, verb = method.rpartition(".")
        self._judge(method, parameters)
        if self.dies_after is not None and len(self.calls) >= self.dies_after:
            raise Stopped
        self.calls.append(method)
        if error := self.refuse.get(method):
            raise error
        name = next((str(parameters[key]) for key in _NAMES if key in parameters), "")
        if verb in ("list", "aggregatedList", "listManagedInstances"):
            return self._list(collection, verb, parameters)
        if verb == "insert":
            self._insert(collection, method, parameters["body"])
        elif (collection, name) not in self.held:
            raise NotFoundError(method, 404, "notFound", f"The resource '{name}' was not found")
        elif verb == "get":
            return self.held[collection, name]
        elif verb == "delete":
            del self.held[collection, name]
        elif verb == "resize":
            self.held[collection, name]["targetSize"] = int(parameters["size"])
            self.on_resize(self)
        return {"name": "operation-1", "status": "DONE"}

    def _insert(self, collection: str, method: str, body: dict[str, Any]) -> None:
        if (collection, body["name"]) in self.held:
            raise ConflictError(method, 409, "alreadyExists", "it exists already")
        self.bodies[collection] = body
        self.held[collection, body["name"]] = {**body, "id": "7", "creationTimestamp": "2026-11-20T00:00:00Z"}

    def _list(self, collection: str, verb: str, parameters: dict[str, Any]) -> dict[str, Any]:
        if verb == "listManagedInstances":
            return {"managedInstances": self.managed}
        pattern = re.fullmatch(r'name eq "(.*)"', parameters.get("filter", 'name eq ".*"'))
        assert pattern is not None
        items = [
            item for (kind, name), item in self.held.items() if kind == collection and re.fullmatch(pattern[1], name)
        ]
        scope = f"zones/{ZONE}" if collection in ("instances", "instanceGroupManagers") else f"regions/{REGION}"
        return {"items": {scope: {collection: items}} if verb == "aggregatedList" else items}

    def list_all(self, api: str, method: str, items: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        yield from self.call(api, method, **parameters)[items]

    def _judge(self, method: str, parameters: dict[str, Any]) -> None:
        collection, _, verb = method.rpartition(".")
        known = discovery()["resources"][collection]["methods"][verb]
        required = {name for name, facts in known["parameters"].items() if facts.get("required")}
        given = parameters.keys() - {"body"}
        assert required <= given <= known["parameters"].keys(), f"{method}: {given}"
        if "body" in parameters:
            judge(parameters["body"], known["request"], method)

    def runs(self, *names: str, **status: Any) -> None:
        """Let VMs of the last template run, with an ACTIVE topology."""
        properties = self.bodies["regionInstanceTemplates"]["properties"]
        for index, name in enumerate(names):
            card = {**properties["networkInterfaces"][0], "networkIP": f"10.0.0.{index + 1}"}
            machine = f"zones/{ZONE}/machineTypes/{properties['machineType']}"
            vm = {**properties, "name": name, "status": "RUNNING", "zone": f"zones/{ZONE}", "machineType": machine}
            self.held["instances", name] = {**vm, "networkInterfaces": [card]}
        self.managed = [managed(name) for name in names]
        [manager] = [item for (kind, _), item in self.held.items() if kind == "instanceGroupManagers"]
        manager["status"] = {
            "appliedAcceleratorTopologies": [{"acceleratorTopology": "2x4", "state": "ACTIVE"}]
        } | status


_NAMES = ("instanceGroupManager", "instanceTemplate", "resourcePolicy", "instance")


def managed(name: str, status: str = "RUNNING", action: str = "NONE", *errors: tuple[str, str]) -> dict[str, Any]:
    """Return an entry of `listManagedInstances`."""
    found: dict[str, Any] = {"instance": f"zones/{ZONE}/instances/{name}", "currentAction": action}
    if status:
        found["instanceStatus"] = status
    if errors:
        found["lastAttempt"] = {"errors": {"errors": [{"code": code, "message": text} for code, text in errors]}}
    return found


def context_of(google: FakeGoogle, folder: Path) -> Context:
    return make_context(google, folder, project="p1", clock=HurriedClock())
