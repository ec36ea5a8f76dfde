"""Find Slipway's billed resources in all zones by label and description, and what every pod of the project does."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from conf.schema.topology import UnknownTypeError, find_topology, zone_region
from controller.cleanup.dependents import aggregated
from controller.context import Context
from controller.core.errors import CloudError
from controller.core.json_documents import UnreadableError
from controller.gcp.answers import delete_when_ready, is_labelled, is_marked, leaf, parse_timestamp, wait_compute
from controller.gcp.google_errors import ForbiddenError, NotFoundError, ServiceDisabledError
from controller.gcp.prices import HOURS_PER_MONTH, SPOT_TIERS, load_prices
from controller.lease_store import BucketLeaseStore
from controller.records.ledger import Ledger, read_alerts
from controller.records.spending import read_claim, read_limit
from controller.resources.bastion_vm import POD_LABEL, RUN_LABEL
from controller.resources.pod.plane import Leftover
from controller.resources.pod.planes import all_planes, project_slices, provisioners_of
from controller.resources.pod.provisioner import WAITING_STATES, SliceStatus
from controller.run.launch import PodQueue

MIN_AGE_SECONDS = 1800.0
"""A younger pod without a run may be one that a controller is still setting up."""
SETUP_SECONDS = 7200.0
"""A run that has not started on its pod after this long never will: its controller failed or was killed."""
OVERDUE_SECONDS = 180.0
"""So long after its limit a pod should be gone: its watchdog, or what watches that, ends it within two minutes."""
BUCKETS = "buckets.list"
"""Entry of `Context.permission_denied`."""
UNREADABLE = "unknown: you may not read"
"""Beginning of the use of what a record that Google refuses to show may be of: nobody deletes that."""
UNLISTED = (
    "Google did not list everything ({}): what Slipway has there is not shown, and may be billed. Run the same command "
    "again later; https://status.cloud.google.com"
)
STOPPED = frozenset({"STOPPED", "TERMINATED", "PREEMPTED", "SUSPENDED", "FAILED", "GONE"})


@dataclass(frozen=True)
class BilledItem:
    """A resource made by Slipway. `use` says what uses it; empty for an orphan, and then `why` explains that."""

    kind: str
    name: str
    place: str
    usd_per_hour: float | None
    use: str
    why: str
    provisioner: str = ""
    """Of a slice: what created it."""

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name} in {self.place}"


def billed_items(context: Context, buckets: list[str]) -> list[BilledItem]:
    """Return everything of Slipway's that is billed or counts against a quota, orphans first.

    `buckets` may hold records of runs, besides the buckets that carry our label.
    """
    places = list(dict.fromkeys([*slipway_buckets(context), *buckets]))
    slices = [*project_slices(context)]
    pods = [*_pods(context, places, slices)]
    in_use = {zone_region(pod.place) for pod in pods if pod.use}
    vms = {(status.place.zone, vm) for status in slices for vm in status.vms}
    machines = [*_machines(context, places, in_use, vms)]
    found = [*pods, *_leftovers(context), *_disks(context, pods), *machines, *_network(context, in_use)]
    return sorted(found, key=lambda thing: bool(thing.use))


def raise_if_unlisted(context: Context) -> None:
    """Raise CloudError if a list of this session is not whole: what it lacks is not known to be absent."""
    if context.google.unlisted:
        raise CloudError(UNLISTED.format(", ".join(sorted(context.google.unlisted))))


def delete(context: Context, thing: BilledItem) -> None:
    """Delete one item; no error when it is gone already."""
    where = {"project": context.project}
    match thing.kind:
        case "TPU" | "queued TPU":
            for provisioner in provisioners_of([thing.provisioner], MIN_AGE_SECONDS).values():
                provisioner.delete(context, thing.name, thing.place)
            return
        case "disk":
            method, where = "disks.delete", where | {"zone": thing.place, "disk": thing.name}
        case "VM":
            method, where = "instances.delete", where | {"zone": thing.place, "instance": thing.name}
        case "address":
            method, where = "addresses.delete", where | {"region": thing.place, "address": thing.name}
        case "router":
            method, where = "routers.delete", where | {"region": thing.place, "router": thing.name}
        case kind:
            for plane in all_planes():
                plane.delete_leftover(context, Leftover(kind, thing.name, thing.place, 0.0))
            return
    delete_when_ready(context, lambda: wait_compute(context, context.google.call("compute", method, **where)))


def slipway_buckets(context: Context) -> Iterator[str]:
    """Yield the buckets that Slipway made; a refusal to list them is noted, and says nothing about what they hold."""
    try:
        for item in context.google.list_all("storage", "buckets.list", "items", project=context.project):
            if is_labelled(item):
                yield item["name"]
    except ForbiddenError as error:
        if BUCKETS not in context.permission_denied:
            context.permission_denied.add(BUCKETS)
            context.events.note("project", f"cannot list its buckets, which may have records of runs: {error.message}")
    except ServiceDisabledError:
        return


def _pods(context: Context, buckets: list[str], slices: Sequence[SliceStatus]) -> Iterator[BilledItem]:
    """Yield nodes, and queued requests without a node."""
    for slice_ in slices:
        if not slice_.is_labelled:
            continue
        if slice_.uid:
            yield _pod(context, buckets, slice_)
            continue
        state = slice_.state.lower()
        waits = slice_.state in WAITING_STATES or slice_.state == "PROVISIONING"
        use = f"{state}, not billed until it has a node" if waits else ""
        about = (slice_.name, slice_.place.zone, 0.0, use, f"{state}, counts against the quota")
        yield BilledItem("queued TPU", *about, slice_.place.provisioner)


def _leftovers(context: Context) -> Iterator[BilledItem]:
    for plane in all_planes():
        for left in plane.leftovers(context):
            if context.clock.now() - left.created > MIN_AGE_SECONDS:
                yield BilledItem(left.kind, left.name, left.region, 0.0, "", "no pod uses it")


def _pod(context: Context, buckets: list[str], slice_: SliceStatus) -> BilledItem:
    name, zone = slice_.name, slice_.place.zone
    usd = 0.0 if slice_.state in STOPPED else _price(slice_.spec.accelerator_type, zone, slice_.place.capacity)
    use, why = "", f"{slice_.state.lower()}, not used by any known run"
    if slice_.state in STOPPED:
        why = f"{slice_.state.lower()}: its disks may be billed, and it counts against the quota"
        return BilledItem("TPU", name, zone, usd, "", why, slice_.place.provisioner)
    age = context.clock.now() - slice_.created
    hidden = ["the list of buckets"] if BUCKETS in context.permission_denied else []
    for bucket in buckets:
        try:
            if waiting := PodQueue(context.google, context.clock, bucket, name).waiting_runs():
                use = f"{waiting[0]} waits for it"
            elif claim := read_claim(context.google, bucket, name, slice_.uid):
                use, why = _use_by_run(context, bucket, claim["latest"], slice_, age)
            else:
                continue
            break
        except ForbiddenError:
            hidden.append(f"gs://{bucket}")
        except UnreadableError as error:  # nobody deletes what may be in use
            use = f"unknown, since gs://{bucket}/{error}"
            break
    else:
        use = "of a run that no bucket knows: just created, or its bucket was deleted" if age < MIN_AGE_SECONDS else ""
        use = f"{UNREADABLE} {', '.join(hidden)}" if hidden else use
    return BilledItem("TPU", name, zone, usd, use, why, slice_.place.provisioner)


def _use_by_run(context: Context, bucket: str, run_id: str, slice_: SliceStatus, age: float) -> tuple[str, str]:
    """Return (use, reason for no use) from the run's record: whether the run is alive on the pod.

    Args:
        age: seconds since the pod was created.
    """
    ledger = Ledger(context.google, bucket, run_id)
    if ledger.result() is not None:
        return "", f"{run_id} has finished"
    launches = [launch for launch in ledger.launches() if launch.node_uid == slice_.uid]
    if not launches:
        return (f"{run_id} is being set up", "") if age < SETUP_SECONDS else ("", f"{run_id} never started on it")
    attempt = launches[-1].attempt
    if ledger.is_cancelled(attempt):
        return "", f"{run_id} was cancelled"
    how = ledger.exit_status(0, attempt)
    if how is not None:
        return "", f"{run_id} exited with {how}"
    left = read_limit(context.google, bucket, slice_.name, slice_.uid, run_id)
    if left is not None and left < -OVERDUE_SECONDS:
        return "", f"{run_id} is {-left / 60:.0f} min past its limit, and nothing on the pod has ended it"
    until = "" if left is None else f", for {max(0.0, left) / 3600:.1f} h at most"
    return f"{run_id} is running on it{until}", ""


def _disks(context: Context, pods: list[BilledItem]) -> Iterator[BilledItem]:
    table = load_prices()["disk"]["usd_per_gb_month"]
    used = {(pod.place, f"{pod.name[:58]}-data") for pod in pods if pod.use}
    for zone, item in _list_managed(context, "disks", is_labelled):
        price = table.get(leaf(item.get("type", "")))
        usd = None if price is None else price * float(item.get("sizeGb", 0)) / HOURS_PER_MONTH
        use = "attached" if item.get("users") or (zone, item["name"]) in used else ""
        yield BilledItem("disk", item["name"], zone, usd, use, f"{item.get('sizeGb')} GB, not attached")


def _machines(
    context: Context, buckets: list[str], in_use: set[str], of_pods: set[tuple[str, str]]
) -> Iterator[BilledItem]:
    """Yield VMs that carry our label and are no workers: bastions."""
    for zone, item in _list_managed(context, "instances", is_labelled):
        if (zone, item["name"]) in of_pods:
            continue
        usd = load_prices()["vm"]["usd_per_hour"].get(leaf(item.get("machineType", "")))
        stopped = item.get("status") in ("TERMINATED", "STOPPED", "SUSPENDED")
        run_id, pod = item.get("labels", {}).get(RUN_LABEL, ""), item.get("labels", {}).get(POD_LABEL, "")
        use, why = "a pod exists in its region" if zone_region(zone) in in_use else "", "no pod in its region"
        if run_id:
            age = context.clock.now() - parse_timestamp(item.get("creationTimestamp"))
            hidden = ["the list of buckets"] if BUCKETS in context.permission_denied else []
            drives = any(_bastion_drives_run(context, bucket, pod, run_id, hidden) for bucket in buckets)
            use = f"it controls {run_id}" if drives or age < MIN_AGE_SECONDS else ""
            use = f"{UNREADABLE} {', '.join(hidden)}" if hidden and not use else use
            why = f"{run_id} has ended or has no controller"
        yield BilledItem("VM", item["name"], zone, 0.0 if stopped else usd, "" if stopped else use, why)


def _bastion_drives_run(context: Context, bucket: str, pod: str, run_id: str, hidden: list[str]) -> bool:
    """Return whether a bastion acts on that pod for that run; a bucket that may not be read goes into `hidden`."""
    try:
        snapshot = BucketLeaseStore(context.google, bucket, pod).read()
    except ForbiddenError:
        hidden.append(f"gs://{bucket}")
        return False
    return (
        snapshot is not None
        and snapshot.record.run_id == run_id
        and snapshot.record.driver == "bastion"
        and not snapshot.is_free(False)
    )


def _network(context: Context, in_use: set[str]) -> Iterator[BilledItem]:
    """Yield reserved addresses and NATs; both serve a region."""
    table = load_prices()
    idle, used = table["external_ip"]["usd_per_hour_unused"], table["external_ip"]["usd_per_hour"]

    def ours(item: dict[str, Any]) -> bool:
        return is_marked(item) or is_labelled(item)

    for place, item in _list_managed(context, "addresses", ours):
        busy = bool(item.get("users")) and place in in_use
        use = "a pod exists in its region" if busy else ""
        yield BilledItem(
            "address", item["name"], place, used if item.get("users") else idle, use, "reserved but unused"
        )
    for place, item in _list_managed(context, "routers", ours):
        usd = table["nat"]["usd_per_vm_hour"] + used if item.get("nats") else 0.0
        use = "a pod exists in its region" if place in in_use else ""
        yield BilledItem("router", item["name"], place, usd, use, "no pod in its region" if usd else "has no NAT")


def _list_managed(
    context: Context, collection: str, ours: Callable[[dict[str, Any]], bool]
) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        for place, item in aggregated(context, collection):
            if ours(item):
                yield place, item
    except ServiceDisabledError:
        return


def _price(accelerator_type: str, zone: str, capacity: str) -> float | None:
    try:
        return find_topology(accelerator_type).usd_per_hour(zone, spot=capacity in SPOT_TIERS)
    except UnknownTypeError:
        return None


@dataclass(frozen=True)
class PodOverview:
    """A pod, or a queued request without a node yet.

    Attributes:
        run: the latest run on it; empty if none is known.
        activity: what the pod is used for, or why nothing uses it.
        controller: the controller that holds its lease; empty if none does.
        checkpoint: step of the run's newest checkpoint.
        checkpoint_age: seconds since that checkpoint was written.
        usd_per_hour: list price; None if unknown.
        alerts: names of the alerts of the run that last.
    """

    pod: str
    zone: str
    accelerator_type: str
    state: str
    run: str
    activity: str
    controller: str
    checkpoint: int | None
    checkpoint_age: float | None
    usd_per_hour: float | None
    alerts: tuple[str, ...] = ()


def project_pods(context: Context, buckets: Sequence[str], billed: Sequence[BilledItem]) -> list[PodOverview]:
    """Return every pod and queued request of Slipway in the project; those in use come first.

    Args:
        buckets: buckets with records of runs.
        billed: everything that `billed_items` found.
    """
    items = {(item.place, item.name): item for item in billed if "TPU" in item.kind}
    found = []
    for status in project_slices(context):
        zone, name = status.place.zone, status.name
        item = items.pop((zone, name), None) if status.uid else None
        if item is None:
            continue  # a request without a node, or it was deleted in between
        bucket, run = _claim(context, buckets, name, status.uid)
        step, age = _checkpoint(context, bucket, run) if run else (None, None)
        holder = _controller(context, bucket, name) if run else ""
        about = (status.spec.accelerator_type, _state(status), run, item.use or item.why, holder)
        alerts = _alerts(context, bucket, run) if holder else ()
        found.append(PodOverview(name, zone, *about, step, age, item.usd_per_hour, alerts))
    for (zone, name), item in items.items():
        found.append(PodOverview(name, zone, "", "queued", "", item.use or item.why, "", None, None, item.usd_per_hour))
    return sorted(found, key=lambda pod: (not pod.controller, not pod.run, pod.pod))


def _state(status: SliceStatus) -> str:
    """Describe state, health and announced maintenance."""
    unhealthy = status.health.lower().replace("_", " ") if status.health not in ("", "HEALTHY") else ""
    maintenance = f"maintenance {status.maintenance.lower()}" if status.maintenance else ""
    return ", ".join(filter(None, [status.state.lower(), unhealthy, maintenance]))


def _claim(context: Context, buckets: Sequence[str], pod: str, uid: str) -> tuple[str, str]:
    """Return the bucket and the id of the latest run on the pod; empty if no readable bucket has one."""
    for bucket in buckets:
        try:
            if claim := read_claim(context.google, bucket, pod, uid):
                return bucket, claim["latest"]
        except (ForbiddenError, NotFoundError, UnreadableError):  # `use` of the billed item says so
            continue
    return "", ""


def _controller(context: Context, bucket: str, pod: str) -> str:
    snapshot = BucketLeaseStore(context.google, bucket, pod).read()
    return "" if snapshot is None or snapshot.is_free(False) else f"{snapshot.record.holder} ({snapshot.record.driver})"


def _alerts(context: Context, bucket: str, run: str) -> tuple[str, ...]:
    """Return the alerts that last; without a controller nobody knows whether they do."""
    return tuple(alert.name for alert in read_alerts(Ledger(context.google, bucket, run)).active)


def _checkpoint(context: Context, bucket: str, run: str) -> tuple[int | None, float | None]:
    """Return the step of the run's newest checkpoint and its age in seconds."""
    ledger = Ledger(context.google, bucket, run)
    newest = max(ledger.checkpoints(), default=None)
    if newest is None:
        return None, None
    written = ledger.checkpoint_time(newest)
    return newest, None if written is None else max(0.0, context.clock.now() - written)
