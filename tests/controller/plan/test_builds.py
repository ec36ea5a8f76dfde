"""Builds that need something of this machine stay here; the plan knows which."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.config.compose import compose
from controller.inputs.code import CodeSnapshot, UnfetchedSnapshot
from controller.plan.build import Plan, build_plan
from controller.plan.fetching import fetcher_of
from controller.resources.uploads.builds import NearbyBuild, PodBuiltAsset, remote_argv

GB = 10**9


def plan_of(folder: Path, words: str, *overrides: str) -> Plan:
    for name in ("make.py", "data/rows.csv", "secret/keys.csv", "both/a", "both/b"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    given = ["cloud.project=acme", "program=command", "program.command=[a]", f"run.state_dir={folder}/state"]
    config, problems = compose([*given, f"+assets.models.w={{build: [{words}]}}", *overrides])
    assert config is not None, problems
    return build_plan(config, "acme", folder, CodeSnapshot(folder, ("both/a", "data/rows.csv", "make.py")))


@pytest.mark.parametrize(
    ("words", "bound"),
    [
        ("python, make.py, data, '{output}'", ""),
        ("sh, -c, 'date > {output}/x'", ""),
        ("python, make.py, 'hf://a/b/x', '--to=gs://b/c', '{output}'", ""),
        ("python, make.py, /dev/null, '{output}'", ""),
        ("sh, -c, 'cp -r ~/.cache/simply/. {output}'", "it names ~/.cache/simply/., a path of this machine"),
        ("python, make.py, '--from=/home/anna/x', '{output}'", "it names /home/anna/x, a path of this machine"),
        ("python, make.py, ../x, '{output}'", "it names ../x, a path of this machine"),
        ("python, make.py, secret, '{output}'", "it reads secret/keys.csv, which is not among the shipped files"),
        ("python, make.py, both, '{output}'", "it reads both/b, which is not among the shipped files"),
        ("slipway, trainer.tokenizer, '{output}'", "trainer.tokenizer is not in the code that program=command ships"),
        ("slipway, get, '{output}'", "`slipway get` is a verb of this machine"),
    ],
)
def test_a_build_runs_elsewhere_unless_it_needs_this_machine(tmp_path: Path, words: str, bound: str) -> None:
    plan = plan_of(tmp_path, words, "assets.fetch_on=vm", "env.packages=none")
    [asset] = plan.assets
    assert asset.recipe is not None
    assert asset.recipe.bound == bound
    assert any(isinstance(r, NearbyBuild) for r in plan.resources) == (not bound)
    plan = plan_of(tmp_path, words, "+assets.models.w.fetch_on=pod", "env.packages=none")
    assert any(isinstance(r, PodBuiltAsset) for r in plan.resources) == (not bound)


@pytest.mark.parametrize(
    ("words", "overrides", "size", "expected"),
    [
        ("make, 'hf://a/b', '{output}'", (), GB, "vm"),
        ("make, 'hf://a/b', '{output}'", (), GB - 1, "laptop"),
        ("make, '{output}'", (), 0, "laptop"),
        ("make, '{output}'", ("assets.fetch_on=vm",), 0, "vm"),
        ("make, '{output}'", ("assets.fetch_on=vm", "+assets.models.w.fetch_on=laptop"), 0, "laptop"),
        ("make, '{output}'", ("assets.fetch_on=vm", "env.packages=image"), 0, "laptop"),
        ("make, '{output}'", ("assets.fetch_on=pod", "env.packages=image"), 0, "pod"),
        ("make, 'hf://a/b', '{output}'", ("tpu.adopt=true", "tpu.name=mine"), GB, "laptop"),
        ("make, 'hf://a/b', '{output}'", ("cloud=here",), GB, "laptop"),
    ],
)
def test_who_builds(tmp_path: Path, words: str, overrides: tuple[str, ...], size: int, expected: str) -> None:
    plan = plan_of(tmp_path, words, *overrides)
    assert fetcher_of(plan.config, plan.assets[0], size) == expected


def test_a_module_of_the_trainer_runs_in_the_shipped_code(tmp_path: Path) -> None:
    config, problems = compose(["+experiment=nanochat_d16", "cloud.project=acme", f"run.state_dir={tmp_path}"])
    assert config is not None, problems
    plan = build_plan(config, "acme", tmp_path)
    recipe = next(asset.recipe for asset in plan.assets if asset.recipe)
    assert recipe.vm_bound == ""
    assert remote_argv(recipe)[:4] == ["python", "-m", "trainer.tokenizer", "train"]
    [source] = recipe.sources
    assert (source.kind, source.repository) == ("dataset", "karpathy/fineweb-edu-100b-shuffle")
    build = plan.get(NearbyBuild)
    assert f"code/{plan.snapshot.sha256}" in build.depends_on
    assert build.machine.max_seconds == 12 * 3600
    request = build.venv.request
    assert request is not None
    assert request["packages"] == "lock"
    unfetched = build_plan(config, "acme", tmp_path, UnfetchedSnapshot(tmp_path, (), "0" * 40))
    assert unfetched.get(NearbyBuild)
