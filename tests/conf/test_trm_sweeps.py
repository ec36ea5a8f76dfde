"""The native experiments of the TRM study have the values of the study's own files (tests/conf/trm_sweeps.yaml)."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from conf.schema.config import Config
from conf.schema.run_sections import Sweep
from controller.checks.training import warmup_leaves_updates
from controller.cli import main
from controller.gcp.prices import hourly_price
from controller.run.estimate import estimate_run
from controller.sweep.grid import expand_grid
from tests.composed import config_of
from tests.groups import load_yaml
from tests.paths import ROOT

TABLE: dict[str, dict[str, dict[str, Any]]] = load_yaml(Path(__file__).with_name("trm_sweeps.yaml"))
"""Values by sweep and case, as the key of our config says them; `base` has those of an experiment."""
HYPOTHESES = {
    name: load_yaml(ROOT / f"conf/sweep/trm_{name}.yaml")["hypothesis"] for name in sorted({*TABLE} - {"base"})
}
"""By sweep: what the study asks and expects, and of which experiment."""


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


def test_the_page_names_every_sweep_of_the_study_and_each_says_what_is_expected() -> None:
    files = {file.stem.removeprefix("trm_") for file in (ROOT / "conf" / "sweep").glob("trm_*.yaml")}
    assert files == set(TABLE) - {"base"}
    study = (ROOT / "docs/puzzles.md").read_text().partition("[named sweep]")[2].partition("\n## ")[0]
    assert {name.removeprefix("trm_") for name in re.findall(r"`(trm_[a-z]+)`", study)} == files
    assert all(said["expected"] and said["decision"] for said in HYPOTHESES.values())
    assert {name: said["experiment"] for name, said in HYPOTHESES.items() if name == "e"} == {"e": "trm_sudoku_v4_32"}
    assert {said["experiment"] for name, said in HYPOTHESES.items() if name != "e"} == {"trm_sudoku_stable1"}


def test_the_experiments_have_the_values_of_the_guides() -> None:
    for name, expected in TABLE["base"].items():
        assert_has(config_of(f"+experiment={name}"), expected, name)


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
