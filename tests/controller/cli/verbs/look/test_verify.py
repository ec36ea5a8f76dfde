"""The column `data` of `slipway verify`; the others are tested with a pod, in run/test_up.py."""

from __future__ import annotations

import json

import pytest

from controller.agent.protocol import Fingerprints
from controller.cli import main
from controller.cli.verbs.look.verify import data_cells
from controller.ssh.fleet import WorkerError
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli


def test_a_worker_with_other_data_than_most_is_named_with_its_keys() -> None:
    usual = {"data.path": "a", "model.weights": "b"}
    found = [usual, usual, usual | {"data.path": "c"}, usual | {"data.path": "absent"}, dict.fromkeys(usual, "d")]
    prints: list[Fingerprints | WorkerError] = [{"data": one} for one in found]
    assert data_cells([*prints, WorkerError(5, "10.0.0.5", "agent", "run.yaml is missing")]) == [
        "ok", "ok", "data.path differs", "data.path absent", "data.path, model.weights differs", "run.yaml is missing"
    ]  # fmt: skip
    assert data_cells([{"data": {"data.path": "absent"}}] * 2) == ["data.path absent"] * 2, "the same nothing"
    assert data_cells([{"data": {}}] * 2) == ["ok", "ok"], "generated problems have no files"
    assert data_cells([{"data": {"a": "1"}}, {"data": {"a": "2"}}]) == ["ok", "a differs"], "a tie: the first"


@pytest.mark.e2e
@pytest.mark.deep
def test_data_that_differ_on_one_worker_are_found(slipway: SlipwayCli) -> None:
    """Every worker has a copy in its home, as somebody would make by hand."""
    pod = ["tpu.name=mine", "tpu.accelerator_type=v4-16", "tpu.zone=us-central2-b", "cleanup.on_success=keep"]
    assert slipway("up", ECHO_COMMAND, *pod)[0] == 0
    homes = sorted((slipway.home / "localcloud/nodes").glob("*/worker-*/home"))
    for home in homes:
        (home / "text.txt").write_text("To be, or not to be. " * 400)
    base = [word for word in slipway.base_overrides if word != "program=command"]
    words = ["+experiment=lm_tinyshakespeare", "scale=tiny", "data.path='~/text.txt'", *pod, *base]
    assert main.run(["up", *words]) == 0, slipway.capsys.readouterr().err
    assert main.run(["verify", *words]) == 0
    (homes[1] / "text.txt").write_text("To be, or not to bee. " * 400)
    slipway.capsys.readouterr()
    assert main.run(["verify", "--json", *words]) == 4
    assert [(row["data"], row["wrong"]) for row in json.loads(slipway.capsys.readouterr().out)["workers"]] == [
        ("ok", []), ("data.path differs", ["data"])
    ]  # fmt: skip
