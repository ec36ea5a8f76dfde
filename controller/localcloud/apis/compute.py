"""Compute v1: the handlers of all its collections (`COLLECTIONS`), of operations, projects, regions and zones."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from controller.localcloud.apis.catalog import check_allowed, machines_by_zone, show_machine
from controller.localcloud.apis.compute_engine.collections import (
    COLLECTIONS,
    INSTANCES,
    READ_ONLY,
    SUBNETWORKS,
    TEMPLATES,
    Collection,
    Rules,
    parent_of,
)
from controller.localcloud.apis.networks import COMPUTE_KIND, check_named, invalid_field
from controller.localcloud.apis.operations import Effect
from controller.localcloud.apis.service import Service
from controller.localcloud.http.call import (
    DEFAULT_ACCOUNT,
    PROJECT,
    PROJECT_NUMBER,
    ApiCall,
    Handler,
    check_fingerprint,
    check_project,
    fingerprint,
    matches_filter,
    merge_patch,
    paginate,
    timestamp,
)
from controller.localcloud.http.errors import ApiError, already_exists, not_found, not_ready
from controller.localcloud.store import Document
from controller.localcloud.vms.hosts import PROJECT_METADATA_KIND, Instances

_NOT_STORED = ("fingerprint", "region")
"""What a body may name, to be compared, and what an answer adds."""
_MADE_ONCE = ("id", "creationTimestamp")
_ONE_AT_A_TIME = frozenset({"networks", "subnetworks", "routers", "firewalls"})
"""Collections whose resources are not changed while another operation on them is under way."""
_TRANSITIONAL_STATUS = {"insert": "PROVISIONING", "delete": "STOPPING"}
_WAIT_SECONDS = 120.0  # as documented for operations.wait


@dataclass(eq=False)
class Compute(Service):
    """What all collections share, and the methods of the project, regions and zones."""

    methods: ClassVar = {
        "compute.v1:": "projects.get projects.setCommonInstanceMetadata machineTypes.get machineTypes.aggregatedList "
        "instances.getSerialPortOutput"
    }
    machines: Instances
    rules: Mapping[str, Rules] = field(default_factory=dict)
    """What is special about some kinds, by their plural."""

    def handlers(self) -> dict[str, Handler]:
        table: dict[str, Handler] = {"subnetworks.setPrivateIpGoogleAccess": partial(self._update, SUBNETWORKS)}
        for place in ("zone", "region"):
            table[f"{place}s.get"] = partial(self._get_location, place)
            table[f"{place}s.list"] = partial(self._list_locations, place)
        for collection in COLLECTIONS:
            name = collection.methods or collection.plural
            table |= {
                f"{name}.insert": partial(self._insert, collection),
                f"{name}.get": partial(self._get, collection),
                f"{name}.list": partial(self._list, collection),
                f"{name}.delete": partial(self._delete, collection),
                f"{name}.aggregatedList": partial(self._aggregated, collection),
            }
            if collection.plural not in READ_ONLY:
                table |= {f"{name}.{verb}": partial(self._update, collection) for verb in ("patch", "update")}
        for scope in ("global", "region", "zone"):
            table |= {
                f"{scope}Operations.get": partial(self._operation, 0.0),
                f"{scope}Operations.wait": partial(self._operation, _WAIT_SECONDS),
                f"{scope}Operations.list": self._operation_list,
            }
        policies = self.of_policies("instances.", lambda call: self.find(INSTANCES, call, "resource")[0], conflict=412)
        del policies["instances.testIamPermissions"]  # no client of ours asks
        return super().handlers() | {f"compute.v1:{name}": handler for name, handler in (table | policies).items()}

    def _machine_types_get(self, call: ApiCall) -> Document:
        self._check_location(call)
        return show_machine(self.catalog, call.path["zone"], call.path["machineType"], self.root)

    def _machine_types_aggregated_list(self, call: ApiCall) -> Document:
        check_project(call.path["project"])
        others = [(one["zone"], one["machine_type"]) for one in self.faults.standing("offered") if one["machine_type"]]
        return machines_by_zone(self.catalog, others, self.root, partial(matches_filter, call.query.get("filter", "")))

    def effects(self) -> dict[str, Effect]:
        return {"compute.delete": self._on_deleted, "compute.boot": self.machines.boot}

    def _insert(self, collection: Collection, call: ApiCall) -> Document:
        self._check_location(call)
        self._rules(collection).refuse(call)
        _require_of_body(collection, call)
        path = collection.path(call, check_named(call.body))
        if self.store.get(COMPUTE_KIND, path):
            raise already_exists(path)
        body = {key: value for key, value in call.body.items() if key not in _NOT_STORED}
        if collection is INSTANCES:  # of a type that the zone has, and not one too many
            machine, zone = str(body.get("machineType", "")), call.path["zone"]
            if not machine:
                raise invalid_field("machineType", machine, "The machine type must be specified")
            check_allowed(self.catalog, machine.rpartition("/")[2], zone)
        if collection.scope == "zone":
            self.quotas.check_room(call.path["zone"], collection.plural, body)
        rules = self._rules(collection)
        resource = rules.prepare(call, path, body) or self._prepare(collection, call, body, path)
        self._check_ready(resource.get("network", ""))
        self._finalize(path, resource)
        if resource.get("autoCreateSubnetworks"):
            for other, subnetwork in self.networks.automatic_subnetworks(path):
                self._finalize(other, subnetwork)
        return self.begin("insert", path, rules.effect(path, resource))

    def _prepare(self, collection: Collection, call: ApiCall, body: Document, path: str) -> Document:
        place = call.path.get("region") or call.path.get("zone") or ""
        return self.networks.prepare_resource(collection.plural, place, body, path)

    def _rules(self, collection: Collection) -> Rules:
        return self.rules.get(collection.plural, Rules())

    def _finalize(self, path: str, resource: Document) -> None:
        resource.setdefault("id", str(self.store.next_number("id", 10**18)))
        resource.setdefault("creationTimestamp", timestamp(time.time()))
        self.store.put(COMPUTE_KIND, path, resource)

    def begin(self, verb: str, path: str, effect: str | None = None, delay: str = "") -> Document:
        """Begin an operation on a resource; return it as the API shows it."""
        longer = (self.faults.take("open_operation", verb=verb) or {"seconds": 0.0})["seconds"]
        operation = self.operations.begin(verb, path, effect, seconds=longer, delay=delay)
        if "/firewalls/" in path:
            self.workers.schedule_settle()
        return self._render_operation(operation)

    def _check_ready(self, path: str) -> None:
        """Reject the use of a resource that is still being created."""
        if self.operations.current_verb(path):
            raise not_ready(path)

    def find(self, collection: Collection, call: ApiCall, argument: str = "") -> tuple[str, Document]:
        """Return path and document of the resource that a call names; raise ApiError 404 if there is none."""
        self._check_location(call)
        path = collection.path(call, call.path[argument or collection.singular])
        return path, self.store.require(COMPUTE_KIND, path, not_found(path).message)

    def _get(self, collection: Collection, call: ApiCall) -> Document:
        return self._render(collection, *self.find(collection, call))

    def _list(self, collection: Collection, call: ApiCall) -> Document:
        self._check_location(call)
        found = self.store.items(COMPUTE_KIND, collection.path(call, ""))
        listed = [one for one in found if not self.faults.hides("", one[1].get("creationTimestamp", ""))]
        items = [self._render(collection, path, resource) for path, resource in listed]
        chosen = [item for item in items if matches_filter(call.query.get("filter", ""), item)]
        return {"id": parent_of(call), **paginate(call, chosen)}

    def _aggregated(self, collection: Collection, call: ApiCall) -> Document:
        """Return the items of each zone or region; an empty one has a warning, as Google's has."""
        check_project(call.path["project"])
        known = self.catalog.regions if collection.scope == "region" else self.catalog.zones
        items: dict[str, Any] = {f"{collection.scope}s/{place}": {} for place in known}
        for path, resource in self.store.items(COMPUTE_KIND, f"projects/{PROJECT}/"):
            scope = "/".join(path.split("/")[2:4])
            hidden = self.faults.hides(scope.rpartition("/")[2], resource.get("creationTimestamp", ""))
            if f"/{collection.plural}/" in path and not hidden:
                shown = self._render(collection, path, resource)
                items.setdefault(scope, {}).setdefault(collection.plural, []).append(shown)
        told = {spec["place"]: spec["told"] for spec in self.faults.standing("unreachable")}
        for scope in (scope for scope, listed in items.items() if not listed):
            code = "UNREACHABLE" if told.get(scope.rpartition("/")[2]) == "warning" else "NO_RESULTS_ON_PAGE"
            about = {"code": code, "message": f"{code} for scope '{scope}'."}
            items[scope]["warning"] = {**about, "data": [{"key": "scope", "value": scope}]}
        unreachables = [scope for scope in items if told.get(scope.rpartition("/")[2]) == "field"]
        return {"items": items, **({"unreachables": unreachables} if unreachables else {})}

    def _update(self, collection: Collection, call: ApiCall) -> Document:
        path, resource = self.find(collection, call)
        if collection.plural in _ONE_AT_A_TIME:
            self._check_ready(path)
        if call.method.name == "subnetworks.patch":
            check_fingerprint(call.body.get("fingerprint"), resource, "subnetwork")
        body = {key: value for key, value in call.body.items() if key not in _NOT_STORED}
        if call.method.name == "networks.patch" and (fixed := body.keys() - {"routingConfig", "mtu"}):
            raise ApiError(400, f"Invalid value for field 'resource.{min(fixed)}': it cannot be changed")
        kept = {key: resource[key] for key in _MADE_ONCE}
        wanted = {**kept, **body} if call.method.http == "PUT" else merge_patch(resource, body)
        changed = self._prepare(collection, call, wanted, path)
        for fixed in ("network", "ipCidrRange", "name"):
            if changed.get(fixed) != resource.get(fixed):
                raise ApiError(400, f"Invalid value for field 'resource.{fixed}': it cannot be changed")
        self.store.put(COMPUTE_KIND, path, changed)
        return self.begin("patch", path)

    def _delete(self, collection: Collection, call: ApiCall) -> Document:
        path, _ = self.find(collection, call)
        self.operations.cancel_for(path, "resize")  # of a group, which can be deleted meanwhile
        self._check_ready(path)
        rules = self._rules(collection)
        if users := [*self.networks.dependents(path), *rules.users(path)]:
            message = f"The {collection.spoken} resource '{path}' is already being used by '{users[0]}'"
            # Google names this refusal in two ways; the longer one appears in operations.
            raise ApiError(400, message, status="RESOURCE_IN_USE", reason="resourceInUseByAnotherResource")
        rules.leave(path)
        return self.begin("delete", path, "compute.delete")

    async def _on_deleted(self, path: str) -> None:
        resource = self.store.get(COMPUTE_KIND, path) or {}
        if resource.get("autoCreateSubnetworks"):
            for subnetwork, _ in self.networks.resources_of(path, "subnetworks"):
                self.store.delete(COMPUTE_KIND, subnetwork)
        await self.machines.remove(path)
        for rules in self.rules.values():
            if rules.gone:
                await rules.gone(path)
        self.store.delete(COMPUTE_KIND, path)
        self.workers.schedule_settle()

    def _render(self, collection: Collection, path: str, resource: Document) -> Document:
        shown = {"kind": f"compute#{collection.singular}", "selfLink": self.root + path, **resource}
        if collection.plural == "instances" and (verb := self.operations.current_verb(path)) in _TRANSITIONAL_STATUS:
            shown["status"] = _TRANSITIONAL_STATUS[verb]
        if "network" in resource:
            shown["network"] = self.root + resource["network"]
        if collection.scope != "global":
            shown[collection.scope] = self.root + path.partition(f"/{collection.plural}/")[0]
        if collection.plural == "subnetworks":
            shown["fingerprint"] = fingerprint(resource)
            shown.setdefault("privateIpGoogleAccess", False)
        if collection.plural == "networks" and (mine := self.networks.resources_of(path, "subnetworks")):
            shown["subnetworks"] = [self.root + subnetwork for subnetwork, _ in mine]
        self._rules(collection).show(path, resource, shown)
        return shown

    def _check_location(self, call: ApiCall) -> None:
        check_project(call.path["project"])
        for place, known in (("region", self.catalog.regions), ("zone", self.catalog.zones)):
            if place in call.path and call.path[place] not in known:
                raise ApiError(400, f"Invalid value for field '{place}': '{call.path[place]}'. Unknown {place}.")

    def _projects_get(self, call: ApiCall) -> Document:
        check_project(call.path["project"])
        items = self._common_items()
        return {
            "id": PROJECT_NUMBER,
            "name": PROJECT,
            "selfLink": f"{self.root}projects/{PROJECT}",
            "commonInstanceMetadata": show_metadata(items),
            "defaultServiceAccount": DEFAULT_ACCOUNT,
            "quotas": self.quotas.project_quotas(),
        }

    def _common_items(self) -> list[Document]:
        return (self.store.get("setting", PROJECT_METADATA_KIND) or {}).get("items", [])

    def _projects_set_common_instance_metadata(self, call: ApiCall) -> Document:
        check_project(call.path["project"])
        check_fingerprint(call.body.get("fingerprint"), self._common_items(), "metadata")
        self.store.put("setting", PROJECT_METADATA_KIND, {"items": call.body.get("items", [])})
        begun = self.operations.begin("setMetadata", f"projects/{PROJECT}", parent=f"projects/{PROJECT}/global")
        return self._render_operation(begun)

    def _get_location(self, kind: str, call: ApiCall) -> Document:
        self._check_location(call)
        name = call.path[kind]
        link = f"{self.root}projects/{PROJECT}/{kind}s/{name}"
        shown: Document = {"kind": f"compute#{kind}", "name": name, "status": "UP", "selfLink": link}
        if kind == "zone":
            return {**shown, "region": f"{self.root}projects/{PROJECT}/regions/{name.rpartition('-')[0]}"}
        return {**shown, "quotas": self.quotas.compute_quotas(name)}

    def _list_locations(self, kind: str, call: ApiCall) -> Document:
        names = self.catalog.zones if kind == "zone" else self.catalog.regions
        calls = (replace(call, path={**call.path, kind: name}) for name in names)
        return paginate(call, [self._get_location(kind, one) for one in calls])

    def _instances_get_serial_port_output(self, call: ApiCall) -> Document:
        path, _ = self.find(INSTANCES, call)
        start = int(call.query.get("start", "0"))
        text, end = self.machines.serial_output(path, start)
        return {"selfLink": f"{self.root}{path}/serialPort", "contents": text, "start": str(start), "next": str(end)}

    async def _operation(self, seconds: float, call: ApiCall) -> Document:
        self._check_location(call)
        name = f"{parent_of(call)}/operations/{call.path['operation']}"
        return self._render_operation(await self.operations.wait(name, seconds))

    def _operation_list(self, call: ApiCall) -> Document:
        self._check_location(call)
        found = self.operations.list_under(parent_of(call))
        return paginate(call, [self._render_operation(operation) for operation in found])

    def _render_operation(self, operation: Document) -> Document:
        started = timestamp(operation["created"])
        parent = operation["name"].partition("/operations/")[0]
        shown: dict[str, Any] = {
            "kind": "compute#operation",
            "id": str(operation["number"]),
            "name": operation["name"].rpartition("/")[2],
            "operationType": operation["verb"],
            "targetLink": self.root + operation["target"],
            "selfLink": self.root + operation["name"],
            "status": "DONE" if operation["done"] else "RUNNING",
            "progress": 100 if operation["done"] else 0,
            "insertTime": started,
            "startTime": started,
            **{scope: self.root + parent for scope in ("region", "zone") if f"/{scope}s/" in parent},
        }
        if operation["done"]:
            shown["endTime"] = timestamp(operation["ended"])
        if error := operation.get("error"):
            shown["error"] = {"errors": [{"code": error["reason"], "message": error["message"]}]}
            shown |= {"httpErrorStatusCode": error["http"], "httpErrorMessage": error["reason"]}
        return shown


_PERMISSIONS_OF_PARTS = {"labels": "setLabels", "metadata": "setMetadata", "tags": "setTags"}


def _email_of(account: Mapping[str, Any]) -> str:
    """Return the address of a service account as a VM's body names it."""
    email = account.get("email", "default")
    return DEFAULT_ACCOUNT if email == "default" else email


def _require_of_body(collection: Collection, call: ApiCall) -> None:
    """Raise ApiError 403 unless the caller holds the permissions that parts of the request need."""
    project = f"projects/{PROJECT}"
    if collection.plural == "disks" and call.body.get("labels"):
        call.require_permission("compute.disks.setLabels", project)
    if collection is TEMPLATES:
        for account in (call.body.get("properties") or {}).get("serviceAccounts", ()):
            call.require_account(_email_of(account))
    if collection is not INSTANCES:
        return
    for part, verb in _PERMISSIONS_OF_PARTS.items():
        if call.body.get(part):
            call.require_permission(f"compute.instances.{verb}", project)
    for account in call.body.get("serviceAccounts", ()):
        call.require_permission("compute.instances.setServiceAccount", project)
        call.require_account(_email_of(account))
    if any(interface.get("accessConfigs") for interface in call.body.get("networkInterfaces", ())):
        call.require_permission("compute.subnetworks.useExternalIp", project)


def show_metadata(items: list[Document]) -> Document:
    """Return the metadata of the project or of a VM as the API shows it."""
    return {"kind": "compute#metadata", "fingerprint": fingerprint(items), "items": items}
