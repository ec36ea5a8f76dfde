import ast
import errno
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

import controller.agent
from controller.agent.__main__ import archive_of, remove_old_agents, unpack
from controller.ssh.agent_bundle import build_bundle

PACKAGE = Path(controller.agent.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
FOR_ANOTHER_PYTHON = {"chip_check.py": {"jax", "numpy"}}
"""Programs that the agent runs with the Python of the run's venv, and what they import there."""


def observe(archive: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, archive, "observe"]
    environment = {"HOME": str(archive.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment)


def test_it_holds_the_whole_package_and_the_same_agent_gives_the_same_bytes_and_name() -> None:
    assert build_bundle() == build_bundle()
    assert build_bundle().name == f"agent-{build_bundle().sha256[:12]}.pyz"
    names = zipfile.ZipFile(io.BytesIO(build_bundle().content)).namelist()
    files = [f"slipway_agent/{path.relative_to(PACKAGE).as_posix()}" for path in SOURCES]
    assert sorted(names) == ["__main__.py", *files]


def test_it_is_unpacked_once_by_whoever_is_first_and_keeps_its_bytecode(tmp_path: Path) -> None:
    (archive := tmp_path / build_bundle().name).write_bytes(build_bundle().content)
    for process in [observe(archive) for _ in range(6)]:
        assert b'"boot_id"' in process.communicate()[0]
    assert {path.name for path in tmp_path.iterdir()} == {archive.name, archive.stem, ".slipway"}  # with the heartbeat
    assert list(archive.with_suffix("").glob("slipway_agent/__pycache__/main.*.pyc"))
    assert not [path for path in archive.with_suffix("").rglob("*") if path.stat().st_mode & 0o077]


def test_the_shell_runs_what_was_unpacked_and_otherwise_the_archive(tmp_path: Path) -> None:
    """Also in a home whose name has a space; its processes are known by the name of the archive either way."""
    bundle, home = build_bundle(), tmp_path / "a home"
    (folder := home / ".slipway").mkdir(parents=True)
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def shell(command: str) -> subprocess.CompletedProcess[bytes]:
        argv, environment = ["/bin/sh", "-c", bundle.shell(command)], {"HOME": str(home), "PATH": python}
        return subprocess.run(argv, input=b'{"format": 1}', capture_output=True, env=environment)

    assert shell("watchdog_state").returncode == 2
    (archive := folder / bundle.name).write_bytes(bundle.content)
    for _ in range(2):
        done = shell("watchdog_state")
        assert (done.returncode, b'"running": false' in done.stdout) == (0, True), done.stderr
        (archive.with_suffix("") / "__main__.py").read_bytes()
        archive.write_bytes(b"not a zip file")  # and yet it runs the second time
    unpacked = archive.with_suffix("") / "__main__.py"
    assert archive_of(unpacked) == archive_of(archive) == archive


def test_it_runs_where_it_cannot_be_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (archive := tmp_path / build_bundle().name).write_bytes(build_bundle().content)
    monkeypatch.setattr(zipfile.ZipFile, "extractall", full)
    assert unpack(archive) == archive
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    assert unpack(archive) == archive
    assert [path.name for path in tmp_path.iterdir()] == [archive.name]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_it_needs_nothing_but_python_3_10(source: Path) -> None:
    """Neither newer syntax nor anything outside the standard library; newer functions only a 3.10 would find."""
    tree = ast.parse(source.read_text(), feature_version=(3, 10))
    there = sys.stdlib_module_names | FOR_ANOTHER_PYTHON.get(source.name, set())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= there
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert (node.module or "").partition(".")[0] in there


def test_agents_of_other_versions_are_removed_once_nothing_uses_them(tmp_path: Path) -> None:
    ours, proc, long_ago = tmp_path / "agent-new.pyz", tmp_path / "proc", 1.0
    for version, time in {"new": long_ago, "old": long_ago, "busy": long_ago, "recent": None}.items():
        (tmp_path / f"agent-{version}.pyz").touch()
        (tmp_path / f"agent-{version}").mkdir()
        (tmp_path / f"agent-{version}" / "main.py").touch()
        for path in (tmp_path / f"agent-{version}.pyz", tmp_path / f"agent-{version}") if time else ():
            os.utime(path, (time, time))
    (tmp_path / ".agent-old.pyz.0a1b").touch()
    os.utime(tmp_path / ".agent-old.pyz.0a1b", (long_ago, long_ago))
    (tmp_path / "heartbeat").touch()
    os.utime(tmp_path / "heartbeat", (long_ago, long_ago))
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cmdline").write_bytes(b"python3\0/home/me/.slipway/agent-busy.pyz\0supervise\0")
    remove_old_agents(ours, tmp_path / "no-proc")
    assert (tmp_path / "agent-old").exists()
    remove_old_agents(ours, proc)
    left = {path.name for path in tmp_path.iterdir()} - {"proc"}
    kept = {f"agent-{version}{suffix}" for version in ("new", "busy", "recent") for suffix in ("", ".pyz")}
    assert left == kept | {"heartbeat"}
