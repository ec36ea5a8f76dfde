"""Guide 3's native experiments: what they take from the guide, meshes, and equal sizes in the sweep of the forms."""

from collections.abc import Iterable
from typing import Any

import pytest

from conf.schema.training.model import Model
from controller.checks.fit import estimate_num_params
from controller.sweep.grid import expand_grid
from tests.composed import config_of
from tests.groups import load_group
from tests.paths import ROOT
from trainer.models import weights
from trainer.optimizer.rules import update_rules
from trainer.telemetry import throughput

PROJECT = "cloud.project=a-project"
FORMS = ("plain", "mhc", "mhc_lite", "nash_hc")


def test_the_cases_of_the_sweep_have_equal_parameters_or_equal_work() -> None:
    """Composing all takes seconds, so the model's keys are set as the words say."""
    base, model = small("nash_ablation", 36)
    assert isinstance(base.loop.seq_len, int)
    sizes = {}
    for name, case in base.sweep.cases.items():
        cfg = changed(model, case)
        sizes[name] = weights.num_params(cfg), throughput.model_flops(cfg, 1, base.loop.seq_len)
    params, flops = sizes["mhc_maha"]
    for name, (own_params, own_flops) in sizes.items():
        if not name.endswith("_flops"):
            assert own_params == pytest.approx(params, rel=1e-3), name
        if not name.endswith("_params"):
            assert own_flops == pytest.approx(flops, rel=1e-3), name


def test_the_sweep_of_the_curves_has_equal_parameters() -> None:
    base, model = small("nash_residuals", 12)
    shared = [f"{key}={value}" for key, value in base.sweep.params.items() if key.startswith("model.")]
    models = {name: changed(model, [*shared, *case]) for name, case in base.sweep.cases.items()}
    assert {name: model.residual for name, model in models.items()} == dict(zip(FORMS, FORMS, strict=True))
    for name, model in models.items():
        assert weights.num_params(model) == pytest.approx(weights.num_params(models["mhc"]), rel=1e-3), name
        assert model.dim == model.num_heads * model.head_dim == 128, name


def small(sweep: str, runs: int) -> tuple[Any, Model]:
    """The config of the small experiment with this sweep, which has so many runs, and its model."""
    words = ["+experiment=nash_mhc_small", f"sweep={sweep}"]
    base = config_of(*words)
    assert isinstance(base.model, Model)
    assert len(expand_grid(words, base.sweep, ROOT)) == runs
    return base, base.model


def changed(model: Model, words: Iterable[str]) -> Model:
    changes = dict(word.removeprefix("model.").split("=") for word in words)
    numbers = {key: int(value) for key, value in changes.items() if value.isdecimal()}
    return Model.model_validate(model.model_dump() | changes | numbers)


@pytest.mark.parametrize("experiment", ["nash_mhc_3b", "nash_mhc_small"])
def test_the_optimizer_suits_every_form(experiment: str) -> None:
    """What is a gain or begins as the identity is not decayed; a form without such weights is no error."""
    config = config_of(f"+experiment={experiment}", PROJECT)
    assert isinstance(config.model, Model)
    kept = {}
    for form in FORMS:
        for attention in ("causal", "maha"):
            cfg = changed(config.model, [f"model.residual={form}", f"model.attention_form={attention}"])
            rules = update_rules(config.optimizer, cfg)
            kept[form] = {path for path, rule in rules.items() if rule.weight_decay == 0}
    norms = {"final_norm", "layers.attention_norm", "layers.mlp_norm"}
    branches = ("layers.attention", "layers.mlp")
    streams = {f"{branch}_streams_{part}" for branch in branches for part in ("bias", "scale")}
    channels = {f"{branch}_{part}" for branch in branches for part in ("mixing_logits", "layer_scale")}
    assert kept == {"plain": norms, "mhc": norms | streams, "mhc_lite": norms | streams, "nash_hc": norms | channels}


def test_the_large_one_has_the_guides_values() -> None:
    words = ("+experiment=nash_mhc_3b", PROJECT)
    config, *others = (config_of(*words, *mesh) for mesh in ([], ["mesh=fsdp_heavy"], ["mesh=data_heavy"]))
    meshes = [(c.mesh.data, c.mesh.fsdp, c.mesh.tensor) for c in (config, *others)]
    assert meshes == [(2, 2, 2), (1, 4, 2), (4, 1, 2)]
    assert isinstance(config.model, Model)
    assert (config.model.residual, config.model.attention_form, config.model.maha.scales) == ("mhc", "maha", 4)
    assert 3.3e9 < weights.num_params(config.model) < 3.5e9
    assert (config.loop.rows, config.loop.seq_len, config.loop.steps, config.run.seed) == (32, 4096, 100_000, 42)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.max_grad_norm) == (3e-4, 0.1, 1.0)
    assert (optimizer.b1, optimizer.b2, config.alerts.min_tokens_per_second) == (0.9, 0.999, 20_000)
    assert config.topology.devices == 8


@pytest.mark.parametrize("form", ["mhc", "mhc_lite", "nash_hc"])
def test_the_estimate_counts_the_weights_of_the_forms(form: str) -> None:
    cfg = Model(**load_group("model/llama3_1b") | {"num_kv_heads": 32, "residual": form, "attention_form": "maha"})
    assert estimate_num_params(cfg) == pytest.approx(weights.num_params(cfg), rel=1e-3)
