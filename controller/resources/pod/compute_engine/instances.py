"""A slice of one VM: an instance (https://cloud.google.com/compute/docs/reference/rest/v1/instances)."""

from dataclasses import dataclass

from controller.context import Context
from controller.resources.pod.compute_engine.bodies import instance_body
from controller.resources.pod.compute_engine.requests import change, delete_when_ready, get
from controller.resources.pod.compute_engine.states import parse_instance
from controller.resources.pod.provisioner import Place, SliceSpec, SliceStatus

PROVISIONER = "instance"


@dataclass(frozen=True)
class InstanceProvisioner:
    """Creates slices with `instances.insert`."""

    def observe(self, context: Context, name: str, zone: str) -> SliceStatus | None:
        found = get(context, "instances.get", zone=zone, instance=name)
        return None if found is None else parse_instance(found)

    def create(self, context: Context, name: str, spec: SliceSpec, place: Place) -> None:
        change(context, "instances.insert", zone=place.zone, body=instance_body(context, name, spec, place))

    def delete(self, context: Context, name: str, zone: str) -> None:
        delete_when_ready(context, lambda: change(context, "instances.delete", zone=zone, instance=name))
