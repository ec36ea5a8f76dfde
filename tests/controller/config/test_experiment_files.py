"""A first experiment of one's own: what is wrong with the file is said, and editors judge it as plan does."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from omegaconf import OmegaConf
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from conf.schema.config import Config
from conf.schema.training.loop import LmLoop
from conf.schema.training.model import Model
from controller.checks.env import trainer_has_jax
from controller.checks.preflight import preflight
from controller.checks.training import warmup_leaves_updates
from controller.cli import main
from controller.config.compose import CONFIG_DIR, compose, compose_raw, config_groups
from controller.config.editor_schemas import FILE_PATTERNS, FOLDER, ROOT, editor_settings
from controller.core.errors import ConfigError
from controller.inputs.resolved_assets import is_referenced
from controller.run.estimate import token_flops
from controller.run.preview import confirm_cost
from tests.composed import config_of
from tests.groups import load_group


def flat(file: Path) -> str:
    """Return the header of an experiment as one line."""
    return " ".join(line.lstrip("# ") for line in file.read_text().splitlines() if line.startswith("#"))


LAUNCHED = {
    file.stem: text
    for file in (CONFIG_DIR / "experiment").glob("*.yaml")
    if "caution:" in (text := file.read_text()) or "code:\n  repository:" in text
}
"""Experiments that launch someone else's program."""
RATE = re.compile(r"([\d.]+) h (?:on a [\w-]+ )?at (?:the )?([\d,]+)")
PEAK = re.compile(r"at ([\d,]+) tokens/s, (\d+)% of the chips' peak")
RATED = [file.stem for file in (CONFIG_DIR / "experiment").glob("*.yaml") if RATE.search(flat(file))]
BODY = "defaults:\n  - override /loop: grpo\nloop: {steps: 7}\n"


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value; a list is a value."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, tree


def scale_files(experiment: str) -> list[str]:
    """The files of `scale=tiny` that an experiment calls for, in their order."""
    text = (CONFIG_DIR / "experiment" / f"{experiment}.yaml").read_text()
    for base in re.findall(r"^  - (\w+)$", text, re.MULTILINE):
        if base != "_self_":  # its choices come first, and the experiment overrides them
            text = (CONFIG_DIR / "experiment" / f"{base}.yaml").read_text() + text
    chosen = dict(re.findall(r"override /(\w+): (\w+)", text))
    groups = [f"{group}/tiny_{chosen.get(group)}" for group in ("loop", "data")]
    models = (CONFIG_DIR / "scale/model").glob("*.yaml")
    of_model = [file.stem for file in models if f"tiny_{chosen.get('model')}_".startswith(f"{file.stem}_")]
    groups += [f"model/{name}" for name in sorted(of_model)[-1:]]
    named = ["tiny", f"tiny_{chosen.get('program', 'trainer')}", *groups]
    return [name for name in named if (CONFIG_DIR / "scale" / f"{name}.yaml").exists()]


@pytest.mark.parametrize("experiment", config_groups()["experiment"])
def test_every_experiment_composes_and_every_line_of_its_scale_beats_it(experiment: str) -> None:
    words = [f"+experiment={experiment}"]
    config, tiny = config_of(*words), config_of(*words, "scale=tiny")
    assert config.run.name == experiment
    assert tiny.tpu == config.tpu  # as many workers and devices as in earnest
    if tiny.program.kind == "trainer":
        assert tiny.loop is not None
        assert tiny.model is not None
        assert (tiny.loop.steps, tiny.model.dim) == (4, 16 if tiny.loop.kind == "puzzle" else 32)
        assert config.env.packages == ("image" if config.cloud.kind == "local" else "lock"), "as config.yaml says"
        assert [*warmup_leaves_updates(config)] == []
    for name, dataset in tiny.assets.datasets.items():
        if is_referenced(tiny, "dataset", name):
            assert dataset.files is None, f"{name} would be downloaded"
    composed = dict(leaves(compose_raw([*words, "scale=tiny"])))
    lines = {key: value for name in scale_files(experiment) for key, value in leaves(load_group(f"scale/{name}"))}
    assert len(lines) >= 4
    for key, value in lines.items():
        assert composed[key] == value or "${" in str(value), key


@pytest.mark.parametrize("model", sorted({*config_groups()["model"]} - {"hf", "pretrained", "trm"}))
def test_every_decoder_has_a_tiny_form(model: str) -> None:
    """By its own file or that of its family: two layers, and four experts."""
    tiny = config_of("+experiment=lm_tinyshakespeare", "scale=tiny", f"model={model}").model
    assert isinstance(tiny, Model)
    assert (tiny.num_layers, tiny.dim) == (2, 32)
    assert tiny.experts is None or (tiny.experts.count, (tiny.experts.inner_dim or 16)) == (4, 16)
    assert tiny.shared_dim in (0, 16)


@pytest.mark.parametrize("experiment", ["quickstart", "gemma2b_gsm8k"])
def test_packages_follow_the_cloud(experiment: str) -> None:
    """TPU VM images have no JAX, and emulated workers have this machine's packages."""
    for cloud, packages in {"gcp": "lock", "local": "image", "here": "lock"}.items():
        config = config_of(f"+experiment={experiment}", f"cloud={cloud}", "cloud.project=acme")
        assert (config.env.packages, [*trainer_has_jax(config)]) == (packages, []), cloud


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BODY, "slipway/experiment/mine.yaml: must begin with the line '# @package _global_'"),
        (f"# mine\n# @package _global_\n{BODY}", "must begin with the line '# @package _global_'"),
        (f"\ufeff# @package _global_\n{BODY}", "slipway/experiment/mine.yaml: begins with a byte-order mark"),
        ("", "slipway/experiment/mine.yaml: is empty; begin with '# @package _global_'"),
        ("# @package _global_\n\n", "slipway/experiment/mine.yaml: is empty"),
    ],
)
def test_the_file_and_the_missing_line_are_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "slipway/experiment/mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("\n# @package _global_\n# a blank line may stand above\nrun: {name: mine}\n")
    assert config_of("+experiment=mine", "program=command", folder=tmp_path / "slipway").run.name == "mine"
    file.write_text(content)
    for name in ("mine", "mine.yaml"):
        with pytest.raises(ConfigError) as caught:
            compose([f"+experiment={name}"], extra_dir=tmp_path / "slipway")
        assert message in str(caught.value)


@pytest.mark.parametrize("experiment", sorted(LAUNCHED))
def test_a_launched_program_says_first_what_is_known_of_it_and_what_takes_its_place(experiment: str) -> None:
    header = LAUNCHED[experiment].split("\n", 1)[1]
    first = " ".join(line.lstrip("# ") for line in header.split("# Guide")[0].splitlines())
    config = config_of(f"+experiment={experiment}")
    caution = config.program.caution or ""
    why, _, native = caution.removeprefix("the original program ").partition("; native in its place: +experiment=")
    assert first.startswith(("Known not to finish: it ", "Not known to finish: it "))
    assert first.split(": it ", 1)[1] == f"{why}. Native in its place: +experiment={native}."
    instead = config_of(f"+experiment={native}")
    assert (instead.program.kind, instead.program.caution) == ("trainer", None)
    said = [str(finding) for finding in preflight(config) if finding.check == "caution"]
    assert said == [f"program.caution: {caution}"]
    assert asked_before(config) == [f"{caution}. Start it all the same?"]
    tiny = config_of(f"+experiment={experiment}", "scale=tiny")
    assert [finding for finding in preflight(tiny) if finding.check == "caution"] == []
    time, result = (re.search(rf"#   {name}: +(.*)", LAUNCHED[experiment]) for name in ("time", "result"))
    assert time is not None
    assert result is not None
    if "# Known not to finish" in LAUNCHED[experiment]:  # no number that its program cannot reach
        assert re.match("(stops at once|without end); the guide means ", time[1])
        assert result[1] == "none"
    else:
        assert re.search("not measured|that its author saw", time[1])


def asked_before(config: Config) -> list[str]:
    """What `up` asks on a pod that exists; it goes no further without a yes."""
    asked: list[str] = []
    plan: Any = SimpleNamespace(config=config, observe_pod=lambda context: object())
    context: Any = SimpleNamespace(is_billed=True)
    screen: Any = SimpleNamespace(ask=lambda question, yes: asked.append(question))
    with pytest.raises(ConfigError, match=r"program\.caution: .*; nothing was created"):
        confirm_cost(plan, context, screen, yes=False)
    return asked


def test_every_launched_program_has_such_an_experiment() -> None:
    chosen = {found[1] for text in LAUNCHED.values() if (found := re.search(r"override /program: (\w+)", text))}
    assert chosen == {file.stem for file in (CONFIG_DIR / "program").glob("*.yaml")} - {"command", "trainer"}


@pytest.mark.parametrize("experiment", sorted(RATED))
def test_hours_of_a_header_follow_from_its_rate(experiment: str) -> None:
    """Hours are the guide's tokens over tokens/s; a share of the peak is that of the model's arithmetic."""
    header = flat(CONFIG_DIR / "experiment" / f"{experiment}.yaml")
    tokens = re.search(r"([\d.]+) G tokens", header)
    assert tokens is not None, "the header says how many"
    config = config_of(f"+experiment={experiment}")
    if isinstance(config.loop, LmLoop):
        assert float(tokens[1]) == pytest.approx(config.loop.steps * config.loop.total_batch_tokens / 1e9, rel=0.01)
    for hours, rate in RATE.findall(header):
        assert float(hours) == pytest.approx(float(tokens[1]) * 1e9 / float(rate.replace(",", "")) / 3600, rel=0.01)
    for rate, share in PEAK.findall(header):
        assert isinstance(config.model, Model)
        assert isinstance(config.loop, LmLoop)
        flops = float(rate.replace(",", "")) * token_flops(config.model, config.loop.seq_len)
        peak = config.topology.chips * (config.topology.bf16_flops_per_chip or 0)
        assert int(share) == pytest.approx(100 * flops / peak, abs=1)


def test_the_smoke_test_is_the_quickstart_on_one_chip() -> None:
    found, quickstart = config_of("+experiment=smoke", "cloud.project=acme"), config_of("+experiment=quickstart")
    assert (found.loop, found.data, found.model) == (quickstart.loop, quickstart.data, quickstart.model)
    assert (found.topology.workers, found.topology.devices) == (1, 1)
    assert (found.cloud.kind, found.env.packages, found.budget.max_hours) == ("gcp", "lock", 1)
    assert [finding for finding in preflight(found) if finding.severity == "error"] == []


STORED = {file.stem: json.loads(file.read_bytes()) for file in FOLDER.glob("*.json")}
KNOWN = Registry().with_resources(
    [(f"{name}.json", Resource.from_contents(schema, DRAFT202012)) for name, schema in STORED.items()]
)


def wrong(schema: str, document: Any) -> list[str]:
    validator = Draft202012Validator({"$ref": f"{schema}.json"}, registry=KNOWN)
    return [error.message for error in validator.iter_errors(document)]


def files(schema: str) -> list[Path]:
    return [file for glob in FILE_PATTERNS[schema] for file in sorted(ROOT.glob(glob.format("conf")))]


def test_every_file_of_every_group_has_a_schema_and_is_right() -> None:
    for schema in FILE_PATTERNS:
        for file in files(schema):
            assert wrong(schema, OmegaConf.to_container(OmegaConf.load(file)) or {}) == [], file
    tables = {"permissions.yaml", "prices.yaml", "regions.yaml", "tpu_types.yaml"}
    judged = [file for schema in FILE_PATTERNS for file in files(schema)]
    assert len(judged) == len(set(judged))
    assert {file.name for file in (ROOT / "conf").rglob("*.yaml") if file not in set(judged)} == tables
    assert set(config_groups()) <= {*FILE_PATTERNS, "experiment", "scale"}
    assert set(FILE_PATTERNS) == set(STORED)


@pytest.mark.parametrize(
    ("schema", "document", "right"),
    [
        ("loop", {"stepss": 4}, False),
        ("loop", {"kind": "lm", "kl_coef": 0.1}, False),
        ("loop", {"loss_type": "grpoo"}, False),
        ("mesh", {"data": "two"}, False),
        ("tpu", {"capacity": ["spott"]}, False),
        ("config", {"loop": {"stepss": 4}}, False),
        ("config", {"optimizr": {}}, False),
        ("config", {"run": {"seed": -1}}, False),
        ("sweep", {"pods": 0}, False),
        ("loop", {"defaults": ["grpo", "_self_"], "kl_coef": "${oc.env:KL}"}, True),
        ("tpu", {"capacity": "spot"}, True),
        ("tpu", {"capacity": ["reserved", "spot"]}, True),
        ("config", {"optimizer": {"lr": "${oc.env:LR}"}, "data": None}, True),
    ],
)
def test_mistakes_are_found_and_parts_and_interpolations_are_right(schema: str, document: Any, right: bool) -> None:
    assert (wrong(schema, document) == []) is right


def test_other_repositories_name_the_installed_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["completion", "vscode"]) == 0
    mapping = json.loads(capsys.readouterr().out)["yaml.schemas"]
    assert all(Path(file).is_file() for file in mapping)
    assert mapping[str(FOLDER / "loop.json")] == ["conf/loop/**/*.yaml", "slipway/loop/**/*.yaml"]
    assert all((ROOT / file).is_file() for file in editor_settings(FOLDER.relative_to(ROOT))["yaml.schemas"])
