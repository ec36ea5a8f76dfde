import ast
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import controller.agent
from controller.ssh.agent_bundle import build_bundle

PACKAGE = Path(controller.agent.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_the_same_agent_gives_the_same_bytes_and_name() -> None:
    assert build_bundle() == build_bundle()
    assert build_bundle().name == f"agent-{build_bundle().sha256[:12]}.pyz"


def test_it_holds_the_whole_package_and_runs(tmp_path: Path) -> None:
    names = zipfile.ZipFile(io.BytesIO(build_bundle().content)).namelist()
    assert sorted(names) == [
        "__main__.py",
        *(f"slipway_agent/{path.relative_to(PACKAGE).as_posix()}" for path in SOURCES),
    ]
    (tmp_path / "agent.pyz").write_bytes(build_bundle().content)
    command = [sys.executable, tmp_path / "agent.pyz", "observe"]
    done = subprocess.run(command, input=b'{"format": 1}', capture_output=True, env={"HOME": str(tmp_path)}, check=True)
    assert b'"boot_id"' in done.stdout


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_it_needs_nothing_but_python_3_10(source: Path) -> None:
    """Neither newer syntax nor anything outside the standard library; newer functions only a 3.10 would find."""
    tree = ast.parse(source.read_text(), feature_version=(3, 10))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert (node.module or "").partition(".")[0] in sys.stdlib_module_names
