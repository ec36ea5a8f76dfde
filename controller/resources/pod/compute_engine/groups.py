"""A slice of several VMs: a managed instance group (MIG) that a workload policy connects.

https://cloud.google.com/compute/docs/tpus/create-tpu-mig-multi-host-slice. The policy and the template of the VMs are
resources of their own, which bill nothing. They are named by their content, so one that exists already is right. The
policy is made first and deleted last: as long as it exists, a pod is GONE, and not absent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.context import Context
from controller.gcp.errors import ConflictError, GoogleError
from controller.gcp.names import leaf
from controller.resources.pod.compute_engine.bodies import (
    MAX_PREFIX,
    group_body,
    mark,
    policy_body,
    template_body,
)
from controller.resources.pod.compute_engine.requests import API, IN_USE, change, delete_when_ready, get
from controller.resources.pod.compute_engine.states import Group, no_group, parse_group
from controller.resources.pod.provisioner import Place, SliceSpec, SliceStatus

PROVISIONER = "mig"
PARTS: Mapping[str, str] = {"regionInstanceTemplates": "instanceTemplate", "resourcePolicies": "resourcePolicy"}
"""What a group leaves behind, in the order in which it can be deleted, with the parameter that names one."""


@dataclass(frozen=True)
class GroupProvisioner:
    """Creates slices with a workload policy, a template and an empty group, which it then resizes."""

    def observe(self, context: Context, name: str, zone: str) -> SliceStatus | None:
        manager = get(context, "instanceGroupManagers.get", zone=zone, instanceGroupManager=name)
        if manager is not None:
            return parse_group(read_group(context, manager, zone), zone)
        policies = _parts_of(context, "resourcePolicies", name, zone.rpartition("-")[0])
        return no_group(name, zone) if any(policies) else None

    def create(self, context: Context, name: str, spec: SliceSpec, place: Place) -> None:
        region, template = place.region, template_body(context, name, spec, place)
        try:
            _make(context, "resourcePolicies.insert", region=region, body=policy_body(name, spec))
            _make(context, "regionInstanceTemplates.insert", region=region, body=template)
            body = group_body(context, name, spec, place, template["name"])
            change(context, "instanceGroupManagers.insert", zone=place.zone, body=body)
            change(
                context, "instanceGroupManagers.resize",
                zone=place.zone, instanceGroupManager=name, size=spec.workers,
            )  # fmt: skip
        except ConflictError:
            raise  # a group of that name exists, and it may be another controller's
        except GoogleError as error:
            if not error.is_transient:
                self.delete(context, name, place.zone)
            raise

    def delete(self, context: Context, name: str, zone: str, *, is_recorded: bool = False) -> None:
        """Delete the group with its VMs, then its template and policy, unless a group in another zone uses them."""
        group = {"zone": zone, "instanceGroupManager": name}
        delete_when_ready(context, lambda: change(context, "instanceGroupManagers.delete", **group))
        region = zone.rpartition("-")[0]
        for collection in PARTS:
            for part in _parts_of(context, collection, name, region):
                delete_part(context, collection, part, region)


def _make(context: Context, method: str, **parameters: Any) -> None:
    """Create a part of a slice unless it exists."""
    try:
        change(context, method, **parameters)
    except ConflictError:
        return


def _parts_of(context: Context, collection: str, name: str, region: str) -> Iterator[str]:
    """Yield the names of a pod's templates or policies."""
    where = {"project": context.project, "region": region, "filter": f'name eq "{name[:MAX_PREFIX]}-[0-9a-fx]+"'}
    for item in context.google.list_all(API, f"{collection}.list", "items", **where):
        if item.get("description") == mark(name):
            yield item["name"]


def delete_part(context: Context, collection: str, name: str, region: str) -> None:
    """Delete a template or a policy; no error if it is gone, or if another group uses it."""
    parameters = {"region": region, PARTS[collection]: name}
    try:
        delete_when_ready(context, lambda: change(context, f"{collection}.delete", **parameters))
    except GoogleError as error:
        if not IN_USE.search(str(error)):
            raise


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
