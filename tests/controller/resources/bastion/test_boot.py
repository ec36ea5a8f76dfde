"""What a bastion may do, and that it starts nothing but what it was ordered to."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from controller.config.compose import compose
from controller.plan.bastion import bastion_resources
from controller.resources.bastion import boot
from controller.resources.bastion.vm import Bastion, BastionRoles
from controller.resources.project.roles import ProjectRoles
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
    monkeypatch.setattr(boot, "token", dict)
    monkeypatch.setattr(boot, "send_request", lambda *_: packed(tarfile.TarInfo("controller/cli/main.py"), b"evil"))
    with pytest.raises(ValueError, match=r"has SHA-256 [0-9a-f]{64}, expected 0000"):
        boot.install_slipway(ORDERS, tmp_path)
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
        boot.unpack(tmp_path / "archive", tmp_path / "folder")
    assert [path.name for path in tmp_path.rglob("*")] == ["archive"]


def resources(*overrides: str) -> list[object]:
    config, problems = compose(["cloud=local", "program=command", "recovery.driver=bastion", *overrides])
    assert config is not None, problems
    return list(bastion_resources(config, "a-bucket", "a-run", ()))


def test_no_config_is_put_into_its_script() -> None:
    written = Path(boot.__file__).read_text()
    for trick in INJECTIONS[:2]:
        [machine] = [one for one in resources(f"program.command={[trick]!r}") if isinstance(one, Bastion)]
        assert machine.script == written


def test_it_may_delete_itself_and_no_other_machine() -> None:
    found = resources()
    [own] = [one for one in found if isinstance(one, BastionRoles)]
    [project] = [one for one in found if isinstance(one, ProjectRoles)]
    assert own.bastion in found
    assert project.roles
    broad = ("owner", "editor", "compute.admin", "compute.instanceAdmin", "iam.")
    assert [role for role in project.roles if role.removeprefix("roles/").startswith(broad)] == []
