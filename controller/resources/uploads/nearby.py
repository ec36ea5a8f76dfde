"""Large assets of the Hugging Face Hub, copied by a short-lived VM near the bucket instead of through this machine."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn

from controller.agent.protocol import FetchAssetRequest
from controller.context import Context
from controller.core.errors import CloudError
from controller.core.formats import stamped
from controller.gcp.errors import GoogleError, NotFoundError
from controller.inputs.hub import SourceFile
from controller.progress import Progress
from controller.reconcile.resource import Absent, Diff, ObservedResources, Pending
from controller.resources.uploads.fetch_vm import FetchVm
from controller.resources.uploads.sources import (
    THREADS,
    PinnedSource,
    SourceCopy,
    SourcedAsset,
    manifest_of,
    source_copy,
)

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


@dataclass(frozen=True, kw_only=True)
class NearbySource(SourcedAsset):
    """An asset that a VM copies: `always`, or only if it is large and Google lets us have a VM."""

    machine: FetchVm = field(compare=False)
    always: bool = field(compare=False)

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        copy = source_copy(self, context)
        pinned = copy.pin()
        progress = Progress(context, self.id, sum(file.size for file in pinned.source_files()))
        if self.always or is_large(pinned.source_files()):
            try:
                _Fetch(self, context, copy, progress).run(pinned)
                return
            except _NoMachineError as error:
                if self.always:
                    raise CloudError(f"{error}; assets.fetch_on=laptop fetches it through this machine") from None
                context.events.note(self.id, f"{error}; this machine fetches it")
        copy.run(pinned, progress.advance)


def is_large(files: list[SourceFile]) -> bool:
    return sum(file.size for file in files) >= LARGE_BYTES


class _NoMachineError(CloudError):
    """Google refuses a VM."""


@dataclass
class _Fetch:
    """One fetch by a VM, waited for. The VM is deleted at the end, whatever that is."""

    asset: NearbySource
    context: Context
    copy: SourceCopy
    progress: Progress
    moved: int = 0
    """Bytes that the present VM has told of."""
    machines: int = 0
    may_exist: bool = False
    """Whether there may be a VM to delete; false where we may not even look."""

    def run(self, pinned: PinnedSource) -> None:
        """Copy all files and the manifest.

        Raises:
            SourceError: the Hub refuses a file.
            CloudError: the VM does not get on.
        """
        # This machine has the token, and the Hub sends small files itself: what it sends from its storage is the rest.
        hashes, left = self.copy.run_small(pinned, self.progress.advance)
        if left:
            machine = self.asset.machine.for_files([file.size for file in left], THREADS)
            try:
                self._let_fetch(machine, pinned, hashes, left)
                self.copy.forget_hashes()
            finally:
                if self.may_exist:
                    machine.destroy(self.context)
                self._forget_orders(machine)
        else:  # a process was killed right before the end
            self.copy.run(pinned, self.progress.advance)

    def _let_fetch(
        self, machine: FetchVm, pinned: PinnedSource, hashes: dict[str, str], left: list[SourceFile]
    ) -> None:
        clock, old_at, silent_at = self.context.clock, float("-inf"), float("inf")
        old_lines: int | None = None
        while not self._has_arrived():
            if clock.monotonic() >= old_at:
                self._write_orders(machine, pinned, hashes, left)
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

    def _has_arrived(self) -> bool:
        return not isinstance(self.asset.observe(self.context, {}), Absent)

    def _write_orders(
        self, machine: FetchVm, pinned: PinnedSource, hashes: dict[str, str], left: list[SourceFile]
    ) -> None:
        """Write what the VM is to fetch, with addresses that are valid for some time, beside the asset's files."""
        with ThreadPoolExecutor(max_workers=THREADS) as pool:
            addresses = list(pool.map(lambda file: self.copy.signed_address(pinned.revision, file), left))
        files = {f.name: {"url": url, "sha256": f.sha256 or ""} for f, url in zip(left, addresses, strict=True)}
        everything = {**hashes, **{name: file["sha256"] for name, file in files.items()}}
        request: FetchAssetRequest = {
            "bucket": self.copy.bucket,
            "prefix": self.copy.prefix,
            "files": files,
            "manifest": manifest_of(everything),
        }
        body = json.dumps(stamped({**request})).encode()
        self.context.google.upload(self.copy.bucket, machine.orders_object, body)

    def _forget_orders(self, machine: FetchVm) -> None:
        try:
            self.context.google.call("storage", "objects.delete", bucket=self.copy.bucket, object=machine.orders_object)
        except NotFoundError:
            return

    def _ensure(self, machine: FetchVm) -> bool:
        """Return whether the VM had to be created.

        Raises:
            _NoMachineError: Google refuses it.
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
            raise _NoMachineError(f"Google refuses {machine.title}: {error.message}") from None
        return True

    def _follow(self, machine: FetchVm, said: list[dict[str, Any]]) -> None:
        """Show how far the VM is; give up if it fails again and again."""
        total = before = 0
        errors = list[str]()
        for line in said:
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
        raise CloudError(
            f"{self.asset.title}: {machine.title} {why}; assets.fetch_on=laptop fetches it through this machine"
        )


def _lines_of_agent(serial: str) -> Iterator[dict[str, Any]]:
    """Yield what the agent printed among the lines of a serial port."""
    for found in SAID.finditer(serial):
        try:
            yield json.loads(found[0])
        except ValueError:
            continue  # cut, or mixed with a line of the system
