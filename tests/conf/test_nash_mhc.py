"""Guide 3's native experiments: what they take from the guide, meshes, and equal sizes in the sweep of the forms."""

from __future__ import annotations

import pytest

from conf.schema.training.model import Model
from controller.checks.fit import estimate_num_params
from controller.config.compose import compose_variants
from controller.sweep.grid import expand_grid
from tests.groups import load_group
from tests.paths import ROOT
from trainer.models import weights
from trainer.telemetry import throughput

PROJECT = "cloud.project=a-project"


def test_the_cases_of_the_sweep_have_equal_parameters_or_equal_work() -> None:
    """Composing all takes seconds, so the model's keys are set as the words say."""
    words = ["+experiment=nash_mhc_small", "sweep=nash_ablation"]
    [(base, problems)] = compose_variants([words])
    assert base is not None, problems
    assert isinstance(base.model, Model)
    assert isinstance(base.loop.seq_len, int)
    variants = expand_grid(words, base.sweep, ROOT)
    assert len(variants) == 36
    sizes = {}
    for name, case in base.sweep.cases.items():
        changes = dict(word.removeprefix("model.").split("=") for word in case)
        cfg = Model.model_validate(base.model.model_dump() | changes | {"mlp_dim": int(changes.get("mlp_dim", 1368))})
        sizes[name] = weights.num_params(cfg), throughput.model_flops(cfg, 1, base.loop.seq_len)
    params, flops = sizes["mhc_maha"]
    for name, (own_params, own_flops) in sizes.items():
        if not name.endswith("_flops"):
            assert own_params == pytest.approx(params, rel=1e-3), name
        if not name.endswith("_params"):
            assert own_flops == pytest.approx(flops, rel=1e-3), name


def test_the_large_one_has_the_guides_values() -> None:
    found = compose_variants(
        [["+experiment=nash_mhc_3b", PROJECT, *words] for words in ([], ["mesh=fsdp_heavy"], ["mesh=data_heavy"])]
    )
    configs = []
    for config, problems in found:
        assert config is not None, problems
        configs.append(config)
    meshes = [(c.mesh.data, c.mesh.fsdp, c.mesh.tensor) for c in configs]
    assert meshes == [(2, 2, 2), (1, 4, 2), (4, 1, 2)]
    config = configs[0]
    assert isinstance(config.model, Model)
    assert (config.model.residual, config.model.attention_form, config.model.maha.scales) == ("mhc", "maha", 4)
    assert 3.3e9 < weights.num_params(config.model) < 3.5e9
    assert (config.loop.rows, config.loop.seq_len, config.loop.steps, config.run.seed) == (32, 4096, 100_000, 42)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.max_grad_norm) == (3e-4, 0.1, 1.0)
    assert config.topology.devices == 8


@pytest.mark.parametrize("form", ["mhc", "mhc_lite", "nash_hc"])
def test_the_estimate_counts_the_weights_of_the_forms(form: str) -> None:
    cfg = Model(**load_group("model/llama3_1b") | {"num_kv_heads": 32, "residual": form, "attention_form": "maha"})
    assert estimate_num_params(cfg) == pytest.approx(weights.num_params(cfg), rel=1e-3)
