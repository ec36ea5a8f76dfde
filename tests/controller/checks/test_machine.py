"""Missing programs and full disks are found before the download."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from controller.checks.machine import downloads_fit, programs_are_installed, workers_disks_suffice
from tests.controller.checks.hub import build, context, hub, plan_of, server

__all__ = ["hub", "server"]


def test_the_program_of_a_build_must_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    plan = plan_of(tmp_path, build("acme/open"))
    assert [str(f) for f in programs_are_installed(plan, context())] == [
        "assets.models.weights.build: hf is not installed on this machine, or not on PATH; install it (pip install "
        "huggingface_hub)"
    ]
    assert list(programs_are_installed(plan, context("weights"))) == []  # it is in the bucket
    [line] = programs_are_installed(plan_of(tmp_path, "{build: [sh, -c, 'hf download a/b {output}']}"), context())
    assert line.message.startswith("hf is not installed")
    (tmp_path / "make.sh").touch()
    assert list(programs_are_installed(plan_of(tmp_path, "{build: [make.sh, '{output}']}"), context())) == []
    assert list(programs_are_installed(plan_of(tmp_path, "{build: [sh, -c, 'ls {output}']}"), context())) == []


@pytest.mark.parametrize(("free", "fits"), [(3_000_000_000, True), (2_999_999_999, False)])
def test_a_download_must_fit_on_this_disk(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, fits: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    found = [str(f) for f in downloads_fit(plan_of(tmp_path, build("acme/open")), context())]
    assert (
        found == []
        if fits
        else [
            f"assets.models.weights.build: 3.0 GB are downloaded to {tmp_path}, which has 3.0 GB free; free some "
            f"space, "
            "or set run.state_dir to a folder on a larger disk"
        ]
    )
    part = plan_of(tmp_path, build("acme/open", "--include", "'*.safetensors'"))
    assert list(downloads_fit(part, context())) == []  # a third of it


def test_a_boot_disk_has_100_gb(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "{build: [a, '{output}']}", "env.min_free_gb=100")
    assert [str(f) for f in workers_disks_suffice(plan.config)] == [
        "env.min_free_gb: a worker's boot disk has 100 GB in all; set a smaller value"
    ]
    with (tmp_path / "rows").open("wb") as file:
        file.truncate(99_000_000_000)  # a sparse file
    plan_config = plan_of(tmp_path, "{build: [a, '{output}']}").config
    assets = plan_config.assets.model_copy(update={"datasets": {"rows": SimpleNamespace(path=str(tmp_path / "rows"))}})
    [warning] = workers_disks_suffice(plan_config.model_copy(update={"assets": assets}))
    assert str(warning) == (
        "assets.datasets.rows.path: 99 GB do not fit on a worker's boot disk of 100 GB; read them from the bucket as "
        "they are needed"
    )
