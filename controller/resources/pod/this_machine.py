"""The machine of `cloud=here` in place of a pod: always there, never created, changed or deleted."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Self

from controller.agent.process import boot_id
from controller.context import Context
from controller.core.text import plural
from controller.reconcile.resource import Absent, Diff, ObservedResources
from controller.resources.pod.node import Node
from controller.resources.pod.provisioner import Endpoint, PodStatus, SliceStatus
from controller.ssh.fleet import SshTarget

NOUNS = {"cpu": "virtual CPU device", "gpu": "GPU", "tpu": "TPU device"}


@dataclass(frozen=True, kw_only=True)
class ThisMachine(Node):
    """This machine since its last boot, as a pod of one worker that is READY."""

    @property
    def title(self) -> str:
        backend, _, devices = self.spec.accelerator_type.rpartition("-")
        return f"this machine: {plural(int(devices), NOUNS[backend])}"

    def observe(self, context: Context, observed: ObservedResources) -> Self:
        return self.find(context)

    def find(self, context: Context, uids: Collection[str] = ()) -> Self:
        return replace(self, status=self._status())

    def _status(self) -> SliceStatus:
        return SliceStatus(
            spec=self.spec,
            place=self.places[0],
            state="READY",
            uid=boot_id(),
            endpoints=(Endpoint(0, "127.0.0.1", None),),
        )

    def diff(self, current: Any) -> Diff:
        return Diff("create") if isinstance(current, Absent) else Diff("none")

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        raise AssertionError("this machine never differs")

    def pod_seen(self, context: Context, since: float = 0.0) -> PodStatus:
        return self._status().pod_seen(self.status.uid, since)

    def may_be(self, status: SliceStatus) -> bool:
        return False

    def ssh_target(self, context: Context) -> SshTarget:
        return SshTarget(self.name, self.vms(context), self.status.uid, "", "", (), (("127.0.0.1", None),))

    def accepts_our_key(self, context: Context) -> bool:
        return True

    def destroy(self, context: Context) -> None:
        return

    def delete_all(self, context: Context, *, elsewhere: bool = False) -> None:
        return

    @property
    def cannot_stop(self) -> str:
        return "cloud=here: Slipway does not stop the machine that it runs on"
