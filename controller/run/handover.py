"""Hand a run over to a bastion: write its input, create the bastion, and wait until it acts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from controller.cloud.emulator import Emulator
from controller.context import Context
from controller.core.errors import CloudError
from controller.core.formats import dump
from controller.lease.lease import Lease
from controller.lease.store import LeaseSnapshot
from controller.plan.build import Plan
from controller.reconcile.reconciler import reconcile
from controller.reconcile.resource import Absent, Resource
from controller.records.ledger import Ledger
from controller.resources.bastion_vm import Bastion, BastionRoles, SlipwayPackage
from controller.resources.pod.node import Node
from controller.resources.workers.worker import WorkerResource

HANDOVER, LOG = "handover.json", "bastion.log"
HOME = "~/.slipway"
START_TIMEOUT_SECONDS = 1200.0
"""Maximum time until a bastion acts: a boot, and the installation of some packages on a small machine."""
TAIL_LINES = 20


@dataclass(frozen=True)
class Handover:
    """Handover of a run from this machine to the bastion of its plan."""

    plan: Plan
    context: Context
    ledger: Ledger
    lease: Lease
    emulator: Emulator | None
    poll_seconds: float

    def start_bastion(self, document: Callable[[], dict[str, Any]]) -> int:
        """Create everything except the pod, then the bastion; return the lease token used.

        `document` returns what the bastion rebuilds the plan from; called once the bucket exists.
        """
        first = [r for r in self.plan.resources if not isinstance(r, Node | WorkerResource | Bastion | BastionRoles)]
        reconcile(_without_outside_dependencies(first), self.context)
        before = self.lease.read()
        token = self.lease.ensure()
        if before is not None and before.record.driver == "bastion" and not before.record.released:
            self.bastion.destroy(self.context)  # the VM may exist although nothing acts there
        self.ledger.write(HANDOVER, dump(document()))
        machine = replace(self.bastion, orders=dump(self._orders()))
        roles = [r for r in self.plan.resources if isinstance(r, BastionRoles)]
        reconcile(_without_outside_dependencies([machine, *roles]), self.context)
        self.lease.release()
        return token

    def wait_for_lease(self, token: int) -> LeaseSnapshot:
        """Wait until the bastion has acquired the lease, or even released it again; return the lease.

        Raises:
            CloudError: the bastion ended or did not start in time; the message includes its log.
        """
        late = self.context.clock.deadline(START_TIMEOUT_SECONDS)
        while (snapshot := self.lease.read()) is None or snapshot.record.token <= token:
            gone = isinstance(self.bastion.observe(self.context, {}), Absent)
            if gone or late():
                raise CloudError(
                    f"{self.bastion.title} {'ended early' if gone else 'did not start in time'}:\n{self._log_tail()}"
                )
            self.context.clock.sleep(self.poll_seconds)
        return snapshot

    @property
    def bastion(self) -> Bastion:
        return self.plan.get(Bastion)

    def _log_tail(self) -> str:
        kept = self.ledger.read(LOG) or b""
        text = self.bastion.serial_output(self.context) or kept.decode(errors="replace")
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
            "instance": self.bastion.path(self.context.project),
            "home": HOME,
            "roots": {} if emulator is None else emulator.roots,
            "ssh_config": None if emulator is None else str(emulator.ssh_config),
            "iap": None if emulator is None else emulator.iap,
            "pace": self.context.poll_seconds,
        }


def _without_outside_dependencies(resources: Sequence[Resource]) -> list[Resource]:
    """Drop needs on resources outside the list: they exist already."""
    ids = {r.id for r in resources}
    return [replace(r, depends_on=tuple(n for n in r.depends_on if n in ids)) for r in resources]
