"""Modules of the user's own, from a folder outside the repository: shipped, used on the pod, recorded and repeated."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from controller.cli import main
from controller.records.recorder import load_record
from tests.controller.conftest import SlipwayCli
from tests.paths import ROOT

pytestmark = pytest.mark.e2e
CLOUD = ("cloud=local", "cloud.operation_seconds=0", "env.packages=image")
RUN = ("loop=custom", "loop.run=my_loop:fit_line", "loop.options={slope: 3.0}", "loop.steps=40", "optimizer.lr=0.01")
WORDS = (*CLOUD, *RUN, "model=tiny", "data=arithmetic", "optimizer=adamw", "tpu=v5litepod_8")


def slope(said: str) -> str:
    return next(line.split()[1] for line in said.splitlines() if line.startswith("  slope "))


@pytest.mark.deep
def test_a_run_with_modules_is_repeated_without_them(slipway: SlipwayCli) -> None:
    def call(*words: str) -> tuple[str, str]:
        code = main.run([*words])
        out, err = slipway.capsys.readouterr()
        assert code == 0, err
        return out, err

    def planned() -> str:
        return json.loads(call("plan", *WORDS, "--json")[0])["run"]

    def record(run: str) -> Any:
        return load_record(slipway.home, run)

    modules = slipway.repository / "slipway"
    modules.mkdir()
    shutil.copy(ROOT / "docs" / "extend" / "my_loop.py", modules)
    out, _ = call("up", *WORDS, "cleanup.on_success=keep")
    first = planned()
    (modules / "my_loop.py").write_text((modules / "my_loop.py").read_text() + "# edited\n")
    assert planned() != first
    assert slope(out) == "3"
    shutil.rmtree(modules)
    assert slope(call("up", "--run", first, *CLOUD[:1])[0]) == "3"
    assert record(f"{first}-r1")["code_sha256"] == record(first)["code_sha256"]
