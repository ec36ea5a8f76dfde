"""Findings of the chips' memory: what `slipway fit` was told, and what is known without it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from controller.checks.fit import cache_file, estimate_num_params, lasting_bytes
from controller.checks.preflight import preflight
from controller.cli import main
from tests.composed import config_of as config

LARGE = ["+experiment=gemma2b_gsm8k", "cloud.project=acme"]


@pytest.fixture
def state(tmp_path: Path) -> str:
    return f"run.state_dir={tmp_path / 'state'}"


def said(*overrides: str) -> list[str]:
    return [f"{f.severity} {f}" for f in preflight(config(*overrides)) if f.check == "fit"]


def document(peak: float, fix: list[str] | None = None) -> dict[str, Any]:
    programs = [{"name": "update", "fits": peak <= 14.99, "peak_gib": peak}]
    return {"format": 1, "usable_gib": 14.99, "programs": programs, "fix": fix and {"overrides": fix, "programs": []}}


def store(found: dict[str, Any], *overrides: str) -> None:
    file = cache_file(config(*overrides))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found))


def test_a_large_model_nobody_asked_about_is_a_note(state):
    assert said(*LARGE, state) == [
        "note model: memory use is unknown; run `slipway fit` to check that it fits the chips"
    ]


def test_small_models_and_the_emulated_cloud_are_not_commented_on(state):
    assert said("+experiment=quickstart", "cloud=gcp", "cloud.project=acme", state) == []
    assert said(*LARGE, "cloud=local", state) == []


def test_what_stays_in_memory_is_known_without_the_compiler(state):
    """The compiler found 9.5, 4.7 and 19 GiB of weights and moments on the three meshes."""
    nash = ["+experiment=nash_mhc_3b", "cloud.project=acme", state]
    for mesh in ("mesh=balanced", "mesh=fsdp_heavy"):
        assert said(*nash, mesh)[0].startswith("note model: memory use is unknown")
    assert said(*nash, "mesh=data_heavy") == [
        "warning mesh: on mesh 4 x 1 x 2, weights, gradients and optimizer state take 25.2 GiB of each device's 32.0; "
        "run `slipway fit` to see what activations add; split them over more devices (mesh.fsdp, mesh.tensor), or use "
        "a larger slice"
    ]
    [none] = said(*nash, "mesh=data")
    assert none.startswith(
        "error mesh: on mesh 8 x 1 x 1, weights and optimizer state take 37.8 GiB of each device's 32"
    )
    store(document(12.0), *nash, "mesh=data_heavy")
    assert said(*nash, "mesh=data_heavy") == [], "the compiler knows better"


@pytest.mark.parametrize(
    ("words", "of_state", "of_gradients"),
    [
        (["optimizer=adamw", "loop.kl_coef=0"], 12, 4),
        (["optimizer=adamw", "loop.kl_coef=0", "optimizer.ema_decay=0.9"], 16, 4),
        (["optimizer=lion", "loop.kl_coef=0.1", "loop.reference_dtype=null"], 12, 4),
        (["optimizer=adafactor", "loop.kl_coef=0.1", "loop.reference_dtype=bfloat16"], 6, 4),
        (["optimizer=muon", "loop.kl_coef=0"], 8, 4),
        (["model.lora={r: 8, lora_alpha: 8, target_modules: [layers.*]}"], 2, 0),
    ],
)
def test_bytes_per_weight_of_each_optimizer(state, words, of_state, of_gradients):
    base = [
        "program=trainer",
        "program.command=[]",
        "data=arithmetic",
        "model=gemma2_2b",
        "loop=grpo",
        "optimizer=adamw",
    ]
    found = config(*base, state, *words)
    assert found.model is not None
    weights = estimate_num_params(found.model)
    assert lasting_bytes(found, found.model) == (of_state * weights, of_gradients * weights)


def test_adapters_of_experts_are_counted(state):
    """Trained weights with moments and gradients beside frozen ones of two bytes."""
    of = "program=trainer", "program.command=[]", "data=arithmetic", "loop=grpo", "optimizer=adamw", "loop.kl_coef=0"
    for modules, each in (("layers.query", 0), ("layers.expert_*", 3), ("layers.*", 3), ("layers.expert_up", 1)):
        lora = f"model.lora={{r: 8, lora_alpha: 8, target_modules: ['{modules}']}}"
        found = config(*of, "model=qwen3_30b_a3b", lora, state)
        assert found.model is not None
        adapters = each * 48 * 128 * 8 * (2048 + 768)
        frozen = 2 * estimate_num_params(found.model)
        assert lasting_bytes(found, found.model) == (frozen + 12 * adapters, 4 * adapters)


def test_what_fits_is_not_commented_on(state):
    store(document(12.0), *LARGE, state)
    assert said(*LARGE, state) == []
    assert said(*LARGE, state, "optimizer.lr=3e-6", "loop.steps=8", "model.weights=/weights") == []  # as large


def test_what_does_not_fit_is_an_error_and_says_what_helps(state):
    store(document(18.3, ["model.remat=full", "loop.micro_batch_size=2"]), *LARGE, state)
    assert said(*LARGE, state) == [
        "error model: update needs 18.30 GiB per chip (usable: 14.99); "
        "it fits with model.remat=full loop.micro_batch_size=2"
    ]
    store(document(18.3), *LARGE, state)
    assert said(*LARGE, state)[0].endswith("(usable: 14.99); see `slipway fit`")


@pytest.mark.parametrize("change", ["model.remat=attention", "loop.group_size=4", "mesh.data=2", "tpu=v6e_8"])
def test_another_size_is_another_question(state, change):
    store(document(18.3), *LARGE, state)
    assert said(*LARGE, state, change)[0].startswith("note")


def test_a_broken_file_counts_as_none(state):
    store(document(18.3), *LARGE, state)
    cache_file(config(*LARGE, state)).write_text("{")
    assert said(*LARGE, state)[0].startswith("note")


@pytest.mark.parametrize(("model", "billions"), [("gemma2_2b", 2.61), ("llama3_8b", 8.03), ("qwen3_0_6b", 0.6)])
def test_the_number_of_weights_is_about_right(state, model, billions):
    found = config("+experiment=nanochat_d16", state, f"model={model}").model
    assert found is not None
    assert estimate_num_params(found) == pytest.approx(billions * 1e9, rel=0.02)


def test_slipway_fit_keeps_what_it_was_told(state, monkeypatch, capsys):
    """Also where an earlier answer stands against the run: it asks again."""

    def answer(command: list[str], check: bool, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        Path(command[command.index("--out") + 1]).write_text(json.dumps(document(18.3)))
        return subprocess.CompletedProcess(command, 2)

    monkeypatch.setattr(subprocess, "run", answer)
    for _ in range(2):
        assert main.run(["fit", *LARGE, state]) == 2
    told = capsys.readouterr().err
    assert told.count("compiling each program for the TPU") == 2, "in a file too"
    assert "memory use is unknown" not in told
    assert said(*LARGE, state)[0].startswith("error")
