"""A short-lived VM near the bucket fetches or makes an asset, which so does not pass through this machine."""

import base64
import json
import re
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol, Self

from conf.schema.config import Config, digest
from controller.agent.protocol import FetchLine
from controller.context import Context, Progress
from controller.core.errors import CloudError
from controller.core.json_documents import dump, stamped, type_problem
from controller.gcp.google_errors import GoogleError, NotFoundError
from controller.inputs.download import TokenNeededError
from controller.inputs.resolved_assets import ResolvedAsset
from controller.reconcile import Absent, Diff, ObservedResources, Pending, Scope
from controller.resources.accounts import ServiceAccount
from controller.resources.bastion_vm import SmallVm
from controller.resources.uploads.bucket_assets import AssetInBucket
from controller.ssh.agent_link import build_bundle

ASSET_LABEL, HASH_LABEL = "slipway-asset", "slipway-asset-hash"
BYTES_PER_SECOND = 50e6
"""From the Hub through two cores to the bucket; assumed, not measured."""
BOOT_SECONDS = 120.0
"""Until the first byte; assumed, not measured."""
BUILD_SETUP_SECONDS = 300.0
"""Until a build begins: boot, and the packages of the program; assumed, not measured."""
MIN_SECONDS, MIN_BUILD_SECONDS = 3600.0, 12 * 3600.0
SYSTEM_GB = 10
"""Disk besides the files under way: the image's."""
FILES_AT_ONCE = 4
"""As many as the agent's."""


@dataclass(frozen=True, kw_only=True)
class FetchVm(SmallVm):
    """Copies what an object of the bucket orders. It has no secret: the order's addresses need no token.

    Whoever waits for it deletes it. If nobody does, Compute Engine deletes it when its time is up.
    """

    kind: ClassVar[str] = "fetch VM"
    scope: ClassVar[Scope] = "pod"
    bucket: str = field(compare=False)
    orders_object: str = field(compare=False)
    """Object with the request of the agent: what to copy, and from where."""
    bytes_at_once: int = field(default=0, compare=False)

    def metadata(self) -> dict[str, str]:
        orders = {
            "agent": base64.b64encode(zlib.compress(build_bundle().content, 9)).decode(),
            "request": stamped({"bucket": self.bucket, "orders": self.orders_object}),
        }
        script = Path(__file__).with_name("fetch_boot.py").read_text()
        return {"startup-script": script, "slipway": dump(orders)}

    def disk_parameters(self, context: Context) -> dict[str, str]:
        gigabytes = SYSTEM_GB + round(1.1 * self.bytes_at_once / 1e9)
        kind = (
            f"projects/{context.project}/zones/{self.zone}/diskTypes/pd-balanced"  # pd-standard writes 1 MB/s per 10 GB
        )
        return {"diskSizeGb": str(gigabytes), "diskType": kind}

    def for_files(self, sizes: list[int], at_once: int) -> Self:
        """Return the VM with time and disk for files of these sizes, so many of them at once."""
        most = sum(sorted(sizes, reverse=True)[:at_once])
        seconds = max(self.max_seconds or 0.0, 4 * fetch_seconds(sum(sizes)))
        return replace(self, max_seconds=seconds, bytes_at_once=most)


def fetch_vm(config: Config, bucket: str, content: ResolvedAsset) -> FetchVm:
    """Return the VM for an asset, in the zone of the pod and with the rights of its workers."""
    return FetchVm(
        name=f"slipway-fetch-{digest([bucket, content.prefix])[:12]}",
        zone=config.tpu.zone,
        machine_type=fetch_machine(config),
        network=config.network.name,
        subnetwork=config.network.subnet_name(config.region),
        external_ip=not config.network.nat,
        account=ServiceAccount(name=config.cloud.service_account),
        bucket=bucket,
        orders_object=f"{content.prefix}/fetch.json",
        labels={ASSET_LABEL: content.name, HASH_LABEL: content.prefix.rpartition("-")[2]},
        max_seconds=MIN_SECONDS if content.recipe is None else MIN_BUILD_SECONDS,
    )


def fetch_machine(config: Config) -> str:
    """Return the machine type: two cores; us-central2 has no E2 machines."""
    return "n1-standard-2" if config.region == "us-central2" else "e2-standard-2"


def fetch_seconds(size: int) -> float:
    """Return how long a VM takes for so many bytes, as assumed."""
    return BOOT_SECONDS + size / BYTES_PER_SECOND


LARGE_BYTES = 10**9
"""From this size on, `assets.fetch_on=auto` takes a VM; less is through this machine before a VM has started."""
REFRESH_SECONDS = 1200.0
"""Age at which addresses are replaced; the Hub signs them for an hour."""
START_SECONDS = 1200.0
"""Until a VM must have said something: the roles of a new account take up to seven minutes."""
MAX_MACHINES = 3
MAX_ERRORS = 5
"""Failed tries of a VM in a row, without a byte more."""
TAIL_LINES = 10
SAID = re.compile(r'\{"format": \d+, "(?:bytes|error|done)".*\}')
"""What the agent prints, in a line of the serial port."""


class _Said(FetchLine, total=False):
    error: str
    final: bool


class Errand(Protocol):
    """What a VM is to do for an asset, beside what this machine does itself."""

    @property
    def size(self) -> int:
        """Bytes to fetch, as far as they are known."""
        ...

    def prepare(self) -> list[int] | None:
        """Do this machine's part; return the sizes of the files that are left for the VM, None if nothing is left."""
        ...

    def orders(self) -> Mapping[str, Any]:
        """Return the request for the agent, with addresses that are valid for some time."""
        ...

    def finish(self) -> None:
        """Forget what is not needed once everything has arrived."""
        ...


@dataclass(frozen=True, kw_only=True)
class NearbyAsset(AssetInBucket):
    """An asset for which a VM goes: `always`, or only if it is large and Google lets us have a VM."""

    kind: ClassVar[str] = "asset"
    scope: ClassVar[Scope] = "shared"
    machine: FetchVm = field(compare=False)
    always: bool = field(compare=False)

    @abstractmethod
    def errand(self, context: Context, observed: ObservedResources, progress: Progress) -> Errand:
        """Return what a VM has to do. Raises TokenNeededError if it cannot, for want of a token."""

    @abstractmethod
    def fetch_here(self, context: Context) -> None:
        """Let this machine do everything."""

    def is_here(self) -> bool:
        """Whether this machine has everything already."""
        return False

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        self.delete_replaced(context)
        if self.is_here():
            self.fetch_here(context)
            return
        progress = Progress(context, self.id)
        try:
            errand = self.errand(context, observed, progress)
            if self.always or errand.size >= LARGE_BYTES:
                progress.expect(errand.size)
                _Fetch(self, context, errand, progress).run()
                return
        except (NoMachineError, TokenNeededError) as error:
            if self.always:
                raise CloudError(f"{error}; {self.remedy}") from None
            context.events.note(self.id, f"{error}; this machine fetches it")
        self.fetch_here(context)

    @property
    def remedy(self) -> str:
        """What to set so that this machine does without a VM."""
        return f"assets.{self.content.path}.fetch_on=laptop fetches it through this machine"


class NoMachineError(CloudError):
    """Google refuses a VM."""


@dataclass
class _Fetch:
    """One fetch by a VM, waited for. The VM is deleted at the end, whatever that is."""

    asset: NearbyAsset
    context: Context
    errand: Errand
    progress: Progress
    moved: int = 0
    """Bytes that the present VM has told of."""
    machines: int = 0
    may_exist: bool = False
    """Whether there may be a VM to delete; false where we may not even look."""

    def run(self) -> None:
        """Let the VM do its part.

        Raises:
            SourceError: the Hub or a server refuses a file.
            CloudError: the VM does not get on.
        """
        sizes = self.errand.prepare()
        if sizes is None:
            return
        machine = self.asset.machine.for_files(sizes, FILES_AT_ONCE)
        try:
            self._let_fetch(machine)
            self.errand.finish()
        finally:
            if self.may_exist:
                machine.destroy(self.context)
            self._forget_orders(machine)

    def _let_fetch(self, machine: FetchVm) -> None:
        clock, old_at, silent_at = self.context.clock, float("-inf"), float("inf")
        old_lines: int | None = None
        while isinstance(self.asset.observe(self.context, {}), Absent):
            if clock.monotonic() >= old_at:
                body = json.dumps(stamped({**self.errand.orders()})).encode()
                self.context.google.upload(self.asset.bucket, machine.orders_object, body)
                old_at = clock.monotonic() + REFRESH_SECONDS
            is_new = self._ensure(machine)
            serial = machine.serial_output(self.context)
            said = list(_lines_of_agent(serial))
            if is_new or old_lines is None:  # what a VM said to an earlier controller is not about these orders
                old_lines, self.moved = 0 if is_new else len(said), 0
                silent_at = clock.monotonic() + START_SECONDS
            self._follow(machine, said[old_lines:])
            if not said and clock.monotonic() >= silent_at:
                tail = "\n".join(serial.splitlines()[-TAIL_LINES:])
                self._give_up(machine, f"fetches nothing after {START_SECONDS / 60:.0f} minutes:\n{tail}\n")
            clock.sleep(self.context.poll_seconds)

    def _forget_orders(self, machine: FetchVm) -> None:
        try:
            self.context.google.call(
                "storage", "objects.delete", bucket=self.asset.bucket, object=machine.orders_object
            )
        except NotFoundError:
            return

    def _ensure(self, machine: FetchVm) -> bool:
        """Return whether the VM had to be created.

        Raises:
            NoMachineError: Google refuses it.
            CloudError: it ended too often, or is somebody else's.
        """
        try:
            current = machine.observe(self.context, {})
            self.may_exist = True
            if isinstance(current, FetchVm) and not current.is_managed:
                raise CloudError(f"{machine.title} was not created by Slipway; delete or rename it")
            if isinstance(current, Pending) or current == machine:
                return False
            self.machines += 1
            if self.machines > MAX_MACHINES:
                self._give_up(machine, f"ended {MAX_MACHINES} times before its files had arrived")
            machine.apply(self.context, {}, machine.diff(current))
        except GoogleError as error:
            raise NoMachineError(f"Google refuses {machine.title}: {error.message}") from None
        return True

    def _follow(self, machine: FetchVm, said: list[dict[str, Any]]) -> None:
        """Show how far the VM is; give up if it fails again and again."""
        total = before = 0
        errors = list[str]()
        for line in said:
            if line.get("final"):
                raise CloudError(f"{self.asset.title}: {line['error']}")
            if "error" in line:
                errors.append(line["error"])
                before = 0  # the next try counts from zero
            elif "bytes" in line:
                total, before = total + line["bytes"] - before, line["bytes"]
                errors.clear()
        self.progress.advance(total - self.moved)
        self.moved = total
        if len(errors) >= MAX_ERRORS:
            self._give_up(machine, f"failed {len(errors)} times in a row: {errors[-1]}")

    def _give_up(self, machine: FetchVm, why: str) -> NoReturn:
        raise CloudError(f"{self.asset.title}: {machine.title} {why}; {self.asset.remedy}")


def _lines_of_agent(serial: str) -> Iterator[dict[str, Any]]:
    """Yield what the agent printed among the lines of a serial port."""
    for found in SAID.finditer(serial):
        with suppress(ValueError, RecursionError):  # cut, or mixed with a line of the system
            line = json.loads(found[0])
            if not type_problem(line, _Said):
                yield line
