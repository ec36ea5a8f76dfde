"""The lease that a verb works under: who asks, how often it is renewed, and that every act of this process minds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from controller.context import Context
from controller.lease.lease import Lease
from controller.lease.store import BucketLeaseStore, Identity
from controller.plan.build import Plan

RENEW_SECONDS = 10.0
"""How soon a holder learns at the latest that it is asked to let go."""
LOCAL_RENEW_SECONDS = 1.0


def pod_lease(plan: Plan, world: Context, driver: str = "laptop") -> Lease:
    """The lease of the plan's pod, which nobody has taken yet."""
    return Lease(
        BucketLeaseStore(world.google, plan.bucket, plan.node.name),
        world.clock,
        Identity(driver, plan.run_id),
        plan.config.recovery.lease_duration_seconds,
        RENEW_SECONDS if world.billed else LOCAL_RENEW_SECONDS,
        world.clock.interrupt,
    )


def sweep_lease(world: Context, bucket: str, sweep_id: str, seconds: float) -> Lease:
    """The lease of a sweep, which nobody has taken yet: who has it gives the runs to the pods.

    Args:
        seconds: the term.
    """
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
    """While this lasts every act on the pod takes the lease, or makes sure of it; at its end it is let go."""
    world.lease_path = f"{plan.bucket}/{plan.node.name}"
    world.before_pod_write = world.google.before_pod_write = lease.hold
    try:
        with lease.kept():
            yield
    finally:
        world.before_pod_write = world.google.before_pod_write = lambda: 0
