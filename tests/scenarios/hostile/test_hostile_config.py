"""Hostile strings in every string of a config: refused in one clear message that names the key, or carried unchanged.

`HOSTILE_EXAMPLES=100000 pytest tests/scenarios/hostile/test_hostile_config.py` looks longer, and elsewhere every time.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema.training.run_yaml import load
from conf.schema.validation import validate
from controller.checks import machine
from controller.checks.preflight import preflight
from controller.config.compose import compose_raw
from controller.config.run_yaml import PLACEHOLDER
from controller.core.errors import ConfigError
from controller.inputs import code as snapshots
from controller.inputs import modules, resolved_assets
from controller.inputs.code import CodeSnapshot, take_snapshot
from controller.plan.build import Plan, build_plan
from tests.hostile import INJECTIONS, hostile_strings, string_fields, with_value

SHA, COMMIT = "a" * 64, "c" * 40
COMMAND = ["program=command", "program.command=[a, b]", "program.setup=[[a, b]]", "env.vars={A: b}"]
FILES = f"{{w: {{url: 'https://h/w', sha256: {SHA}, token_secret: HF_TOKEN}}}}"
EXAMPLES = os.environ.get("HOSTILE_EXAMPLES")
EVERY = 8
"""Without `--deep`, a trick is tried in every eighth place, and a place meets every eighth trick."""
KINDS = ("datasets", "models", "tokenizers")
BASES: dict[str, list[str]] = {
    "grpo": ["+experiment=quickstart", "cloud.faults=[{kind: preempted}]", "model.weights=gs://b/w"],
    "lora": ["cloud=local", "loop=distillation", "model=tiny", "optimizer=adamw", "data=arithmetic",
             "model.lora={r: 1, lora_alpha: 1, target_modules: [layers.*], adapter: gs://b/a}",
             "model@loop.teacher=tiny", "loop.teacher.weights=gs://b/w", "loop.teacher.config_json=a/b",
             "loop.teacher.lora={r: 1, lora_alpha: 1, target_modules: [layers.*], adapter: gs://b/a}",
             "loop.rollout_correction.rollout_rs=token_k1", "loop.rollout_correction.rollout_rs_threshold=0.5_2.0"],
    "teacher": ["cloud=local", "loop=distillation", "model=tiny", "optimizer=adamw", "data=arithmetic",
                "model@loop.teacher=tiny", "loop.teacher.weights=gs://b/w", "loop.teacher.implementation=own:Family"],
    "gsm8k": ["cloud=local", "loop=grpo", "model=nanochat_d16", "optimizer=nanochat", "data=gsm8k", "data.path=gs://a/f",
              "data.eval_path=gs://b/f", "data.prompt.shots=[{question: a, answer: b}]", "data.eos=['<eos>']",
              "loop.sampler.stop=[a]"],
    "lm": ["cloud=local", "env.packages=lock", "loop=lm", "model=tiny", "optimizer=adamw", "data=text", "data.path=gs://a/f",
           "checkpoint.best={metric: eval_loss, mode: min}", "logging.wandb={project: a, entity: b, mode: offline}"],
    "table": ["cloud=local", "loop=lm", "model=tiny", "optimizer=adamw", "data=jsonl", "data.path=gs://a/f",
              "data.text_column=null", "data.template={prompt: '{q}', answer: '{a}', remove: x}", "data.eos='<eos>'"],
    "command": ["cloud=gcp", "cloud.project=acme", *COMMAND, "env.packages=none",
                "cloud.trc={zones: [us-central1-a, us-central1-b], free_until: 2026-12-31}",
                "cloud.bucket_roles=[roles/a.b]",
                "cloud.billing_budget={account: 012345-6789AB-CDEF01, usd: 1, thresholds: [0.5]}",
                "cloud.roles=[roles/a.b]", "network.ssh_source_ranges=[10.0.0.0/8]",
                "tpu.fallback_zones=[us-central1-b]",
                f"assets.datasets={{d: {{path: data}}, f: {{files: {FILES}}}}}", "env.secrets.HF_TOKEN=env:HOME"],
    "assets": ["cloud=local", *COMMAND, f"assets.datasets={{d: {{files: {FILES}}}}}", "env.secrets.HF_TOKEN=env:HOME",
               f"assets.models={{m: {{files: {FILES}}}}}", f"assets.tokenizers={{t: {{files: {FILES}}}}}"],
    "paths": ["cloud=local", *COMMAND, "+program.exit_codes={33: worker_lost}", "cloud.quotas={INSTANCES: 8}",
              "program.devices={generations: [v5e]}",
              *(f"assets.{kind}={{n: {{path: data}}}}" for kind in KINDS)],
    "builds": ["cloud=local", *COMMAND,
               *(f"assets.{kind}={{n: {{build: [make, '{{output}}'], inputs: [data]}}}}" for kind in KINDS)],
    "sources": ["cloud=local", *COMMAND, *(f"assets.{kind}={{n: {{source: 'gs://bucket/w/*'}}}}" for kind in KINDS)],
    "own": ["+experiment=quickstart", "data=questions", "data.source=own:questions", "+data.options={a: b}",
            "loop.loss_type=own:loss", "+loop.loss_options={a: b}",
            "loop.environment.name=own:environment", "+loop.environment.options={a: b}",
            "+loop.evaluations={e: {run: 'own:evaluation', options: {a: b}}}",
            "optimizer=custom", "optimizer.rule=own:rule", "+optimizer.options={a: b}", "code.checks=[own:check]",
            "code.resources=[own:Step]", "logging.trackers=[own:tracker]"],
    "own_loop": ["cloud=local", "model=tiny", "optimizer=adamw", "data=documents", "data.source=own:questions",
                 "loop=custom", "loop.run=own:loop", "+loop.options={a: b}"],
    "here": ["cloud=here", "cloud.backend=cpu", "cloud.folder=/tmp/a", "cloud.results=gs://b/r", *COMMAND],
    "repository": ["cloud=local", *COMMAND, f"code.repository={{url: 'https://h/r', commit: {COMMIT}}}",
                   "code.exclude=[x]", "program.caution=a"],
}  # fmt: skip
"""Configs that are right, and hold together every string that a config can hold."""

OWN_MODULE = """
import optax
def questions(path, **options): return [{}]
def evaluation(answers, **options): return {}
def loop(experiment, mesh, log, **options): return None
def loss(logprobs, old_logprobs, advantages, mask, **options): return 0
def rule(**options): return optax.identity()
def check(config): yield from ()
class environment:
    def __init__(self, **options): pass
    def reset(self, row): return ""
    def step(self, response): return "", True
    def reward(self): return 1.0
class tracker:
    def __init__(self, run, config, folder): pass
    def log(self, step, metrics): pass
    def finish(self, results): pass
class Family:
    def weights(self, cfg): return {}
    def forward(self, params, cfg, tokens, positions, segments): return tokens
class Step:
    def __init__(self, config): self.name, self.wanted = "step", {}
    def read(self, google, project): return {"managed": True}
    def create(self, google, project): pass
    def delete(self, google, project): pass
"""
"""What the configs name as module:name."""

FILLED = {
    "data": {"chat_template_kwargs": {"style": "a"}},
    "sweep": {
        "params": {"run.seed": "0,1"},
        "cases": {"a": ["run.seed=1"]},
        "search": {"method": "random", "trials": 2, "metric": "a", "mode": "min", "prune": False, "seed": 0},
        "hypothesis": dict.fromkeys(("experiment", "question", "expected", "decision", "metric", "baseline"), "a"),
    },
}
"""What sections hold that are empty in all of them."""


@dataclass(frozen=True)
class Place:
    """A string of one of the configs."""

    base: str
    path: tuple[str, ...]

    @property
    def named(self) -> str:
        """The last part of its key that is a word of the schema."""
        return next(part for part in reversed(self.path) if part not in ("*", "<key>", "0"))


@dataclass
class Desk:
    """A folder with the files that the configs name, and the configs as Hydra composed them."""

    folder: Path
    configs: dict[str, dict[str, Any]]

    @cached_property
    def trainer(self) -> CodeSnapshot:
        """Hashed once."""
        config, _ = validate(self.configs["grpo"])
        assert config is not None
        return take_snapshot(config, self.folder)

    @cached_property
    def places(self) -> list[Place]:
        paths = sorted(set(string_fields()))
        return [
            Place(base, path) for base, data in self.configs.items() for path in paths if with_value(data, path, "x")
        ]

    def refusal(self, place: Place, value: str) -> list[str]:
        """What is said against a value there; nothing where it is carried to the workers unchanged."""
        data = with_value(self.configs[place.base], place.path, value)
        assert data is not None
        config, problems = validate(data)
        if config is None:
            return [str(problem) for problem in problems]
        if errors := [str(f) for f in preflight(config) if f.severity == "error"]:
            return errors
        try:
            code = self.trainer if config.program.kind == "trainer" else None
            plan = build_plan(config, "slipway-local", self.folder, code)
        except ConfigError as error:
            return error.problems
        self.check(plan, place, value)
        return []

    def wrong_with(self, place: Place, value: str) -> list[str]:
        """Of what is said against a value there: lines that do not print, or are too long, or none that names it."""
        said = self.refusal(place, value)
        wrong = [line for line in said if not line.isprintable() or len(line) >= 1000]
        if said and not any(place.named in line for line in said):
            wrong.append(f"{place} is not named in {said}")
        return wrong

    def check(self, plan: Plan, place: Place, value: str) -> None:
        """What leaves this machine holds the value as it is."""
        config = plan.config
        (file := self.folder / "run.yaml").write_text(plan.run_yaml)
        if config.program.kind == "trainer":
            sent = load(file)
            for section in ("model", "data", "loop", "optimizer", "checkpoint", "logging"):
                assert getattr(sent, section) == getattr(config, section)
        told = [w for w in (*config.program.command, *config.env.vars.values()) if not PLACEHOLDER.search(w)]
        given = [*plan.argv, *plan.placeholders.environment(config.env.vars).values()]
        assert config.program.kind == "trainer" or set(told) <= set(given)
        if place.path[0] in ("program", "env"):
            json.dumps([plan.argv, plan.placeholders.environment(config.env.vars)]).encode()  # as the agent is told


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("repository")
    (folder / "data").write_text("rows\n")
    (folder / "code.py").write_text("")
    (folder / "slipway").mkdir()
    (folder / "slipway" / "own.py").write_text(OWN_MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SLIPWAY_HOME", str(tmp_path_factory.mktemp("home")))
        # A path of an asset and a folder of modules may be any of this machine's, and a repository anywhere.
        really = modules.python_files
        patch.setattr(modules, "python_files", lambda root: really(root) if root.parent == folder else iter(()))
        patch.setattr(resolved_assets, "local_files", lambda path, hashes: (resolved_assets.AssetFile("f", path, SHA),))
        patch.setattr(machine, "_measure_folder", lambda *_: (0, 0, True))
        patch.setattr(snapshots, "checkout", lambda *_: folder)
        configs = {name: compose_raw(words) for name, words in BASES.items()}
        for data in configs.values():
            for section, filled in FILLED.items():
                has = data.get(section) or {}
                data |= {section: {**has, **filled}} if filled.keys() <= has.keys() else {}
        yield Desk(folder, configs)


def test_the_configs_are_right_and_reach_every_string(desk: Desk) -> None:
    for name, data in desk.configs.items():
        config, problems = validate(data)
        assert problems == [], name
        assert config is not None
        assert [f for f in preflight(config) if f.severity == "error"] == [], name
    assert {place.path for place in desk.places} == set(string_fields())


@pytest.mark.parametrize("value", INJECTIONS, ids=lambda value: ascii(value)[1:17])
def test_every_known_trick_in_every_place(desk: Desk, value: str, pytestconfig: pytest.Config) -> None:
    first = [*{place.path: place for place in reversed(desk.places)}.values()]
    places = first if pytestconfig.getoption("--deep") else first[INJECTIONS.index(value) % EVERY :: EVERY]
    assert [wrong for place in places for wrong in desk.wrong_with(place, value)] == []


@settings(derandomize=EXAMPLES is None, max_examples=int(EXAMPLES or settings().max_examples), database=None)
@given(at=st.integers(0, 100_000), value=hostile_strings())
def test_any_text_in_any_place(desk: Desk, at: int, value: str) -> None:
    assert desk.wrong_with(desk.places[at % len(desk.places)], value) == []
