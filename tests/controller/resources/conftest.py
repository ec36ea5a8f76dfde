"""The shared resources of a config, settled against an emulated cloud without a pod."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from google.oauth2.credentials import Credentials

from conf.schema.config import Config
from controller.config.run_yaml import bucket_name
from controller.gcp.client import GoogleClient
from controller.localcloud import lifecycle
from controller.plan.build import preview_resources
from controller.plan.project_steps import shared_resources
from controller.reconcile import Resource, reconcile
from tests.composed import config_of
from tests.controller.conftest import comparable_state, internal_errors
from tests.controller.localcloud.harness import EmulatedCloud
from tests.emulators import Emulators
from tests.fakes.clock import HurriedClock
from tests.fakes.context import make_context


@dataclass
class EmulatedProject:
    """A project of the emulated cloud, seen by one user; names carry `tag`, so that tests do not meet."""

    cloud: EmulatedCloud
    tag: str
    folder: Path
    notes: list[str] = field(default_factory=list)
    clock: HurriedClock = field(default_factory=HurriedClock)
    faults: int = 0
    network: str = ""
    """Of all pods of a module, which take longer to make a network each than all else; by default `tag`."""
    settled: set[tuple[str, ...]] = field(default_factory=set)
    """Zones and bucket locations of pods of this module whose network and account exist."""

    def __post_init__(self) -> None:
        endpoint = self.cloud.endpoint
        google = GoogleClient(Credentials(token=endpoint["token"]), self.clock, endpoint["roots"])
        self.context = make_context(google, self.folder, project="slipway-local", clock=self.clock, notes=self.notes)

    def config(self, *overrides: str) -> Config:
        zones = [o.removeprefix("zones=").split(",") for o in overrides if o.startswith("zones=")]
        overrides = tuple(o for o in overrides if not o.startswith("zones="))
        shared = self.network or self.tag
        names = [f"network.name={shared}", f"cloud.bucket={self.tag}-bucket", f"cloud.service_account={shared}-sa"]
        found = config_of("cloud=local", "program=command", *names, *overrides)
        tpu = found.tpu.model_copy(update={"fallback_zones": tuple(zones[0])}) if zones else found.tpu
        return found.model_copy(update={"tpu": tpu})

    def shared_resources(self, *overrides: str) -> list[Resource]:
        config = self.config(*overrides)
        return list(shared_resources(config, bucket_name(config, "slipway-local")))

    def create_shared(self, *overrides: str) -> dict[str, Any]:
        """What `up` does before it makes a pod."""
        return reconcile(self.shared_resources(*overrides), self.context)

    def create_for_pods(self, config: Config) -> None:
        """What `up` does before it makes a pod; of what another test of the module has settled only the bucket."""
        place = (config.tpu.zone, *config.tpu.fallback_zones, config.cloud.bucket_location or "")
        everything = list(shared_resources(config, bucket_name(config, "slipway-local")))
        if place in self.settled:
            everything = [replace(one, depends_on=()) for one in everything if one.kind == "bucket"]
        reconcile(everything, self.context)
        self.settled.add(place)

    def planned_actions(self, *overrides: str) -> dict[str, str]:
        """What `plan` says would be done, without what is right already."""
        rows = preview_resources(tuple(self.shared_resources(*overrides)), self.context)
        return {row.resource.id: row.action for row in rows if row.action != "none"}

    def state(self) -> dict[str, Any]:
        return comparable_state(self.cloud.call_ok("GET", "emulator/state"))

    def inject_fault(self, **spec: Any) -> None:
        self.faults += 1
        key = f"{self.tag}-{self.faults}"
        self.cloud.call_ok("POST", "emulator/faults", {"key": key, "faults": [spec]})


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory, emulators: Emulators) -> Iterator[EmulatedCloud]:
    made = EmulatedCloud(tmp_path_factory.mktemp("cloud") / "state")
    assert emulators.start(made.state, "--operation-seconds=0") == (0, "")
    made.establish()
    yield made
    mistakes = internal_errors(made.state)
    lifecycle.wipe(made.state)
    assert mistakes == []


@pytest.fixture(scope="module")
def settled(emulated: EmulatedCloud) -> set[tuple[str, ...]]:
    return set()


@pytest.fixture
def project(
    emulated: EmulatedCloud, settled: set[tuple[str, ...]], request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[EmulatedProject]:
    number = zlib.crc32(request.node.name.encode()) % 10**6
    made = EmulatedProject(emulated, f"t{number}", tmp_path, settled=settled)
    yield made
    made.context.close()
    emulated.call_ok("DELETE", "emulator/faults")  # other tests of the module share this cloud
