"""Leases that the commands work under: who holds them, how often they are renewed, and the guard before each write."""

from collections.abc import Iterator
from contextlib import contextmanager

from controller.context import Context
from controller.lease.lease import Lease
from controller.lease.store import BucketLeaseStore, Identity
from controller.plan.build import Plan

RENEW_SECONDS = 10.0
"""Interval of renewal: a holder notices a release request within this time."""
LOCAL_RENEW_SECONDS = 1.0


def pod_lease(plan: Plan, world: Context, driver: str = "laptop") -> Lease:
    """Return the lease of the plan's pod, not acquired yet."""
    return Lease(
        BucketLeaseStore(world.google, plan.bucket, plan.node.name),
        world.clock,
        Identity(driver, plan.run_id),
        plan.config.recovery.lease_duration_seconds,
        RENEW_SECONDS if world.billed else LOCAL_RENEW_SECONDS,
        world.clock.interrupt,
    )


def sweep_lease(world: Context, bucket: str, sweep_id: str, seconds: float) -> Lease:
    """Return the lease of a sweep, not acquired yet; its holder assigns runs to pods. `seconds` is the term."""
    return Lease(
        BucketLeaseStore(world.google, bucket, sweep_id, "sweeps"),
        world.clock,
        Identity("laptop", sweep_id),
        seconds,
        RENEW_SECONDS if world.billed else LOCAL_RENEW_SECONDS,
        lambda: None,
    )


@contextmanager
def lease_guard(lease: Lease, plan: Plan, world: Context) -> Iterator[None]:
    """Make every write to the pod acquire or confirm the lease while the context is open, then release the lease."""
    world.lease_path = f"{plan.bucket}/{plan.node.name}"
    world.before_pod_write = world.google.before_pod_write = lease.hold
    try:
        with lease.kept():
            yield
    finally:
        world.before_pod_write = world.google.before_pod_write = lambda: 0
