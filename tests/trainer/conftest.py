"""Models, meshes and runs for the tests of the trainer, on the eight virtual devices of tests/conftest.py."""

import math
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, Mesh

from conf.schema.training.model import Model
from conf.schema.training.optimizer import Adamw
from conf.schema.training.run_yaml import RunFile
from tests.groups import CONF, load_group, load_yaml
from trainer.distributed.mesh import MESH_AXES
from trainer.puzzles.__main__ import main as make_puzzles


def pytest_configure() -> None:
    """Repeat what tests/conftest.py says: with the path of a test as argument, JAX is imported before that."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One persistent compilation cache for this session and the programs it starts."""
    folder = str(tmp_path_factory.mktemp("compile_cache"))
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


def make_mesh(*sizes: int) -> Mesh:
    """A mesh (data, fsdp, tensor, expert) over the first devices; axes at the end may be left out."""
    sizes += (1,) * (len(MESH_AXES) - len(sizes))
    auto = (AxisType.Auto,) * len(MESH_AXES)
    return jax.make_mesh(sizes, MESH_AXES, axis_types=auto, devices=jax.devices()[: math.prod(sizes)])


@pytest.fixture(scope="session")
def tiny() -> Model:
    """The tiny model with soft-caps low enough to matter."""
    return Model(
        **load_group("model/tiny") | {"attn_logit_softcap": 2.0, "final_logit_softcap": 3.0, "sliding_window": 5}
    )


@pytest.fixture(scope="session")
def adamw() -> Adamw:
    """Of the YAML group, without warm-up."""
    return Adamw(**load_group("optimizer/adamw") | {"schedule": {"kind": "constant", "warmup_steps": 0}})


@pytest.fixture
def lm_run(tmp_path: Path) -> dict[str, Any]:
    return make_lm_run(tmp_path)


def make_lm_run(folder: Path) -> dict[str, Any]:
    """A run.yaml, as data, of a few steps of the LM loop on one worker with eight devices."""
    text = folder / "corpus.txt"
    text.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}. " for i in range(300)))
    defaults, names = load_yaml(CONF / "config.yaml"), {"format": 1, "id": "lm-test", "name": "lm", "seed": 7}
    raw = names | {
        "dir": str(folder / "bucket"),
        "compile_cache": False,
        "pod": {"accelerator_type": "v5litepod-8", "workers": 1, "devices": 8, "backend": "cpu"}
        | dict.fromkeys(("hbm_bytes_per_chip", "bf16_flops_per_chip")),
        "model": load_group("model/tiny")
        | {"vocab_size": 256, "num_layers": 1, "dim": 32, "mlp_dim": 64, "logit_chunk": 8},
        "data": load_group("data/text") | {"path": str(text), "eval_fraction": 0.2},
        "loop": load_group("loop/lm")
        | {"steps": 6, "total_batch_tokens": 320, "seq_len": 20}
        | {"eval_interval": 4, "eval_batches": 2},
        "optimizer": load_group("optimizer/adamw"),
        "mesh": load_group("mesh/data"),
        "checkpoint": defaults["checkpoint"] | {"save_interval": 2, "max_to_keep": 2, "verify_interval": 3},
        "logging": defaults["logging"] | {"log_interval": 1},
    }
    RunFile.model_validate(raw)
    return raw


@pytest.fixture
def puzzle_run(lm_run: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Eight updates of the puzzle loop on generated 4x4 sudokus."""
    options = ["--subsample", "24", "--test", "20", "--side", "4", "--augment", "3"]
    assert make_puzzles(["sudoku", "--source", "generated", "--output", str(tmp_path / "puzzles"), *options]) == 0
    sizes = {"vocab_size": 6, "seq_len": 16, "puzzle_len": 2, "dim": 16, "num_heads": 2, "num_layers": 1}
    sizes |= {"h_cycles": 2, "l_cycles": 2, "activation_dtype": "float32", "remat": "none"}
    loop = {"epochs": None, "steps": 8, "puzzles": 24, "batch_size": 8, "supervision_steps": 3, "eval_interval": 4}
    loop |= {"eval_puzzles": 12, "eval_puzzles_final": None, "eval_train_puzzles": 10, "boards": 2}
    return lm_run | {
        "model": load_group("model/trm") | sizes,
        "data": load_group("data/puzzles") | {"path": str(tmp_path / "puzzles")},
        "loop": load_group("loop/puzzle") | loop,
        "optimizer": load_group("optimizer/adam_atan2")
        | {"lr": 1e-3, "schedule": {"kind": "constant", "warmup_steps": 2}},
    }


@pytest.fixture
def grpo_run(tmp_path: Path) -> dict[str, Any]:
    return make_grpo_run(tmp_path)


def make_grpo_run(folder: Path) -> dict[str, Any]:
    """Three supervised updates, then two rollouts with two updates each."""
    loop = {"steps": 4, "prompts_per_step": 8, "group_size": 2, "updates_per_rollout": 2, "max_prompt_length": 28}
    loop |= {
        "max_new_tokens": 12,
        "filter_overlong_solutions": True,
        "warm_start_steps": 3,
        "warm_start_eval_interval": 2,
        "eval_interval": 3,
    }
    loop |= {"eval_prompts": 40, "test_samples_per_prompt": 2, "test_prompts": 5, "transcripts": 3}
    base = make_lm_run(folder)
    return base | {
        "model": load_group("model/tiny") | {"vocab_size": 260, "num_layers": 1, "dim": 32, "mlp_dim": 64},
        "data": load_group("data/arithmetic"),
        "loop": load_group("loop/grpo") | loop,
        "checkpoint": base["checkpoint"] | {"max_to_keep": 10},
    }
