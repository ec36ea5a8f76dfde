"""What Compute Engine reports about a slice, as the status that all planes share. Pure functions."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.schema.topology import type_of_machines
from controller.gcp.answers import LABEL, leaf, parse_timestamp
from controller.resources.pod.instance_bodies import IMAGE_KEY, PROVISIONING_MODELS, VmSpec, mark
from controller.resources.pod.provisioner import WAITING_STATES, Endpoint, Place, SliceSpec, SliceStatus

Answer = Mapping[str, Any]
STARTING = frozenset({"PROVISIONING", "STAGING"})
ENDING = frozenset({"STOPPING", "PENDING_STOP", "SUSPENDING", "DEPROVISIONING"})
ENDED = frozenset({"TERMINATED", "STOPPED", "SUSPENDED"})
CREATING_ACTIONS = frozenset({"CREATING", "CREATING_WITHOUT_RETRIES", "VERIFYING"})
REPAIRING_ACTIONS = frozenset({"RECREATING", "REFRESHING", "RESTARTING", "RESUMING", "STARTING"})
PENDING_STATES = WAITING_STATES | {"PROVISIONING", "REPAIRING", "STOPPING", "DELETING"}
STORAGE_SCOPES = frozenset({"cloud-platform", "devstorage.read_write", "devstorage.full_control"})
"""Access scopes with which a VM may write objects (https://cloud.google.com/storage/docs/oauth-scopes)."""
TPU_MACHINE = re.compile(r"(ct|tpu)\d+\w*-")
TAKEN_STATES = frozenset({"PREEMPTED", "TERMINATED"})
"""The slice was given and is lost; its VMs may be deleted already."""
STOCK_OUT = re.compile(r"RESOURCE_POOL_EXHAUSTED|STOCKOUT|UNSUPPORTED_OPERATION_NO_CAPACITY")
"""Codes after which a group goes on asking by itself."""


@dataclass(frozen=True)
class Group:
    """A managed instance group with its VMs.

    Attributes:
        manager: answer of `instanceGroupManagers.get`.
        managed: those of `listManagedInstances`.
        instances: the instances that exist.
    """

    manager: Answer
    managed: Sequence[Answer]
    instances: Sequence[Answer]


def parse_instance(answer: Answer) -> SliceStatus:
    """Return the status of a slice of one VM."""
    status, place = answer.get("status", ""), place_of(answer, "instance")
    if status == "RUNNING":
        state = "READY"
    elif status in ENDED:
        state = "PREEMPTED" if place.capacity == "spot" else "STOPPED"
    elif status in STARTING | {"REPAIRING"}:
        state = "REPAIRING" if status == "REPAIRING" else "PROVISIONING"
    else:
        state = "STOPPING" if status in ENDING else "WAITING_FOR_RESOURCES"
    waits = state == "WAITING_FOR_RESOURCES"
    created = answer.get("creationTimestamp", "")
    return _status(
        [answer], place, state=state, name=answer["name"], uid="" if waits else f"{answer.get('id', '')}{created}",
        created=parse_timestamp(created), labels=answer.get("labels", {}),
    )  # fmt: skip


def parse_group(group: Group, zone: str) -> SliceStatus:
    """Return the status of a slice of several VMs."""
    manager, name = group.manager, group.manager["name"]
    vms = in_order(group.instances)
    place = place_of(vms[0], "mig") if vms else Place(zone, "", "", "mig")
    code, message = failure_of(group)
    state = group_state(group, spot=place.capacity == "spot", code=code)
    degraded = topology_state(manager) == "ACTIVE_DEGRADED" and state == "READY"
    was_given = state in TAKEN_STATES or (bool(vms) and state not in WAITING_STATES)
    created = manager.get("creationTimestamp", "")
    return _status(
        vms, place, state=state, name=name,
        uid=f"{manager.get('id', '')}{created}" if was_given else "",
        created=parse_timestamp(created), labels=LABEL if manager.get("description") == mark(name) else {},
        health="UNHEALTHY_TOPOLOGY" if degraded else "", health_description=message if degraded else "",
        code=code, message=message,
    )  # fmt: skip


def no_group(name: str, zone: str) -> SliceStatus:
    """Return the status of a slice of which only the policy exists, and maybe the template."""
    return _status([], Place(zone, "", "", "mig"), state="GONE", labels=LABEL, name=name)


def _status(vms: Sequence[Answer], place: Place, *, state: str, labels: Answer, **more: Any) -> SliceStatus:
    first: Answer = vms[0] if vms else {}
    card, metadata = _card(first), metadata_of(first)
    machine = leaf(first.get("machineType", ""))
    account = next((a.get("email", "") for a in first.get("serviceAccounts", [])), "")
    return SliceStatus(
        spec=SliceSpec(
            workers=len(vms),
            accelerator_type=type_of_machines(machine, len(vms)),
            runtime_version=metadata.get(IMAGE_KEY, ""),
            network=leaf(card.get("network", "")),
            external_ip=bool(card.get("accessConfigs")),
            service_account=account,
            own=VmSpec(machine),
        ),
        place=place,
        state=state,
        pending=state in PENDING_STATES,
        running_since=min((parse_timestamp(vm.get("lastStartTimestamp")) for vm in vms), default=0.0),
        endpoints=tuple(_endpoint(worker, vm) for worker, vm in enumerate(vms)),
        ssh_keys=metadata.get("ssh-keys", ""),
        labels=tuple(sorted(labels.items())),
        tags=tuple(first.get("tags", {}).get("items", ())),
        obstacle=next(filter(None, map(_access_problem, vms)), ""),
        **more,
    )


def _access_problem(instance: Answer) -> str:
    """Return why a VM cannot write to Cloud Storage, or ''. `gcloud compute instances create` lets it only read."""
    accounts = instance.get("serviceAccounts", [])
    if any(STORAGE_SCOPES & {leaf(scope) for scope in account.get("scopes", [])} for account in accounts):
        return ""
    what = "access scopes with which it may write to Cloud Storage" if accounts else "service account"
    zone = leaf(instance.get("zone", ""))
    return (
        f"VM {instance['name']} has no {what}, so it cannot use the bucket. Stop it, run `gcloud compute instances "
        f"set-service-account {instance['name']} --zone={zone} --service-account=EMAIL --scopes=cloud-platform`, and "
        "start it again"
    )


def place_of(instance: Answer, provisioner: str) -> Place:
    """Return where a VM is and in which tier."""
    model = instance.get("scheduling", {}).get("provisioningModel", "STANDARD")
    tier = next((tier for tier, name in PROVISIONING_MODELS.items() if name == model), "on_demand")
    return Place(leaf(instance.get("zone", "")), tier, leaf(_card(instance).get("subnetwork", "")), provisioner)


def group_state(group: Group, *, spot: bool, code: str) -> str:
    """Return the state of a group, in the words of the TPU API, which the rest of Slipway knows.

    `code` is that of the last error, or empty.
    """
    shown = topology_state(group.manager)
    actions = {m.get("currentAction", "NONE") for m in group.managed}
    statuses = [m.get("instanceStatus", "") for m in group.managed]
    if "DELETING" in actions:
        return "DELETING"
    if not group.managed:
        return "GONE" if not group.manager.get("targetSize") else "WAITING_FOR_RESOURCES"
    if code and shown not in ("ACTIVE", "ACTIVE_DEGRADED", "REACTIVATING") and not STOCK_OUT.search(code):
        return "FAILED"
    if shown == "REACTIVATING" or actions & REPAIRING_ACTIONS:
        return "REPAIRING"
    if actions & CREATING_ACTIONS or {"PENDING", *STARTING} & set(statuses):
        return "PROVISIONING" if {"RUNNING", *STARTING} & set(statuses) else "WAITING_FOR_RESOURCES"
    if set(statuses) != {"RUNNING"}:
        # Google restarts a slice as a whole in every tier but spot, and says so by the state of its topology.
        restarts = shown not in ("INCOMPLETE", "FAILED") if shown else "REPAIRING" in statuses
        by_itself = not spot and restarts
        return "REPAIRING" if by_itself else "PREEMPTED" if spot else "TERMINATED"
    if len(group.instances) < len(group.managed):
        return "PROVISIONING"  # a list that lags
    if shown in ("ACTIVE", "ACTIVE_DEGRADED", ""):  # whether Google always fills it in is not documented
        return "READY"
    return {"FAILED": "FAILED", "DEACTIVATING": "STOPPING"}.get(shown, "PROVISIONING")


def topology_state(manager: Answer) -> str:
    """Return the state of the connections between the chips of a group, or ''."""
    return next((t.get("state", "") for t in _topologies(manager)), "")


def failure_of(group: Group) -> tuple[str, str]:
    """Return code and text of the last error of a group; empty if there is none."""
    status = group.manager.get("status", {})
    checks = [
        *(m.get("lastAttempt", {}).get("errors", {}) for m in group.managed),
        *(t.get("stateDetails", {}).get("error", {}) for t in _topologies(group.manager)),
        status.get("bulkInstanceOperation", {}).get("lastProgressCheck", {}).get("error", {}),
    ]
    found = next((error for check in checks for error in check.get("errors", [])), {})
    return found.get("code", ""), found.get("message", "")


def _topologies(manager: Answer) -> Iterable[Answer]:
    return manager.get("status", {}).get("appliedAcceleratorTopologies", [])


def in_order(instances: Sequence[Answer]) -> list[Answer]:
    """Return VMs in the order of the workers, which Google writes into their metadata; without it, by name.

    `worker-network-endpoints` lists their names; `tpu-env` of each VM has its TPU_WORKER_ID.
    """
    for instance in instances:
        listed = [
            entry.split(":")[-1] for entry in metadata_of(instance).get("worker-network-endpoints", "").split(",")
        ]
        ranks = {leaf(name).partition(".")[0]: rank for rank, name in enumerate(listed)}
        if all(vm["name"] in ranks for vm in instances):
            return sorted(instances, key=lambda vm: ranks[vm["name"]])
    ids = {vm["name"]: _worker_id(vm) for vm in instances}
    if instances and all(ids.values()):
        return sorted(instances, key=lambda vm: int(ids[vm["name"]]))
    return sorted(instances, key=lambda vm: vm["name"])


def _worker_id(instance: Answer) -> str:
    found = re.search(r"^TPU_WORKER_ID\s*[:=]\s*'?\"?(\d+)", metadata_of(instance).get("tpu-env", ""), re.MULTILINE)
    return found[1] if found else ""


def is_tpu(machine_type: str) -> bool:
    return TPU_MACHINE.match(machine_type) is not None


def metadata_of(instance: Answer) -> dict[str, str]:
    return {item["key"]: item.get("value", "") for item in instance.get("metadata", {}).get("items", [])}


def _endpoint(worker: int, instance: Answer) -> Endpoint:
    card = _card(instance)
    external = next((access.get("natIP") for access in card.get("accessConfigs", [])), None)
    return Endpoint(worker, card.get("networkIP", ""), external, instance["name"])


def _card(instance: Answer) -> Answer:
    return next(iter(instance.get("networkInterfaces", [])), {})
