"""A slice of one VM: an instance (https://cloud.google.com/compute/docs/reference/rest/v1/instances)."""

from dataclasses import dataclass
from typing import Any

from controller.context import Context
from controller.gcp.operations import poll_compute
from controller.resources.pod.compute_engine.bodies import instance_body
from controller.resources.pod.compute_engine.requests import API, change, delete_when_ready, get
from controller.resources.pod.compute_engine.states import parse_instance
from controller.resources.pod.provisioner import IsAnswered, Place, SliceSpec, SliceStatus

PROVISIONER = "instance"


@dataclass(frozen=True)
class InstanceProvisioner:
    """Creates slices with `instances.insert`."""

    def observe(self, context: Context, name: str, zone: str) -> SliceStatus | None:
        found = get(context, "instances.get", zone=zone, instance=name)
        return None if found is None else parse_instance(found)

    def create(self, context: Context, name: str, spec: SliceSpec, place: Place) -> IsAnswered:
        """Ask for the VM. Google answers when it runs, or for flex-start when the request expires, hours later."""
        body = instance_body(context, name, spec, place)
        where: dict[str, Any] = {"project": context.project, "zone": place.zone}
        return poll_compute(context, context.google.change_pod(API, "instances.insert", body=body, **where))

    def delete(self, context: Context, name: str, zone: str, *, is_recorded: bool = False) -> None:
        delete_when_ready(context, lambda: change(context, "instances.delete", zone=zone, instance=name))
