"""The Cloud TPU API as a plane: TPU nodes and queued resources (https://cloud.google.com/tpu/docs/reference/rest)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.schema.config import Config
from controller.context import Context
from controller.gcp.client import GoogleClient
from controller.gcp.errors import ServiceDisabledError
from controller.gcp.operations import Caller, wait_rpc
from controller.gcp.worker_vms import WorkerVms
from controller.resources.pod.plane import CONSOLE, CalendarOffer, Leftover, PlaneChecks, PlaneMethods
from controller.resources.pod.provisioner import Place, Provisioner, ProvisionerName, SliceSpec, SliceStatus
from controller.resources.pod.refusals import PlaneAdvice
from controller.resources.pod.tpu_api import nodes
from controller.resources.pod.tpu_api.offers import TpuApiChecks

NODES = "tpu projects.locations.nodes."
METHODS = PlaneMethods(
    check=(
        f"{NODES}list",
        "tpu projects.locations.acceleratorTypes.list",
        "tpu projects.locations.runtimeVersions.list",
    ),
    observe=(f"{NODES}get", f"{NODES}getGuestAttributes", "tpu projects.locations.operations.get"),
    own=(f"{NODES}create", f"{NODES}delete"),
    change=(f"{NODES}patch", f"{NODES}start", f"{NODES}stop"),
    add_key=(f"{NODES}patch",),
)

CHECKS = TpuApiChecks()
ADVICE = PlaneAdvice(
    role="roles/tpu.admin",
    types="gcloud compute tpus accelerator-types list --zone=ZONE",
    images="gcloud compute tpus tpu-vm versions list --zone=ZONE",
    more={
        "quota": "dead queued resources count too",
        "propagating": "for the TPU Service Agent, run `gcloud beta services identity create "
        "--service=tpu.googleapis.com`",
    },
)


@dataclass(frozen=True)
class TpuApi:
    """Implements `Plane`."""

    title: str = "the TPU API"
    queues: frozenset[ProvisionerName] = frozenset({"queued"})
    account_roles: tuple[str, ...] = ()
    methods: PlaneMethods = METHODS
    checks: PlaneChecks = CHECKS
    advice: PlaneAdvice = ADVICE

    def delete_permission(self, provisioner: ProvisionerName) -> str:
        return "tpu.nodes.delete"

    def spec(self, config: Config) -> SliceSpec:
        return SliceSpec.of(config, config.topology.runtime_version)

    def provisioner_for(self, config: Config, tier: str) -> ProvisionerName:
        return "queued" if config.tpu.is_queued(tier) else "node"

    def provisioners(self, create_seconds: float) -> Mapping[ProvisionerName, Provisioner]:
        return {"queued": nodes.QueuedProvisioner(create_seconds), "node": nodes.NodeProvisioner(create_seconds)}

    def slices(self, context: Context) -> Iterator[SliceStatus]:
        parent, known = f"projects/{context.project}/locations/-", set[tuple[str, str]]()
        try:
            for node in context.google.list_all(nodes.API, "projects.locations.nodes.list", "nodes", parent=parent):
                status = nodes.parse_node(node)
                known.add((status.place.zone, status.name))
                yield status
            method = "projects.locations.queuedResources.list"
            for request in context.google.list_all(nodes.API, method, "queuedResources", parent=parent):
                status = nodes.parse_request(request, None, context.clock.now())
                if (status.place.zone, status.name) not in known:
                    yield status
        except ServiceDisabledError:
            return  # where the API is off there are none

    def leftovers(self, context: Context) -> Iterator[Leftover]:
        return iter(())

    def delete_leftover(self, context: Context, leftover: Leftover) -> None:
        """Do nothing: a slice is a node and a request, and both are listed as slices."""

    def calendar_offers(self, config: Config, context: Context, days: float) -> Iterator[CalendarOffer]:
        """Yield nothing: what is reserved through Compute Engine is for slices of Compute Engine."""
        return iter(())

    def vms(self, context: Context, name: str, status: SliceStatus) -> WorkerVms:
        return NodeVms(nodes.node_path(context, name, status.place.zone))

    def deletions(self, context: Context, name: str, zone: str) -> list[str]:
        return nodes.deletions(context, name, zone)

    def console_url(self, project: str, name: str, place: Place) -> str:
        return f"{CONSOLE}/tpus/details/{place.zone}/{name}?project={project}"

    def delete_by_hand(self, context: Context, name: str, zone: str) -> None:
        path = nodes.node_path(context, name, zone)
        operation = context.google.call(nodes.API, "projects.locations.nodes.delete", name=path)
        nodes.wait_deleted(context, operation)

    def request_service_agent(self, context: Context, zone: str) -> None:
        method = "projects.locations.generateServiceIdentity"
        context.google.call(nodes.API, method, parent=nodes.zone_path(context, zone), body={})

    def cannot_stop(self, name: str, spec: SliceSpec, place: Place) -> str:
        """See https://cloud.google.com/tpu/docs/managing-tpus-tpu-vm."""
        if spec.workers > 1:
            return f"Google can stop only pods with one VM, and {name} has {spec.workers}"
        if place.capacity in ("spot", "preemptible"):
            return f"Google cannot stop {place.capacity} pods; `slipway down` deletes it"
        return ""

    def start(self, context: Context, name: str, zone: str, seconds: float) -> None:
        path = nodes.node_path(context, name, zone)
        operation = context.google.call(nodes.API, "projects.locations.nodes.start", name=path, body={})
        nodes.wait_done(context, operation, seconds)

    def stop(self, context: Context, name: str, zone: str, seconds: float) -> None:
        path = nodes.node_path(context, name, zone)
        operation = context.google.call(nodes.API, "projects.locations.nodes.stop", name=path, body={})
        nodes.wait_done(context, operation, seconds)


@dataclass(frozen=True)
class NodeVms:
    """The VMs of a TPU node, whose metadata they share; `node` is its full resource name."""

    node: str

    def ssh_keys(self, google: GoogleClient) -> str:
        return self._metadata(google).get("ssh-keys", "")

    def add_ssh_key(self, caller: Caller, line: str) -> None:
        metadata = self._metadata(caller.google)
        lines = [*metadata.get("ssh-keys", "").splitlines(), line]
        body = {"metadata": metadata | {"ssh-keys": "\n".join(filter(None, lines))}}
        operation = caller.google.call(
            nodes.API, "projects.locations.nodes.patch", name=self.node, updateMask="metadata", body=body
        )
        wait_rpc(caller, nodes.API, operation, "projects.locations.operations.get")

    def guest_attributes(self, google: GoogleClient) -> Sequence[Sequence[dict[str, str]]]:
        """See https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes/getGuestAttributes."""
        method = "projects.locations.nodes.getGuestAttributes"
        answer = google.call(nodes.API, method, name=self.node, body={"workerIds": [""]})
        return [worker.get("queryValue", {}).get("items", []) for worker in answer.get("guestAttributes", [])]

    def _metadata(self, google: GoogleClient) -> dict[str, Any]:
        return dict(google.call(nodes.API, "projects.locations.nodes.get", name=self.node).get("metadata", {}))
