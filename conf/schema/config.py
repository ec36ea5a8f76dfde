"""The config as one frozen schema, whose values live in YAML."""

import hashlib
import json
from typing import Annotated, Any

from conf.schema.assets import Assets
from conf.schema.base import VOLATILE, Strict, without_volatile
from conf.schema.cloud import Budget, Cloud, HereCloud, Network
from conf.schema.program import Code, Env, Program
from conf.schema.run_sections import Cleanup, Notify, Recovery, Run, RunAlerts, Ssh, Sweep
from conf.schema.topology import Topology, Tpu, find_topology, this_machine, zone_region
from conf.schema.training.data import Data
from conf.schema.training.loop import Loop
from conf.schema.training.model import AnyModel
from conf.schema.training.optimizer import Optimizer
from conf.schema.training.settings import CheckpointSettings, Logging, Mesh


class Config(Strict):
    """Resolved config of one experiment."""

    cloud: Annotated[Cloud, VOLATILE]
    tpu: Tpu
    network: Annotated[Network, VOLATILE]
    assets: Assets
    program: Program
    data: Data | None = None  # program=command has none of these four
    model: AnyModel | None = None
    loop: Loop | None = None
    optimizer: Optimizer | None = None
    mesh: Mesh
    run: Run
    code: Code
    env: Env
    ssh: Annotated[Ssh, VOLATILE]
    checkpoint: CheckpointSettings
    logging: Logging
    recovery: Annotated[Recovery, VOLATILE]
    cleanup: Annotated[Cleanup, VOLATILE]
    alerts: Annotated[RunAlerts, VOLATILE]
    notify: Annotated[Notify, VOLATILE]
    budget: Annotated[Budget, VOLATILE]
    sweep: Annotated[Sweep, VOLATILE]

    @property
    def secret_sources(self) -> dict[str, str | None]:
        """Sources of every secret: the program's, and the address of the webhook."""
        return dict(self.env.secrets) | {"notify.webhook": self.notify.webhook}

    @property
    def topology(self) -> Topology:
        if isinstance(self.cloud, HereCloud):
            return this_machine(self.cloud.backend, len(self.cloud.indices))
        return find_topology(self.tpu.accelerator_type, self.tpu.machine_type)

    @property
    def region(self) -> str:
        return zone_region(self.tpu.zone)

    @property
    def regions(self) -> tuple[str, ...]:
        """Regions where the pod may be, the preferred one first."""
        return tuple(dict.fromkeys(zone_region(zone) for zone in self.tpu.all_zones))

    @property
    def external_ip(self) -> bool:
        """Whether workers have external addresses: they count against a quota of 4 to 8 per region in new projects."""
        if self.tpu.external_ip is not None:
            return self.tpu.external_ip
        direct = self.ssh.method == "external" or self.network.laptop is not None
        return self.tpu.adopt or direct or not self.network.nat

    @property
    def bastion_machine(self) -> str:
        """Machine type of the bastion; us-central2 has no E2 machines."""
        return self.cloud.driver_machine or ("g1-small" if self.region == "us-central2" else "e2-small")

    @property
    def pod_name(self) -> str:
        """Name derived from cloud, tpu and network only, so that runs with equal ones share a warm pod."""
        if isinstance(self.cloud, HereCloud):
            return self.cloud.pod_name
        if self.tpu.name:
            return self.tpu.name
        # These do not identify the pod.
        lasting = {"faults", "operation_seconds", "caller_roles", "realism", "quotas", "port", "trc", "billing_budget"}
        lasting |= {"driver_service_account", "driver_roles", "driver_machine", "health_check"}
        ways = {"plane", "machine_type", "boot_disk_gb", "max_run_hours"}
        tpu = self.tpu.model_dump(mode="json", exclude={"create_timeout_minutes", "valid_until_hours"} | ways)
        if plane := self.tpu.plane_of_name:
            own = self.tpu.model_dump(mode="json", include={"machine_type", "boot_disk_gb"})
            tpu |= {"plane": plane, **own}
        identity = {
            "cloud": self.cloud.model_dump(mode="json", exclude=lasting),
            "tpu": tpu | {"external_ip": self.external_ip},
            "network": self.network.model_dump(mode="json", exclude={"laptop", "open_to_world"}),
        }
        return f"slipway-{self.tpu.accelerator_type}-{digest(identity)[:6]}"

    def run_id(self, code_sha256: str, data_sha256: dict[str, str]) -> str:
        """Return `<run.name>-<8 hex>`. Equal config, code and data give the same ID on every host."""
        return f"{self.run.name}-{digest([without_volatile(self), code_sha256, data_sha256])[:8]}"


def digest(value: Any) -> str:
    """Return the hex SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
