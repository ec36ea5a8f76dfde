"""The laptop's part: put down what the bastion needs to know, make the bastion, and wait until it acts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from controller.context import Context
from controller.core.errors import CloudError
from controller.core.formats import dump
from controller.lease.lease import Lease
from controller.lease.store import LeaseSnapshot
from controller.plan.build import Plan
from controller.reconcile.reconciler import reconcile
from controller.reconcile.resource import Absent, Resource
from controller.records.ledger import Ledger
from controller.resources.bastion.vm import Bastion, BastionRoles, SlipwayPackage
from controller.resources.pod.node import Node
from controller.resources.workers.base import WorkerResource

if TYPE_CHECKING:
    from controller.cloud.emulator import Emulator

HANDOVER, LOG = "handover.json", "bastion.log"
HOME = "~/.slipway"
START_TIMEOUT_SECONDS = 1200.0
"""How long a bastion may take until it acts: a boot, and the installation of some packages on a small machine."""
TAIL_LINES = 20


@dataclass(frozen=True)
class Handover:
    """From this machine to the bastion of the plan."""

    plan: Plan
    world: Context
    ledger: Ledger
    lease: Lease
    emulator: Emulator | None
    poll_seconds: float

    def make(self, document: Callable[[], dict[str, Any]]) -> int:
        """Make everything but the pod, and then the bastion; returns the token under which that was done.

        Args:
            document: gives what the bastion makes the plan again of; asked once there is a bucket.
        """
        first = [r for r in self.plan.resources if not isinstance(r, Node | WorkerResource | Bastion | BastionRoles)]
        reconcile(_without_outside_dependencies(first), self.world)
        before = self.lease.last()
        token = self.lease.hold()
        if before is not None and before.term.driver == "bastion" and not before.term.released:
            self.bastion.destroy(self.world)  # there may be a machine, and nobody acts there
        self.ledger.write(HANDOVER, dump(document()))
        machine = replace(self.bastion, orders=dump(self._orders()))
        roles = [r for r in self.plan.resources if isinstance(r, BastionRoles)]
        reconcile(_without_outside_dependencies([machine, *roles]), self.world)
        self.lease.release()
        return token

    def wait(self, token: int) -> LeaseSnapshot:
        """Until the bastion has taken the lease, or even let go of it again; what it says there.

        Raises:
            CloudError: it does not come to that; with what it has said.
        """
        late = self.world.clock.deadline(START_TIMEOUT_SECONDS)
        while (seen := self.lease.last()) is None or seen.term.token <= token:
            gone = isinstance(self.bastion.observe(self.world, {}), Absent)
            if gone or late():
                raise CloudError(
                    f"{self.bastion.title} {'has ended' if gone else 'does not begin'}:\n{self._log_tail()}"
                )
            self.world.clock.sleep(self.poll_seconds)
        return seen

    @property
    def bastion(self) -> Bastion:
        return self.plan.get(Bastion)

    def _log_tail(self) -> str:
        kept = self.ledger.read(LOG) or b""
        text = self.bastion.printed(self.world) or kept.decode(errors="replace")
        return "\n".join(text.splitlines()[-TAIL_LINES:])

    def _orders(self) -> dict[str, Any]:
        package = self.plan.get(SlipwayPackage)
        emulator = self.emulator
        return {
            "bucket": self.plan.bucket,
            "package": package.object,
            "sha256": package.snapshot.archive_sha256,
            "version": version("slipway"),
            "install": emulator is None,
            "handover": f"{self.ledger.prefix}/{HANDOVER}",
            "log": f"{self.ledger.prefix}/{LOG}",
            "instance": self.bastion.path(self.world.project),
            "home": HOME,
            "roots": {} if emulator is None else emulator.roots,
            "ssh_config": None if emulator is None else str(emulator.ssh_config),
            "iap": None if emulator is None else emulator.iap,
            "pace": self.world.pace,
        }


def _without_outside_dependencies(resources: Sequence[Resource]) -> list[Resource]:
    """With needs among themselves alone: the others are there."""
    ids = {r.id for r in resources}
    return [replace(r, needs=tuple(n for n in r.needs if n in ids)) for r in resources]
