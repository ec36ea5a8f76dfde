"""`python -m trainer.fit`: verdicts of the TPU compiler, where it is installed; a clear word where it is not."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import yaml
from jax.sharding import Mesh

from conf.schema.topology import find_topology
from conf.schema.training.layer_kinds import attended_entries
from conf.schema.training.run_yaml import RunFile
from tests.conftest import wide
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from trainer.fit import memory, report, slices
from trainer.fit.memory import CompilerError
from trainer.fit.remat import USABLE_HBM_FRACTION, fits, programs
from trainer.models import experts, weights
from trainer.step.program import Program

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")


def run(raw: dict, folder: Path, *flags: str, code: int = 0, seconds: float = 540) -> subprocess.CompletedProcess[str]:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "trainer.fit", str(file), *flags]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # those are for CPU tests
    ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=env)
    assert ended.returncode == code, ended.stderr[-2000:]
    return ended


def on(raw: dict, accelerator_type: str, devices: int, mesh: dict, **model: object) -> dict:
    pod = raw["pod"] | {"accelerator_type": accelerator_type, "workers": 1, "devices": devices}
    pod |= {"backend": "tpu", "hbm_bytes_per_chip": 17_200_000_000}
    return raw | {"pod": pod, "mesh": mesh, "model": raw["model"] | model}


GIB = 2**30
PROGRAMS = {"update", "warm_start", "logprob", "reshard", "prefill", "admit", "decode", "resident"}
ONE = {"data": 1, "fsdp": 1, "tensor": 1}
CAPPED = {"activation_dtype": "bfloat16", "scan_layers": True, "remat": "full", "attn_logit_softcap": 50.0}


@needs_compiler
@pytest.mark.parametrize("accelerator_type", ["v5litepod-8", "v6e-8", "v5litepod-1", "v4-16"])
def test_the_programs_of_grpo_compile_for_a_slice(grpo_run, tmp_path, accelerator_type):
    """With the TPU's attention kernel: soft-cap, a local window, grouped queries; its gradient too."""
    devices, mesh = (1, ONE) if accelerator_type == "v5litepod-1" else (8, {"data": 2, "fsdp": 2, "tensor": 2})
    raw = on(grpo_run, accelerator_type, devices, mesh, **CAPPED, head_dim=64, sliding_window=16)
    ended = run(raw, tmp_path, "--json")
    verdicts = {v["name"]: v for v in json.loads(ended.stdout)["programs"]}
    assert verdicts.keys() == PROGRAMS
    for name, found in verdicts.items():
        assert found["fits"]
        assert 0 <= found["peak_gib"] < found["hbm_gib"] == 16.019
        assert found["peak_gib"] > 0 or name in ("resident", "reshard")  # weights of less than half a MiB per chip
    assert verdicts["update"]["recomputed_flops"] > 0


def test_operations_are_those_of_rows_by_themselves_where_a_kernel_computes_them(grpo_run):
    def counted(attention: str, micro_batch_size: int | None) -> float:
        sizes = {"prompts_per_step": 2, "group_size": 8, "updates_per_rollout": 1, "micro_batch_size": micro_batch_size}
        raw = grpo_run | {"loop": grpo_run["loop"] | sizes, "model": grpo_run["model"] | {"attention": attention}}
        return memory.count_flops("logprob", RunFile.model_validate(raw), make_mesh(1, 1, 1))

    assert counted("splash", None) == counted("plain", 17) > 2 * counted("plain", None)


EXPERTS = ("qwen3_30b_a3b", "qwen3_5_35b_a3b")
SIZES = (
    *("mistral_7b", "ministral_8b", "ministral3_8b", "smollm3_3b", "olmo2_7b", "olmo3_7b", "phi4"),
    *("granite3_2b", "granite3_8b", "gemma4_12b", "gemma4_26b_a4b", "gemma4_31b"),
)


@pytest.mark.parametrize(
    "name",
    ["phi4_mini", "gemma4_e2b", "gpt_oss_20b", "qwen3_5_0_8b", *EXPERTS, *wide(*SIZES, "gemma1_2b")],
)
def test_operations_of_an_update_of_a_newer_family_are_those_of_its_matrices(lm_run, name):
    """Six per weight and token, of logits eight, since those are computed again, and of attention twelve per pair."""
    rows, length = 8, 256
    loop = lm_run["loop"] | {"total_batch_tokens": rows * length, "seq_len": length, "micro_batch_size": None}
    raw = lm_run | {"model": load_group(f"model/{name}") | {"remat": "none", "sliding_window": length}, "loop": loop}
    experiment, mesh = RunFile.model_validate(raw), make_mesh(2, 4, 1)
    model = experiment.decoder
    layers, uses = weights.weight_table(model)["layers"], experts.uses_per_token(model)
    matrices = sum(
        math.prod(w.shape) * uses.get(name, 1)
        for name, w in layers.items()
        if w.axes[1:] != ("embed",) and not re.search("norm|_(bias|logits|log|kernel)$", name) and "vocab" not in w.axes
    )
    expected = (6 * matrices + 8 * model.vocab_size * model.dim) * rows * length
    expected += 12 * attended_entries(model, length) * rows * length
    if model.experts is not None and model.biases == "all":  # of experts, by products too
        inner, outer = 4 * model.experts.per_token * model.mlp_dim, 6 * model.dim
        expected += (inner + outer) * model.experts.count * model.num_layers * rows * length
    assert memory.count_flops("update", experiment, mesh) == pytest.approx(expected, rel=1e-5)
    grpo = RunFile.model_validate(raw | {"data": load_group("data/arithmetic"), "loop": load_group("loop/grpo")})
    assert {program.name for program in programs(grpo, mesh)} >= {"update", "prefill", "decode", "resident"}


@needs_compiler
def test_what_does_not_fit_is_told_with_exit_2(lm_run, tmp_path):
    large = load_group("model/gemma2_2b")  # 31 GB of weights and moments on 16
    raw = on(lm_run, "v5litepod-1", 1, ONE) | {"model": large}
    raw["loop"] |= {"total_batch_tokens": 128, "seq_len": 128}
    ended = run(raw, tmp_path, "--out", str(tmp_path / "fit.json"), code=2)
    assert "NO" in ended.stdout
    assert "no other model.remat, model.logit_chunk, loop.micro_batch_size or mesh.fsdp makes it fit" in ended.stdout
    assert "Traceback" not in ended.stderr
    found = json.loads((tmp_path / "fit.json").read_text())
    assert found["fix"] is None
    short = {v["name"]: v["short_gib"] for v in found["programs"]}
    assert short["update"] > short["resident"] > 10


@needs_compiler
def test_what_helps_is_found_on_a_chip_that_is_too_small(lm_run, tmp_path):
    """The update needs 0.34 GiB by libtpu 0.0.50.1, 0.18 by 0.0.52, and less if it keeps little."""
    wide = {"dim": 128, "mlp_dim": 4096, "attention": "plain", "remat": "none", "scan_layers": True}
    raw = on(lm_run, "v5litepod-1", 1, ONE, **wide)
    raw["loop"] |= {"total_batch_tokens": 16 * 256, "seq_len": 256, "micro_batch_size": None}
    (needed,) = json.loads(run(raw, tmp_path, "--json", "--only", "update").stdout)["programs"]
    raw["pod"]["hbm_bytes_per_chip"] = int(0.95 * needed["peak_gib"] * GIB / USABLE_HBM_FRACTION)
    ended = run(raw, tmp_path, "--json", code=2)
    found = json.loads(ended.stdout)
    assert next(v["short_gib"] for v in found["programs"] if v["name"] == "update") > 0
    assert re.search("tried model.remat=(full|chunks)", ended.stderr)
    assert all(v["fits"] for v in found["fix"]["programs"])


@needs_compiler
@pytest.mark.parametrize("experiment", ["gemma4_e2b_gsm8k", "qwen3_5_4b_gsm8k", "qwen3_30b_a3b_gsm8k"])
def test_the_sampler_of_the_experiments_with_large_models_fits(experiment, tmp_path):
    """On the slices that they rent; the sampler's copy is moved in parts, each beside those before it."""
    from controller.config.compose import compose
    from controller.config.run_yaml import render

    config, problems = compose([f"+experiment={experiment}", "cloud.project=a-project"])
    assert config is not None, problems
    assets = [*config.assets.datasets, *config.assets.models]
    raw = yaml.safe_load(render(config, "fit", "bucket", {name: name for name in assets}))
    only, parts = {"reshard", "decode"}, {f"reshard_{number}" for number in range(2, 20)}
    found = json.loads(run(raw, tmp_path, "--json", "--only", ",".join(only | parts), seconds=1800).stdout)["programs"]
    assert only < {verdict["name"] for verdict in found} < only | parts
    for verdict in found:
        assert verdict["fits"]
        assert verdict["peak_gib"] > 1


def needed(experiment: RunFile, name: str) -> memory.MemoryReport:
    """By a formula."""
    rows = experiment.loop.micro_batch_size or 4
    kept = {"none": 8, "products": 6, "outputs": 5, "attention": 4, "full": 3, "chunks": 3}
    peak = kept[experiment.model.remat] * rows + experiment.model.logit_chunk / 16 + 64 / experiment.mesh.fsdp
    peak, hbm = peak if name == "update" else 1.0, experiment.pod.hbm_bytes_per_chip or 0
    return memory.MemoryReport(name, fits(peak * GIB, experiment), peak, 0, 0, 0, 0, hbm, 0, 0, 0)


@pytest.mark.parametrize(
    ("usable", "helps"),
    [
        (97, ["model.remat=products"]),
        (84, ["model.remat=full"]),
        (77.5, ["model.remat=chunks", "model.logit_chunk=16"]),
        (68.5, ["model.remat=chunks", "model.logit_chunk=16", "loop.micro_batch_size=1"]),
        (13, ["model.remat=chunks", "model.logit_chunk=16", "loop.micro_batch_size=1", "mesh.data=1", "mesh.fsdp=8"]),
        (5, None),
    ],
)
def test_fixes_are_tried_in_order_and_the_first_that_helps_is_told(lm_run, usable, helps):
    """Of 8 x 4 for the rows, 8 for the logits and 64 for the weights there are 104 GiB to begin with."""
    raw = on(lm_run, "v5litepod-8", 8, {"data": 8, "fsdp": 1, "tensor": 1}, remat="none", logit_chunk=128)
    raw["pod"]["hbm_bytes_per_chip"] = int(usable * GIB / USABLE_HBM_FRACTION) + 1
    raw["loop"] |= {"total_batch_tokens": 32 * 20, "micro_batch_size": None}
    asked, experiment = [], RunFile.model_validate(raw)

    def compiler(experiment: RunFile, overrides: Any, names: set[str]) -> list[memory.MemoryReport]:
        asked.append(overrides)
        return [needed(experiment, name) for name in sorted(names or {"update", "eval"})]

    found = report.find_fix(experiment, compiler(experiment, {}, set()), compiler)
    if helps is None:
        assert found is None
        assert len(asked) == 1 + 4  # the strongest of each kind, and no other
    else:
        assert found is not None
        assert report.format_overrides(found[0]) == helps
        assert {v.name: v.fits for v in found[1]} == {"update": True, "eval": True}


def test_a_missing_compiler_or_an_unknown_slice_is_one_line(lm_run, tmp_path, monkeypatch, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(lm_run))
    with monkeypatch.context() as patch:
        patch.setattr(report, "require_compiler", lambda: None)
        assert report.main([str(file), "--slices", "v6e-8,v5e-8"]) == 2
    assert capsys.readouterr().err == "--slices: unknown type 'v5e-8'; closest: v5litepod-8\n"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for flags in ([], ["--slices", "v6e-8"]):
        assert report.main([str(file), *flags]) == 2
        said = capsys.readouterr().err
        assert said.startswith("the TPU compiler is not installed: run `python -m pip install libtpu")


@needs_compiler
@pytest.mark.deep
def test_slices_are_compared_by_the_compiler(lm_run, tmp_path):
    """With the TPU's attention kernel for documents that share a row, without soft-cap and window."""
    raw = on(lm_run, "v5litepod-1", 1, {"data": -1, "fsdp": 1, "tensor": 1}, **CAPPED | {"attn_logit_softcap": None})
    raw["model"] |= {"attention_pattern": "G", "head_dim": 64}
    raw["data"] |= {"packing": "documents"}
    raw["loop"] |= {"total_batch_tokens": 16 * 128, "seq_len": 128, "micro_batch_size": None}
    ended = run(raw, tmp_path, "--json", "--slices", "v5litepod-1,v6e-4", "--sort", "hours")
    rows = json.loads(ended.stdout)["slices"]
    assert sorted(row["accelerator_type"] for row in rows) == ["v5litepod-1", "v6e-4"]
    assert all(row["fits"] and "the chip computes an update in" in row["why"] for row in rows)  # a toy model
    assert all(v["seconds"] > 0 for row in rows for v in row["programs"] if v["name"] in ("update", "eval"))


def test_what_would_have_been_needed_is_read_from_the_compilers_words():
    """Any other complaint is passed on."""
    start = "RESOURCE_EXHAUSTED: Ran out of memory"
    for words, gib in {
        f"{start} in memory space hbm. Used 20.82G of 15.75G hbm.": 20.82,
        f"{start} on HBM, the total memory required for HLO temporaries (30.79G) exceeds available HBM (15G).": 30.79,
        "RESOURCE_EXHAUSTED: something else": float("inf"),
    }.items():
        assert memory.requested_gib(words) == gib
    with pytest.raises(CompilerError, match="rejects the program: INTERNAL: no such thing"):
        memory.requested_gib("INTERNAL: no such thing\nmore")


def test_a_schedule_that_jax_cannot_read_leaves_the_memory_and_no_forecast(lm_run):
    """As of nash_mhc_3b by libtpu 0.0.52, read by JAX 0.10.2."""
    experiment = RunFile.model_validate(on(lm_run, "v5litepod-1", 1, ONE))
    mesh = make_mesh(1, 1, 1)

    def as_text() -> str:
        raise jax.errors.JaxRuntimeError("INTERNAL: async-update instruction should have 1 operands but sees 3")

    sizes = {"argument_size_in_bytes": GIB, "temp_size_in_bytes": GIB, "peak_memory_in_bytes": 2 * GIB}
    compiled = SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**sizes), as_text=as_text)
    lowered = SimpleNamespace(compile=lambda: compiled)
    update = next(program for program in programs(experiment, mesh) if program.name == "update")
    fake = replace(update, function=SimpleNamespace(lower=lambda *arguments: lowered))
    found = memory.measure(fake, experiment, mesh)
    assert (found.fits, found.peak_gib, found.seconds) == (True, 2.0, 0.0)
    row = slices.report(experiment, find_topology("v5litepod-1"), [found], None, spot=False)
    assert row.fits
    assert "this version of JAX cannot read its schedule" in row.why


def test_a_compilation_is_told_when_it_begins_and_when_it_ends(lm_run, monkeypatch, capsys):
    """In a file too: each takes a minute if the model is large."""
    seen: list[str] = []

    def measure(program: Program, experiment: RunFile, mesh: Mesh) -> memory.MemoryReport:
        seen.append(capsys.readouterr().err)
        return memory.MemoryReport(program.name, True, 6.21, 0, 1, 1, 0, 15.75, 1, 0, 77.3)

    monkeypatch.setattr(memory, "measure", measure)
    found = memory.measure_all(RunFile.model_validate(lm_run), make_mesh(1, 1, 1), {"update", "eval"})
    first, second = [report.name for report in found]
    ended = "6.21 GiB of 15.75, 77 s\n"
    assert seen == [f"compiling {first} …\n", f"{first}: {ended}compiling {second} …\n"]
    assert capsys.readouterr().err == f"{second}: {ended}"


@pytest.mark.parametrize("names", [["update", "resize_768_to_1536"], ["update"], []])
def test_the_columns_of_programs_stand_below_their_titles(names, lm_run):
    verdicts = [memory.MemoryReport(name, True, 6.21, 0, 1, 1, 0, 15.75, 1, 0, 77.3) for name in names]
    _, head, *rows = report.report_lines(RunFile.model_validate(lm_run), verdicts)
    assert {row.index(" yes ") + 1 for row in rows} <= {head.index("fits")}
    assert {len(row) for row in rows} <= {len(head)}
