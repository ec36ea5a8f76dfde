"""The short-lived VM that copies an asset to the bucket, near which it is."""

import base64
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Self

from conf.schema.config import Config, digest
from controller.context import Context
from controller.core.formats import dump, stamped
from controller.inputs.assets import ResolvedAsset
from controller.reconcile.resource import Scope
from controller.resources.bastion.small_vm import SmallVm
from controller.resources.project.accounts import ServiceAccount
from controller.ssh.agent_bundle import build_bundle

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
    asset: str = field(compare=False)
    identity: str = field(compare=False)
    bytes_to_fetch: int = field(default=0, compare=False)
    bytes_at_once: int = field(default=0, compare=False)
    builds: bool = field(default=False, compare=False)

    @property
    def labels(self) -> dict[str, str]:
        return {ASSET_LABEL: self.asset, HASH_LABEL: self.identity}

    @property
    def orders_object(self) -> str:
        """Object with the request of the agent: what to copy, and from where."""
        return f"assets/{self.asset}-{self.identity}/fetch.json"

    @property
    def max_seconds(self) -> float:
        return max(MIN_BUILD_SECONDS if self.builds else MIN_SECONDS, 4 * fetch_seconds(self.bytes_to_fetch))

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
        return replace(self, bytes_to_fetch=sum(sizes), bytes_at_once=most)


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
        asset=content.name,
        identity=content.prefix.rpartition("-")[2],
        builds=content.recipe is not None,
    )


def fetch_machine(config: Config) -> str:
    """Return the machine type: two cores; us-central2 has no E2 machines."""
    return "n1-standard-2" if config.region == "us-central2" else "e2-standard-2"


def fetch_seconds(size: int) -> float:
    """Return how long a VM takes for so many bytes, as assumed."""
    return BOOT_SECONDS + size / BYTES_PER_SECOND
