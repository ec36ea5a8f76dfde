"""`slipway help --web`."""

from __future__ import annotations

import _thread
import subprocess
import urllib.request
from pathlib import Path

import pytest

from controller.cli import documentation
from controller.core.errors import ConfigError


@pytest.fixture
def mkdocs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A build that writes one page; the commands that were run."""
    ran: list[list[str]] = []

    def build(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        folder = Path(command[-1])
        folder.mkdir(parents=True)
        (folder / "index.html").write_text("<h1>Slipway</h1>")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(documentation.subprocess, "run", build)
    return ran


def test_the_site_is_built_once_and_served_on_loopback(
    mkdocs: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[str] = []

    def browse(address: str) -> None:
        with urllib.request.urlopen(address.partition("reference")[0] or address, timeout=240) as answer:
            read.extend([address, answer.read().decode()])
        _thread.interrupt_main()

    assert documentation.show_site(tmp_path, "plan", browse) == 0
    assert read[0].startswith("http://127.0.0.1:")
    assert read[0].endswith("/reference/commands.html#slipway-plan")
    assert read[1] == "<h1>Slipway</h1>"
    assert read[0] in capsys.readouterr().out
    documentation.build_site(tmp_path)
    assert len(mkdocs) == 1


def test_a_failed_build_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING - a page is missing")
    monkeypatch.setattr(documentation.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ConfigError, match="could not be built:\nWARNING - a page is missing"):
        documentation.build_site(tmp_path)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documentation.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'slipway\[docs\]'"):
        documentation.build_site(tmp_path)
    monkeypatch.setattr(documentation, "SOURCE", tmp_path)
    with pytest.raises(ConfigError, match="installed without it"):
        documentation.build_site(tmp_path)
