"""The native experiments of the TRM study have the values of the study's own files (tests/conf/trm_sweeps.yaml)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conf.schema.config import Config
from conf.schema.run.sweep import Sweep
from controller.checks.training import warmup_leaves_updates
from controller.cli import main
from controller.gcp.prices import hourly_price
from controller.run.estimate import estimate_run
from controller.sweep.grid import expand_grid
from tests.composed import config_of
from tests.groups import load_yaml
from tests.paths import ROOT, SHARED

TABLE: dict[str, dict[str, dict[str, Any]]] = load_yaml(Path(__file__).with_name("trm_sweeps.yaml"))
"""Values by sweep and case, as the key of our config says them; `base` has those of an experiment."""
PLANNED = SHARED / "spec" / "trm_sweeps.yaml"
HYPOTHESES = {
    name: load_yaml(ROOT / f"conf/sweep/trm_{name}.yaml")["hypothesis"] for name in sorted({*TABLE} - {"base"})
}
"""By sweep: what the study asks and expects, and of which experiment."""
KEYS = {
    "h_cycles": "model.h_cycles", "l_cycles": "model.l_cycles", "l_layers": "model.num_layers",
    "hidden_size": "model.dim", "num_heads": "model.num_heads", "expansion": "model.expansion",
    "puzzle_emb_len": "model.puzzle_len", "puzzle_emb_ndim": "model.puzzle_width",
    "halt_max_steps": "loop.supervision_steps",
    "halt_exploration_prob": "loop.halt_exploration", "forward_dtype": "model.activation_dtype",
    "global_batch_size": "loop.batch_size", "epochs": "loop.epochs", "lr": "optimizer.lr",
    "lr_warmup_steps": "optimizer.schedule.warmup_steps", "weight_decay": "optimizer.weight_decay",
    "beta1": "optimizer.b1", "beta2": "optimizer.b2", "ema_rate": "optimizer.ema_decay",
}  # fmt: skip
"""Our key for each of theirs that has the same meaning."""


def value(config: Config, key: str) -> Any:
    if key == "augment":
        build = config.assets.datasets[(getattr(config.data, "path", "")).removeprefix("assets://")].build or ()
        return int(build[build.index("--augment") + 1])
    at: Any = config
    for part in key.split("."):
        at = getattr(at, part)
    return at


def runs(sweep: str) -> dict[str, Config]:
    """The runs of a sweep by case, or by the value of its only parameter."""
    words = [f"+experiment={HYPOTHESES[sweep]['experiment']}"]
    section = config_of(*words).sweep.model_dump() | load_yaml(ROOT / f"conf/sweep/trm_{sweep}.yaml")
    variants = expand_grid(words, Sweep.model_validate(section), ROOT)
    baseline = HYPOTHESES[sweep]["baseline"]
    assert [baseline in (v.case, *v.own_overrides) for v in variants].count(True) == 1
    found = {}
    for variant in variants:
        found[variant.case or variant.own_overrides[-1].partition("=")[2]] = config_of(*variant.overrides)
    return found


def assert_has(config: Config, expected: dict[str, Any], name: object) -> None:
    told = {key: value(config, key) for key in expected}
    assert told == {key: pytest.approx(x) if isinstance(x, float) else x for key, x in expected.items()}, name


@pytest.mark.parametrize("sweep", HYPOTHESES)
def test_a_sweep_has_the_values_of_the_study(sweep: str) -> None:
    """And each run is another one, has an estimate, and reaches its learning rate within a quarter of its updates.

    The study itself warms up longer in one run: 10,000 of 24,414 updates at batch 2,048.
    """
    found, long = runs(sweep), set[str]()
    assert set(found) == set(map(str, TABLE[sweep]))
    for case, expected in TABLE[sweep].items():
        assert_has(config := found[str(case)], expected, case)
        estimate = estimate_run(config, hourly_price(config, 0.0))
        assert estimate is not None
        assert estimate.hours > 0.25
        long |= {str(case) for _ in warmup_leaves_updates(config)}
    assert long == {"e4_5_larger_batch"} & found.keys()
    ids = {config.run_id("code", {}) for config in found.values()}
    assert len(ids) == len(found) - ("e2_2_t3_n6" in found), "that one is e1_3_batch_1024 again"


def test_the_expectations_of_the_study_are_in_its_table_of_the_docs() -> None:
    files = {file.stem.removeprefix("trm_") for file in (ROOT / "conf" / "sweep").glob("trm_*.yaml")}
    assert files == set(TABLE) - {"base"}
    page = (ROOT / "docs/puzzles.md").read_text().splitlines()
    table = {cells[1].strip(" `"): cells[3].strip() for line in page if len(cells := line.split("|")) == 5}
    assert {f"trm_{name}": said["expected"] for name, said in HYPOTHESES.items()}.items() <= table.items()
    assert {name: said["experiment"] for name, said in HYPOTHESES.items() if name == "e"} == {"e": "trm_sudoku_v4_32"}
    assert {said["experiment"] for name, said in HYPOTHESES.items() if name != "e"} == {"trm_sudoku_stable1"}


def test_the_experiments_have_the_values_of_the_guides() -> None:
    for name, expected in TABLE["base"].items():
        assert_has(config_of(f"+experiment={name}"), expected, name)


@pytest.mark.skipif(not PLANNED.exists(), reason="the study's own values are not at hand")
def test_the_table_is_that_of_the_study() -> None:
    """Their values by our keys, for every experiment whose values the study's plan has not corrected."""
    planned = load_yaml(PLANNED)
    base = flat(planned["lineage_1_guide1"]["base"])
    for name, own in planned["lineage_1_guide1"]["experiments"].items():
        assert_says(TABLE["e"][name], base, flat(own))
    lineage = planned["lineage_2_guide4"]
    assert_says(TABLE["base"]["trm_sudoku_stable1"], {}, flat(lineage["base"]))
    cases = {
        "exp01": "width", "exp02a": "n", "exp02b": "t", "exp03": "depth", "exp05": "nsup", "exp07": "dtype",
        "exp08": "ema", "exp10": "lr",
    }  # fmt: skip
    for prefix, sweep in cases.items():
        theirs = experiments_of(lineage, prefix)
        assert len(theirs) == len(TABLE[sweep])
        for own, ours in zip(theirs, TABLE[sweep].values(), strict=True):
            assert_says(ours, flat(lineage["base"]), flat(own))


@pytest.mark.skipif(not PLANNED.exists(), reason="the study's own values are not at hand")
def test_the_table_has_the_studys_data_sets_and_contributions() -> None:
    lineage = load_yaml(PLANNED)["lineage_2_guide4"]
    sizes = [own["data"].split("-")[2:5:2] for own in experiments_of(lineage, "exp04a_")]
    assert sorted(int(puzzles) for puzzles, _ in sizes) == [case["loop.puzzles"] for case in TABLE["data"].values()]
    assert {augment for _, augment in sizes} == {"1000"}
    images = [own.get("data", "sudoku-extreme-1k-aug-1000") for own in experiments_of(lineage, "exp04b_")]
    assert images == [f"sudoku-extreme-1k-aug-{case['augment']}" for case in TABLE["augment"].values()]
    base, curriculum = (flat(own) for own in experiments_of(lineage, "contrib01_"))
    assert (base["use_curriculum_recursion"], TABLE["curriculum"]["constant"]) == (False, {"loop.curriculum": None})
    assert list(TABLE["curriculum"]["curriculum"].values()) == [
        curriculum[f"curriculum_{name}"] for name in ("start_h_cycles", "start_l_cycles", "end_epoch")
    ]
    annealed, constant = (flat(own) for own in experiments_of(lineage, "contrib02_"))
    assert list(TABLE["halting"]["annealed"].values()) == [
        annealed["halt_exploration_prob"], annealed["halt_exploration_final"],
    ]  # fmt: skip
    assert constant["use_adaptive_halting"] is False
    assert TABLE["halting"]["constant"]["loop.halt_exploration"] == lineage["base"]["arch"]["halt_exploration_prob"]


def experiments_of(lineage: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
    return [own for name, own in lineage["experiments"].items() if name.startswith(prefix)]


def test_plan_lists_every_run_with_hours_and_dollars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    words = ["plan", "-m", "+experiment=trm_sudoku", "sweep=trm_t", "run.seed=0,1,2", "cloud.project=p"]
    assert main.run([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hypothesis"].pop("misfit").endswith(f", not of +experiment={HYPOTHESES['t']['experiment']}")
    assert told["hypothesis"] == HYPOTHESES["t"]
    listed, names = told["runs"], {str(name) for name in TABLE["t"]}
    assert {run["words"][-1].partition("=")[2] for run in listed} == names
    assert len({run["run"] for run in listed}) == len(listed) == 3 * len(names)
    assert all(run["hours"] > 0.25 and run["usd"] > 1 for run in listed)
    assert told["estimate"]["hours"] == pytest.approx(sum(run["hours"] for run in listed))
    assert told["estimate"]["usd"] == pytest.approx(sum(run["usd"] for run in listed))
    assert "FLOPs at 10% (5% to 20%) of the chips' peak, which is assumed" in told["estimate"]["why"]


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Their values by the last part of the key."""
    found: dict[str, Any] = {}
    for key, item in values.items():
        found |= flat(item) if isinstance(item, dict) else {key.rpartition(".")[2].lower(): item}
    return found


def assert_says(ours: dict[str, Any], base: dict[str, Any], own: dict[str, Any]) -> None:
    """What a file of the study changes, our table has, under our key and with its value; and it has nothing else."""
    theirs = base | own
    for name in own:
        assert name not in KEYS or KEYS[name] in ours, name
    for name, key in KEYS.items():
        if key not in ours or name not in theirs:
            continue
        wanted = None if name == "ema_rate" and theirs.get("ema") is False else theirs[name]
        assert ours[key] == (pytest.approx(float(wanted)) if isinstance(ours[key], float) else wanted), name
    if theirs.get("mlp_t") is False:
        assert (ours["model.mixer"], ours["model.position_embedding"]) == ("attention", theirs["pos_encodings"])
    if own.get("lr_min_ratio", 1.0) < 1:
        assert ours["optimizer.schedule.final_fraction"] == theirs["lr_min_ratio"]
    if "dataset_path" in own:
        assert f"-{ours['loop.puzzles'] // 1000}k-" in own["dataset_path"]
