"""Slices on Compute Engine: an instance, or several in a managed instance group (MIG) that a workload policy connects.

https://cloud.google.com/compute/docs/tpus/create-tpu-mig-multi-host-slice. The policy and the template of the VMs are
resources of their own, which bill nothing. They are named by their content, so one that exists already is right. The
policy is made first and deleted last: as long as it exists, a pod is GONE, and not absent.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from controller.context import Context
from controller.gcp.answers import Caller, delete_when_ready, leaf, poll_compute, wait_compute
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import ConflictError, ExistsError, GoogleError
from controller.resources.deletions import DeletionPendingError, delete_slice
from controller.resources.pod.instance_bodies import (
    MAX_PREFIX,
    MAX_VALID_SECONDS,
    group_body,
    instance_body,
    mark,
    policy_body,
    template_body,
)
from controller.resources.pod.instance_states import Group, metadata_of, no_group, parse_group, parse_instance
from controller.resources.pod.provisioner import IsAnswered, Place, SliceSpec, SliceStatus

API = "compute"


def change(context: Context, method: str, seconds: float | None = None, **parameters: Any) -> None:
    """Send a request that changes a pod, and wait for its operation. Raises GoogleError on a refusal."""
    wait_compute(context, context.google.change_pod(API, method, project=context.project, **parameters), seconds)


@dataclass(frozen=True)
class InstanceProvisioner:
    """Creates slices with `instances.insert`, which may take up to `create_seconds`; flex-start waits before."""

    create_seconds: float

    def observe(self, context: Context, name: str, zone: str) -> SliceStatus | None:
        found = context.google.find(API, "instances.get", project=context.project, zone=zone, instance=name)
        return None if found is None else parse_instance(found)

    def create(self, context: Context, name: str, spec: SliceSpec, place: Place) -> IsAnswered:
        """Ask for the VM. Google answers when it runs, or for flex-start when the request expires, hours later."""
        body = instance_body(context, name, spec, place)
        where: dict[str, Any] = {"project": context.project, "zone": place.zone}
        seconds = self.create_seconds + (MAX_VALID_SECONDS if place.capacity == "flex_start" else 0)
        return poll_compute(context, context.google.change_pod(API, "instances.insert", body=body, **where), seconds)

    def delete(
        self, context: Context, name: str, zone: str, *, is_recorded: bool = False, is_hurried: bool = False
    ) -> None:
        def delete() -> bool:
            change(context, "instances.delete", zone=zone, instance=name)
            return True

        look = partial(self.observe, context, name, zone)
        delete_slice(context, name, zone, "instance", look, delete, is_recorded, is_hurried)


PARTS: Mapping[str, str] = {"regionInstanceTemplates": "instanceTemplate", "resourcePolicies": "resourcePolicy"}
"""What a group leaves behind, in the order in which it can be deleted, with the parameter that names one."""


@dataclass(frozen=True)
class GroupProvisioner:
    """Creates slices with a workload policy, a template and an empty group, which it then resizes.

    Each operation may take up to `create_seconds`. That of `resize` ends when the VMs are asked for, as documented; if
    it stays open the slice counts, not the operation.
    """

    create_seconds: float

    def observe(self, context: Context, name: str, zone: str) -> SliceStatus | None:
        if (group := self._group(context, name, zone)) is not None:
            return group
        policies = _parts_of(context, "resourcePolicies", name, zone.rpartition("-")[0])
        return no_group(name, zone) if any(policies) else None

    def create(self, context: Context, name: str, spec: SliceSpec, place: Place) -> IsAnswered:
        steps = self._create(context, name, spec, place)
        next(steps, None)
        return lambda: next(steps, True)

    def _create(self, context: Context, name: str, spec: SliceSpec, place: Place) -> Iterator[bool]:
        """Send one request after the other; yield while an operation is open."""
        template, zone = template_body(context, name, spec, place), {"zone": place.zone}
        body = group_body(context, name, spec, place, template["name"])
        requests: list[tuple[str, dict[str, Any]]] = [
            ("resourcePolicies.insert", {"region": place.region, "body": policy_body(name, spec)}),
            ("regionInstanceTemplates.insert", {"region": place.region, "body": template}),
            ("instanceGroupManagers.insert", zone | {"body": body}),
            ("instanceGroupManagers.resize", zone | {"instanceGroupManager": name, "size": spec.workers}),
        ]
        try:
            for method, parameters in requests:
                try:
                    operation = context.google.change_pod(API, method, project=context.project, **parameters)
                    resizes = method.endswith("resize")
                    is_done = poll_compute(context, operation, float("inf") if resizes else self.create_seconds)
                    while not is_done():
                        yield resizes and self._wants_vms(context, name, place.zone)
                except ExistsError:
                    if "region" not in parameters:
                        raise  # a group of that name exists, and it may be another controller's
        except ConflictError:
            raise
        except GoogleError as error:
            if not error.is_transient:
                with suppress(DeletionPendingError):  # it is on record, and the refusal counts
                    self.delete(context, name, place.zone)
            raise

    def delete(
        self, context: Context, name: str, zone: str, *, is_recorded: bool = False, is_hurried: bool = False
    ) -> None:
        """Delete the group with its VMs, then its template and policy, unless a group in another zone uses them."""

        def delete() -> bool:
            change(context, "instanceGroupManagers.delete", zone=zone, instanceGroupManager=name)
            return True

        look = partial(self._group, context, name, zone)
        delete_slice(context, name, zone, "mig", look, delete, is_recorded, is_hurried)
        region = zone.rpartition("-")[0]
        for collection in PARTS:
            for part in _parts_of(context, collection, name, region):
                delete_part(context, collection, part, region)

    def _wants_vms(self, context: Context, name: str, zone: str) -> bool:
        manager = _manager(context, name, zone)
        return manager is not None and bool(manager.get("targetSize"))

    def _group(self, context: Context, name: str, zone: str) -> SliceStatus | None:
        manager = _manager(context, name, zone)
        return None if manager is None else parse_group(read_group(context, manager, zone), zone)


def _manager(context: Context, name: str, zone: str) -> dict[str, Any] | None:
    where = {"project": context.project, "zone": zone, "instanceGroupManager": name}
    return context.google.find(API, "instanceGroupManagers.get", **where)


def _parts_of(context: Context, collection: str, name: str, region: str) -> Iterator[str]:
    """Yield the names of a pod's templates or policies."""
    where = {"project": context.project, "region": region, "filter": f'name eq "{name[:MAX_PREFIX]}-[0-9a-fx]+"'}
    for item in context.google.list_all(API, f"{collection}.list", "items", **where):
        if item.get("description") == mark(name):
            yield item["name"]


def delete_part(context: Context, collection: str, name: str, region: str) -> None:
    """Delete a template or a policy; no error if it is gone, or if another group uses it."""
    parameters: dict[str, Any] = {"region": region, PARTS[collection]: name}

    def delete() -> None:
        try:
            change(context, f"{collection}.delete", **parameters)
        except GoogleError as error:
            if not error.is_in_use:
                raise

    delete_when_ready(context, delete)


def read_group(
    context: Context, manager: Mapping[str, Any], zone: str, instances: Sequence[Mapping[str, Any]] | None = None
) -> Group:
    """Return a group with its VMs.

    Args:
        context: the run's context.
        manager: the answer about the group itself.
        zone: where it is.
        instances: of the zone, if the caller has listed them.
    """
    where: dict[str, Any] = {"project": context.project, "zone": zone}
    method = "instanceGroupManagers.listManagedInstances"
    pages = context.google.list_all(
        API, method, "managedInstances", instanceGroupManager=manager["name"], **where
    )  # fmt: skip
    managed = list(pages)
    names = {leaf(one.get("instance", "")) for one in managed if one.get("instanceStatus")}
    if instances is None:
        chosen = f'name eq "{manager.get("baseInstanceName", manager["name"])}-.*"'
        instances = (
            list(context.google.list_all(API, "instances.list", "items", filter=chosen, **where)) if names else []
        )
    return Group(manager, managed, [one for one in instances if one["name"] in names])


@dataclass(frozen=True)
class InstanceVms:
    """Instances of one zone, in the order of the workers. Each has metadata of its own."""

    project: str
    zone: str
    names: tuple[str, ...]

    def ssh_keys(self, google: GoogleClient) -> str:
        lists = [metadata_of(self._get(google, name)).get("ssh-keys", "").splitlines() for name in self.names]
        return "\n".join(line for line in (lists[0] if lists else []) if all(line in other for other in lists))

    def add_ssh_key(self, caller: Caller, line: str) -> None:
        operations: list[dict[str, Any]] = []
        for name in self.names:
            metadata = self._get(caller.google, name).get("metadata", {})
            items = {item["key"]: item.get("value", "") for item in metadata.get("items", [])}
            lines = items.get("ssh-keys", "").splitlines()
            if line in lines:
                continue
            items["ssh-keys"] = "\n".join(filter(None, [*lines, line]))
            body = {
                "fingerprint": metadata.get("fingerprint", ""),
                "items": [{"key": key, "value": value} for key, value in items.items()],
            }
            operations.append(caller.google.call(API, "instances.setMetadata", **self._path(name), body=body))
        for operation in operations:
            wait_compute(caller, operation)

    def guest_attributes(self, google: GoogleClient) -> Sequence[Sequence[dict[str, str]]]:
        """See https://cloud.google.com/compute/docs/metadata/manage-guest-attributes. The VMs' names are known."""
        known = {"namespace": "guestInventory", "key": "hostname"}
        return [[*self._published(google, name), {**known, "value": name}] for name in self.names]

    def _published(self, google: GoogleClient, name: str) -> list[dict[str, str]]:
        where = {**self._path(name), "queryPath": "hostkeys/"}
        answer = google.find(API, "instances.getGuestAttributes", **where) or {}  # it may have published nothing yet
        return answer.get("queryValue", {}).get("items", [])

    def _get(self, google: GoogleClient, name: str) -> dict[str, Any]:
        return google.call(API, "instances.get", **self._path(name))

    def _path(self, name: str) -> dict[str, str]:
        return {"project": self.project, "zone": self.zone, "instance": name}
