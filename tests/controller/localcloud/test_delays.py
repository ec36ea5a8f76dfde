"""The table of delays: the paces, what is drawn, and that each wait of the controller outlasts what it waits for."""

from pathlib import Path
from typing import Any

import pytest

from controller.agent.transfers import FRESH_VM_SECONDS
from controller.gcp.answers import OPERATION_SECONDS
from controller.gcp.client import PROPAGATION_SECONDS
from controller.localcloud.delays import DELAYS, FIELD_PACE, OTHER, operation_kind
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store
from controller.reconcile import BUSY_SECONDS
from controller.resources import bastion_boot
from controller.resources.deletions import PROVISIONING_SECONDS
from controller.resources.services import Services
from controller.resources.vpc import IN_USE_SECONDS
from controller.run.standby import START_TIMEOUT_SECONDS
from controller.ssh.login import CONFLICT_SECONDS
from tests.composed import config_of


def settings(tmp_path: Path, **given: Any) -> Settings:
    return Settings(Store(tmp_path / "state.db"), **given)


@pytest.mark.parametrize("kind", DELAYS)
def test_a_delay_is_drawn_by_the_name_and_scaled_by_the_pace(tmp_path: Path, kind: str) -> None:
    row, field = DELAYS[kind], settings(tmp_path, operation_seconds=FIELD_PACE)
    drawn = [field.delay(kind, f"thing-{number}") for number in range(200)]
    assert row.least <= min(drawn) <= max(drawn) <= row.most <= row.worst
    assert row.least == row.most or len(set(drawn)) > 190
    assert drawn == [field.delay(kind, f"thing-{number}") for number in range(200)]
    field.update({"operation_seconds": 0.5})
    assert [60 * field.delay(kind, f"thing-{number}") for number in range(200)] == pytest.approx(drawn)
    field.update({"operation_seconds": 0})
    assert field.delay(kind, "thing") == 0.0


@pytest.mark.parametrize("kind", DELAYS)
def test_relaxed_nothing_lags_and_operations_take_as_long(tmp_path: Path, kind: str) -> None:
    relaxed = settings(tmp_path, operation_seconds=FIELD_PACE, realism="relaxed")
    assert relaxed.delay(kind, "x") == (0.0 if DELAYS[kind].is_lag else DELAYS[kind].seconds("x"))


@pytest.mark.parametrize("kind", DELAYS)
def test_what_is_not_guessed_names_its_source_with_a_date(kind: str) -> None:
    row = DELAYS[kind]
    assert row.how_sure == "guessed" or any(str(year) in row.source for year in range(2018, 2027)), row.source


@pytest.mark.parametrize(
    ("verb", "target", "kind"),
    [
        ("insert", "projects/p/global/networks/n", "insert networks"),
        ("delete", "projects/p/regions/r/subnetworks/s", "delete subnetworks"),
        ("patch", "projects/p/regions/r/routers/r", "patch routers"),
        ("delete", "projects/p/locations/z/nodes/n", "delete nodes"),
        ("enable", "services/tpu.googleapis.com,compute.googleapis.com", "enable services"),
        ("compute.instances.preempted", "projects/p/zones/z/instances/i", "compute.instances.preempted instances"),
        ("setMetadata", "projects/p", OTHER),
        ("insert", "projects/p/regions/r/instanceTemplates/t", OTHER),
        ("insert", "x", OTHER),
    ],
)
def test_an_operation_has_the_row_of_its_verb_and_collection(verb: str, target: str, kind: str) -> None:
    assert operation_kind(verb, target) == kind


CREATE_SECONDS, READY_SECONDS = 1800.0, 300.0
"""The defaults of `tpu.create_timeout_minutes` and `ssh.ready_timeout_seconds`."""
STARTING_SECONDS = Services(name="apis", apis=()).timeout
"""How long a resource may be pending that sets no time of its own, such as a bastion that starts."""
CHANGE, DELETE, ROLES = (
    (OPERATION_SECONDS, BUSY_SECONDS),
    (OPERATION_SECONDS,),
    (FRESH_VM_SECONDS, bastion_boot.FRESH_SECONDS),
)
WAITS: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(
        (f"{verb} {kind}" for verb in ("insert", "delete") for kind in ("networks", "subnetworks")), CHANGE
    ),
    **dict.fromkeys(("insert routers", "patch routers", "insert firewalls", "delete firewalls"), CHANGE),
    "insert instances": (OPERATION_SECONDS, STARTING_SECONDS),
    "delete instances": (OPERATION_SECONDS, *DELETE),
    "insert instanceGroupManagers": (CREATE_SECONDS,),
    "delete instanceGroupManagers": DELETE,
    "enable services": (OPERATION_SECONDS,),
    "create nodes": (CREATE_SECONDS, PROVISIONING_SECONDS),
    "create large nodes": (CREATE_SECONDS, PROVISIONING_SECONDS),
    "delete nodes": DELETE,
    "delete queuedResources": DELETE,
    "start nodes": (CREATE_SECONDS,),
    "stop nodes": (CREATE_SECONDS,),
    "compute.instances.preempted instances": DELETE,
    OTHER: (OPERATION_SECONDS, CREATE_SECONDS, CONFLICT_SECONDS),
    "suspension": DELETE,
    "staging": (CREATE_SECONDS,),
    "topology": (CREATE_SECONDS,),
    "maintenance": (CREATE_SECONDS,),
    "boot to SSH": (READY_SECONDS,),
    "guest attributes": (READY_SECONDS,),
    "role": (PROPAGATION_SECONDS, *ROLES),
    "service account": (PROPAGATION_SECONDS,),
    "service agent": (PROPAGATION_SECONDS,),
    "new API": (PROPAGATION_SECONDS, STARTING_SECONDS),
    "end of use": (IN_USE_SECONDS,),
}
"""What waits for each, in seconds. Nobody waits for the usage of quotas, and a queue has no end."""


def test_the_defaults_are_those() -> None:
    config = config_of("cloud.project=acme", "program=command", "tpu.zone=us-central1-a")
    assert (60 * config.tpu.create_timeout_minutes, config.ssh.ready_timeout_seconds) == (CREATE_SECONDS, READY_SECONDS)


@pytest.mark.parametrize("kind", sorted(DELAYS.keys() - {"queue", "another look for capacity", "usage of quotas"}))
def test_whoever_waits_does_so_longer_than_the_worst_that_was_seen(kind: str) -> None:
    assert min(WAITS[kind]) > DELAYS[kind].worst


def test_a_bastion_that_boots_and_is_refused_at_first_starts_in_time() -> None:
    steps = ("insert instances", "boot to SSH", "role")
    assert sum(DELAYS[step].worst for step in steps) < START_TIMEOUT_SECONDS


def test_a_group_that_is_slow_at_each_step_is_made_in_time() -> None:
    steps = (OTHER, OTHER, "insert instanceGroupManagers", "staging", "topology")
    assert sum(DELAYS[step].worst for step in steps) < CREATE_SECONDS
