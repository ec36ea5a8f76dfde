"""Every pod of the project at a glance: its state, the run on it, that run's newest checkpoint, and the price."""

from collections.abc import Sequence
from dataclasses import dataclass

from controller.alerts.alert import read_alerts
from controller.cleanup.orphans import BilledItem
from controller.context import Context
from controller.core.formats import DamagedRecordError
from controller.gcp.errors import ForbiddenError, NotFoundError
from controller.lease.store import BucketLeaseStore
from controller.records.ledger import Ledger
from controller.records.spending import read_claim
from controller.resources.pod.planes import project_slices
from controller.resources.pod.provisioner import SliceStatus


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
        except (ForbiddenError, NotFoundError, DamagedRecordError):  # `use` of the billed item says so
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
