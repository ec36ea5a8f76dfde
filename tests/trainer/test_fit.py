"""`python -m trainer.fit`: verdicts of the TPU compiler, where it is installed; a clear word where it is not."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.groups import group
from trainer import fit

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")


def run(raw: dict, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "trainer.fit", str(file), *flags]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # those are for CPU tests
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


def on(raw: dict, accelerator_type: str, devices: int, mesh: dict, **model: object) -> dict:
    pod = raw["pod"] | {"accelerator_type": accelerator_type, "workers": 1, "devices": devices}
    pod |= {"backend": "tpu", "hbm_bytes_per_chip": 17_200_000_000}
    return raw | {"pod": pod, "mesh": mesh, "model": raw["model"] | model}


SPLIT = {"data": 2, "fsdp": 2, "tensor": 2}
CAPPED = {"activation_dtype": "bfloat16", "scan_layers": True, "remat": "full", "attention_softcap": 50.0}


@needs_compiler
@pytest.mark.parametrize(
    ("accelerator_type", "devices", "mesh"),
    [
        ("v5litepod-8", 8, SPLIT),
        ("v6e-8", 8, SPLIT),
        ("v5litepod-1", 1, {"data": 1, "fsdp": 1, "tensor": 1}),
        ("v4-16", 8, SPLIT),
    ],
)
def test_the_programs_of_grpo_compile_for_a_slice(grpo_run, tmp_path, accelerator_type, devices, mesh):
    """With the TPU's attention kernel: soft-cap, a local window, grouped queries; its gradient too."""
    raw = on(grpo_run, accelerator_type, devices, mesh, **CAPPED, head_dim=64, window=16)
    ended = run(raw, tmp_path, "--json")
    assert ended.returncode == 0, ended.stderr[-2000:]
    verdicts = {v["name"]: v for v in json.loads(ended.stdout)["programs"]}
    assert verdicts.keys() == {"update", "warm_start", "logprob", "decode"}
    for verdict in verdicts.values():
        assert verdict["fits"]
        assert 0 < verdict["peak_gib"] < verdict["hbm_gib"] == 16.019
    assert verdicts["update"]["recomputed_flops"] > 0


@needs_compiler
def test_what_does_not_fit_is_told_with_exit_2(lm_run, tmp_path):
    large = group("model/gemma2_2b")  # 31 GB of weights and moments on 16
    raw = on(lm_run, "v5litepod-1", 1, {"data": 1, "fsdp": 1, "tensor": 1}) | {"model": large}
    raw["loop"] |= {"total_batch_tokens": 128, "sequence": 128}
    ended = run(raw, tmp_path)
    assert ended.returncode == 2
    assert "NO" in ended.stdout
    assert "Traceback" not in ended.stderr


def test_without_the_compiler_there_is_a_clear_word(lm_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(lm_run))
    assert fit.main([str(file)]) == 2
    assert capsys.readouterr().err.startswith("the TPU compiler is not installed: python -m pip install libtpu")


@pytest.mark.parametrize(
    ("words", "gib"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.82G of 15.75G hbm.", 20.82),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (30.79G) "
            "exceeds available HBM (15.75G).",
            30.79,
        ),
        ("RESOURCE_EXHAUSTED: something else", float("inf")),
    ],
)
def test_what_would_have_been_needed_is_read_from_the_compilers_words(words, gib):
    assert fit.wanted_gib(words) == gib


def test_any_other_complaint_of_the_compiler_is_passed_on():
    with pytest.raises(fit.CannotTellError, match="refuses the program: INTERNAL: no such thing"):
        fit.wanted_gib("INTERNAL: no such thing\nmore")
