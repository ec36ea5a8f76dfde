"""The config as one frozen schema: types, bounds, descriptions. Values live in YAML, error reports in validation.py."""

import hashlib
import json
from typing import Annotated, Any

from conf.schema.base import VOLATILE, Strict, without_volatile
from conf.schema.infra.assets import Assets
from conf.schema.infra.cloud import Budget, Cloud
from conf.schema.infra.network import Network
from conf.schema.infra.topology import Topology, find_topology, zone_region
from conf.schema.infra.tpu import Tpu
from conf.schema.run.lifecycle import Cleanup, Recovery, Run, Ssh
from conf.schema.run.program import Code, Env, Program
from conf.schema.run.sweep import Sweep
from conf.schema.training.data import Data
from conf.schema.training.loop import Loop
from conf.schema.training.model import Model
from conf.schema.training.optimizer import Optimizer
from conf.schema.training.settings import CheckpointSettings, Logging, Mesh


class Config(Strict):
    """One experiment, resolved."""

    cloud: Annotated[Cloud, VOLATILE]
    tpu: Tpu
    network: Annotated[Network, VOLATILE]
    assets: Assets
    program: Program
    data: Data | None = None  # the four groups of the trainer are absent with program=command
    model: Model | None = None
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
    budget: Annotated[Budget, VOLATILE]
    sweep: Annotated[Sweep, VOLATILE]

    @property
    def topology(self) -> Topology:
        return find_topology(self.tpu.accelerator_type)

    @property
    def region(self) -> str:
        return zone_region(self.tpu.zone)

    @property
    def regions(self) -> tuple[str, ...]:
        """Every region that the pod may be in, the wanted one first."""
        return tuple(dict.fromkeys(zone_region(zone) for zone in self.tpu.all_zones))

    @property
    def pod_name(self) -> str:
        """Derives from cloud, tpu and network alone: every run with the same three shares one warm pod."""
        if self.tpu.name:
            return self.tpu.name
        lasting = {"faults", "operation_seconds", "port", "trc", "billing_budget"}  # these do not say where the pod is
        lasting |= {"driver_service_account", "driver_roles", "driver_machine"}
        identity = {
            "cloud": self.cloud.model_dump(mode="json", exclude=lasting),
            "tpu": self.tpu.model_dump(mode="json", exclude={"create_timeout_minutes", "valid_until_hours"}),
            "network": self.network.model_dump(mode="json", exclude={"laptop", "open_to_world"}),
        }
        return f"slipway-{self.tpu.accelerator_type}-{digest(identity)[:6]}"

    def run_id(self, code_sha256: str, data_sha256: dict[str, str]) -> str:
        """`<run.name>-<8 hex>`: the same config, code and data give the same id on every host."""
        return f"{self.run.name}-{digest([without_volatile(self), code_sha256, data_sha256])[:8]}"


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`, in hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
