"""The plan says who builds and fetches an asset, how long it takes and what it costs; some builds must stay here."""

from pathlib import Path

import pytest

from controller.inputs.code import CodeSnapshot, UnfetchedSnapshot
from controller.plan.build import Plan, build_plan
from controller.plan.fetching import describe_build, describe_fetch, fetcher_of
from controller.resources.uploads.errands import NearbyBuild, PodBuiltAsset, remote_argv
from tests.composed import config_of
from tests.controller.checks.plans import plan_of as plan_with

GB = 10**9


def plan_of(folder: Path, words: str, *overrides: str) -> Plan:
    """The plan of a run with an asset that these words build, of which some are files of the repository."""
    for name in ("make.py", "data/rows.csv", "secret/keys.csv", "both/a", "both/b"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    given = ["cloud.project=acme", "program=command", "program.command=[a]", f"run.state_dir={folder}/state"]
    config = config_of(*given, f"+assets.models.w={{build: [{words}]}}", *overrides)
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


def test_a_module_of_the_trainer_runs_in_the_shipped_code(tmp_path: Path) -> None:
    config = config_of("+experiment=nanochat_d16", "cloud.project=acme", f"run.state_dir={tmp_path}")
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


SOURCE = "{source: 'hf://acme/open'}"


@pytest.mark.parametrize(
    ("overrides", "size", "expected"),
    [
        ((), GB - 1, "laptop"),
        ((), GB, "vm"),
        (("assets.fetch_on=laptop",), GB, "laptop"),
        (("assets.fetch_on=vm",), 1, "vm"),
        (("assets.fetch_on=pod",), 1, "pod"),
        (("tpu.adopt=true", "tpu.name=mine"), GB, "laptop"),
        (("cloud=here",), GB, "laptop"),
        (("assets.fetch_on=vm", "assets.models.weights.source=gs://mine/x"), 10 * GB, "laptop"),  # it stays there
    ],
)
def test_who_fetches(tmp_path: Path, overrides: tuple[str, ...], size: int, expected: str) -> None:
    plan = plan_with(tmp_path, SOURCE, *overrides)
    assert fetcher_of(plan.config, plan.assets[0], size) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), "by an e2-standard-2 in us-central1-a, about 5 min and $0.46, of which $0.45 for NAT"),
        (("network.nat=false",), "by an e2-standard-2 in us-central1-a, about 5 min and $0.01"),
        (("assets.fetch_on=laptop",), "through this machine, about 13 min at 100 Mbit/s"),
        (("assets.fetch_on=pod", "budget.usd_per_hour=18"), "by worker 0 of the pod, about 3 min and $1.45, of which "),
        (("cloud=local",), "by an e2-standard-2 in us-central1-a, about 5 min"),
    ],
)
def test_the_trade_off_is_told(tmp_path: Path, overrides: tuple[str, ...], expected: str) -> None:
    plan = plan_with(tmp_path, SOURCE, *overrides)
    assert describe_fetch(plan.config, plan.assets[0], 10 * GB, 0.0).startswith(expected)


@pytest.mark.parametrize(
    ("overrides", "size", "who", "said"),
    [
        ((), GB, "vm", "on an e2-standard-2 in us-central1-a, after about 5 min for its packages, $0.07 per hour"),
        ((), GB - 10**7, "laptop", "on this machine: it reads 990 MB of the Hub, less than 1 GB"),
        (("assets.fetch_on=vm",), 0, "vm", "on an e2-standard-2"),
        (("tpu.adopt=true", "tpu.name=mine"), GB, "laptop", "on this machine: there is no network for a VM"),
        (("assets.fetch_on=laptop",), GB, "laptop", "on this machine, as fetch_on says"),
        (("assets.fetch_on=vm", "+assets.models.weights.fetch_on=laptop"), GB, "laptop", "on this machine, as"),
        (("env.packages=image",), GB, "laptop", "on this machine: env.packages=image is about the image of TPU VMs"),
        (("assets.fetch_on=pod", "budget.usd_per_hour=18"), GB, "pod", "on worker 0 of the pod, $18.00 per hour until"),
    ],
)
def test_who_builds_is_told(tmp_path: Path, overrides: tuple[str, ...], size: int, who: str, said: str) -> None:
    plan = plan_with(tmp_path, "{build: [make, 'hf://a/b', '{output}']}", *overrides)
    assert fetcher_of(plan.config, plan.assets[0], size) == who
    assert describe_build(plan.config, plan.assets[0], size, "", 0.0).startswith(f"built {said}")
