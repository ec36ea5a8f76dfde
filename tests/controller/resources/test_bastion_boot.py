"""What a bastion may do, and that it starts nothing but what it was ordered to."""

import ast
import io
import json
import os
import sys
import tarfile
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import pytest

from controller import bastion as bastion_drive
from controller.core.errors import ConfigError, SlipwayError
from controller.gcp.answers import LABEL
from controller.gcp.google_errors import ForbiddenError, GoogleError
from controller.plan.project_steps import bastion_resources
from controller.resources import bastion_boot
from controller.resources.accounts import BastionRoles, ProjectRoles
from controller.resources.bastion_vm import RUN_LABEL, Bastion
from tests.composed import config_of
from tests.fakes.clock import ManualClock
from tests.fakes.context import make_context
from tests.hostile import INJECTIONS

ORDERS = {
    "bucket": "b",
    "package": "slipway/x.tar.gz",
    "sha256": "0" * 64,
    "version": "1",
    "roots": {},
    "install": False,
}


def packed(member: tarfile.TarInfo, content: bytes = b"") -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return whole.getvalue()


def test_another_content_than_was_ordered_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bastion_boot, "token", dict)
    monkeypatch.setattr(
        bastion_boot, "send_request", lambda *_: packed(tarfile.TarInfo("controller/cli/main.py"), b"evil")
    )
    with pytest.raises(ValueError, match=r"has SHA-256 [0-9a-f]{64}, expected 0000"):
        bastion_boot.install_slipway(ORDERS, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "kind"), [("../x", tarfile.REGTYPE), ("/x", tarfile.REGTYPE), ("a/../../x", tarfile.REGTYPE),
                       ("x", tarfile.SYMTYPE), ("x", tarfile.LNKTYPE), ("x", tarfile.FIFOTYPE)],
)  # fmt: skip
def test_only_plain_files_within_its_folder_are_unpacked(tmp_path: Path, name: str, kind: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    (tmp_path / "archive").write_bytes(packed(member))
    with pytest.raises(ValueError, match="the archive contains"):
        bastion_boot.unpack(tmp_path / "archive", tmp_path / "folder")
    assert [path.name for path in tmp_path.rglob("*")] == ["archive"]


def resources(*overrides: str) -> list[object]:
    config = config_of("cloud=local", "program=command", "recovery.driver=bastion", *overrides)
    return list(bastion_resources(config, "a-bucket", "a-run", ()))


def test_no_config_is_put_into_its_script() -> None:
    written = Path(bastion_boot.__file__).read_text()
    for trick in INJECTIONS[:2]:
        [machine] = [one for one in resources(f"program.command={[trick]!r}") if isinstance(one, Bastion)]
        assert machine.script == written


def test_its_script_needs_nothing_but_the_standard_library() -> None:
    tree = ast.parse(Path(bastion_boot.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        ((), set()),
        (("tpu=v6e_1", "tpu.plane=tpu_api"), set()),
        (("tpu.data_disk_gb=100",), {"roles/compute.storageAdmin"}),
        (("tpu=v6e_1",), {"roles/compute.instanceAdmin.v1"}),
    ],
)
def test_its_rights_are_those_of_the_page(overrides: tuple[str, ...], more: set[str]) -> None:
    """Over all VMs of the project only where Compute Engine may make the pod."""
    [project] = [one for one in resources(*overrides) if isinstance(one, ProjectRoles)]
    assert {*project.roles} == {*config_of().cloud.driver_roles} | more


@pytest.mark.parametrize(
    ("overrides", "machine_type", "addresses", "scheduling"),
    [
        ((), "e2-small", 0, {"maxRunDuration": {"seconds": "2592000"}, "instanceTerminationAction": "DELETE"}),
        (("network.nat=false", "tpu.external_ip=true", "cleanup.bastion_max_days=null"), "e2-small", 1, {}),
        (("tpu.accelerator_type=v4-16", "tpu.zone=us-central2-b", "cleanup.bastion_max_days=null"), "g1-small", 0, {}),
    ],
)
def test_it_is_small_beside_the_pod_and_ends_by_itself(
    overrides: tuple[str, ...], machine_type: str, addresses: int, scheduling: dict[str, Any]
) -> None:
    [machine] = [one for one in resources(*overrides) if isinstance(one, Bastion)]
    config = config_of(*overrides)
    body = machine.body(make_context(None))
    assert (machine.zone, machine.subnetwork) == (config.tpu.zone, config.network.subnet_name(config.region))
    assert body["machineType"].endswith(f"/zones/{config.tpu.zone}/machineTypes/{machine_type}")
    [card] = body["networkInterfaces"]
    assert card["subnetwork"].endswith(f"/regions/{config.region}/subnetworks/{machine.subnetwork}")
    assert len(card.get("accessConfigs", ())) == addresses
    assert body["scheduling"] == {"automaticRestart": True, **scheduling}


def test_it_may_delete_itself_and_no_other_machine() -> None:
    found = resources()
    [own] = [one for one in found if isinstance(one, BastionRoles)]
    [project] = [one for one in found if isinstance(one, ProjectRoles)]
    [machine] = [one for one in found if isinstance(one, Bastion)]
    assert (own.on, own.zone) == (machine.name, machine.zone)
    assert project.roles
    broad = ("owner", "editor", "compute.admin", "compute.instanceAdmin", "iam.")
    assert [role for role in project.roles if role.removeprefix("roles/").startswith(broad)] == []


def test_a_machine_of_its_name_that_slipway_did_not_make_stays() -> None:
    [machine] = [one for one in resources() if isinstance(one, Bastion)]
    asked: list[str] = []

    def call(api: str, method: str, **parameters: Any) -> dict[str, Any]:
        asked.append(method)
        return {"status": "RUNNING", "labels": {"managed-by": "terraform", RUN_LABEL: machine.run_id}}

    machine.destroy(make_context(SimpleNamespace(call=call)))
    assert asked == ["instances.get"]
    assert machine.read({"status": "RUNNING", "labels": LABEL}).is_managed


def test_a_refusal_is_tried_again_while_the_roles_are_fresh_and_a_crash_a_few_times() -> None:
    clock, codes = ManualClock(), [75, 75, -9, 75, 0]
    assert bastion_boot.run_to_the_end(lambda: codes.pop(0), clock.monotonic, clock.sleep) == 0
    assert codes == []
    for code, tries in {
        75: bastion_boot.FRESH_SECONDS / bastion_boot.FRESH_PAUSE + bastion_boot.MAX_CRASHES,
        0: 1,
        2: 1,
        5: 1,
        8: 1,
    }.items():
        clock, tried = ManualClock(), list[float]()
        run = lambda code=code, tried=tried: tried.append(0.0) or code  # noqa: E731
        assert bastion_boot.run_to_the_end(run, clock.monotonic, clock.sleep) == code
        assert len(tried) == tries
    codes = [1] * 20
    assert bastion_boot.run_to_the_end(lambda: codes.pop(0), lambda: 1e6, clock.sleep) == 1
    assert len(codes) == 20 - bastion_boot.MAX_CRASHES


def test_the_age_counts_from_the_first_boot(tmp_path: Path) -> None:
    assert 0 <= bastion_boot.age_seconds(tmp_path)() < 3600
    os.utime(tmp_path / "first-boot", (1.0, 1.0))
    assert bastion_boot.age_seconds(tmp_path)() > 1e9


@pytest.mark.parametrize(
    ("error", "seconds"), [(OSError("blip"), 85.0), (HTTPError("u", 403, "no", Message(), None), 485.0)]
)
def test_what_fails_is_tried_again_and_a_missing_role_for_longer(error: Exception, seconds: float) -> None:
    clock = ManualClock()

    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        bastion_boot.with_retries(fail, clock.sleep, clock.monotonic)
    assert clock.elapsed == seconds


def test_a_blip_of_the_metadata_server_does_not_end_the_bastion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [OSError("blip"), json.dumps({**ORDERS, "home": str(tmp_path)}).encode()]
    sent: list[str] = []

    def send(url: str, *_: object, **__: object) -> bytes:
        if bastion_boot.ATTRIBUTES in url:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        sent.append(url)
        return b'{"access_token": "t"}'

    monkeypatch.setattr(bastion_boot, "send_request", send)
    monkeypatch.setattr(bastion_boot, "PAUSES", (0.0,))
    monkeypatch.setattr(bastion_boot, "install_slipway", lambda orders, home: ("python", {}))
    monkeypatch.setattr(bastion_boot, "run_controller", lambda *_: 0)
    monkeypatch.setattr(bastion_boot, "upload_log", lambda *_: None)
    monkeypatch.setattr(bastion_boot, "delete_this_vm", lambda orders: sent.append("deleted"))
    assert bastion_boot.main() == 0
    assert answers == []
    assert sent == ["deleted"]


def test_a_refusal_by_google_is_told_from_other_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ForbiddenError("storage objects.get", 403, "forbidden", "no access")
    wrapped = SlipwayError("the run was given up")
    wrapped.__cause__ = refused
    errors = [refused, wrapped, GoogleError("token", 503, "UNREACHABLE", "blip"), ConfigError("tpu.zone: unknown")]

    def drive(orders: object) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(bastion_drive, "drive", drive)
    monkeypatch.setattr(bastion_drive, "load", lambda *_: {})
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert [bastion_drive.main() for _ in range(4)] == [75, 75, 75, 2]
