"""The puzzle loop: epochs, curricula, exact resumes on other meshes, and errors before the first update."""

import io
import json
import shutil
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image
from pydantic import TypeAdapter, ValidationError
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from conf.schema.base import UnevenError
from conf.schema.training.loop_parts import PuzzleLoop, Trm
from conf.schema.training.optimizer import Optimizer
from conf.schema.training.run_yaml import RunFile
from tests.groups import load_group
from tests.paths import ROOT
from tests.trainer.conftest import make_mesh
from tests.trainer.lives import SharedPrograms, changed, lines_of, run_until, saved, train
from tests.trainer.models.test_trm import make_trm
from trainer import convert
from trainer.distributed import mesh as meshes
from trainer.distributed.runtime import shard_batch
from trainer.loops import puzzle
from trainer.losses import puzzle as losses
from trainer.step import train_step


def make_loop(**changes: Any) -> PuzzleLoop:
    return PuzzleLoop.model_validate(load_group("loop/puzzle") | changes)


def final_state(raw: dict[str, Any]) -> Any:
    experiment = RunFile.model_validate(raw)
    mesh = meshes.build_mesh(experiment.mesh)
    return saved(raw, abstract=puzzle._abstract_state(experiment, *puzzle._sections(experiment, mesh), mesh))[0][0]


def trained(lines: list[dict]) -> list[dict]:
    """What the lines of updates say beside times and sizes."""
    left_out = ("examples_per_second", *(name for line in lines for name in line if "time" in name or "_gib" in name))
    return [{n: v for n, v in line.items() if n not in left_out} for line in lines if line["phase"] == "train"]


def test_epochs_become_updates_and_what_contradicts_itself_is_refused() -> None:
    for batch, steps in ((768, 65_104), (256, 195_312), (6144, 8_138)):
        assert make_loop(batch_size=batch).steps == steps
        assert make_loop(batch_size=batch, steps=steps).steps == steps  # as a resolved config says it again
    with pytest.raises(ValidationError, match=r"50000 epochs are 65104 updates; set either epochs or steps to null"):
        make_loop(steps=100)
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        make_loop(supervision_steps=0)
    with pytest.raises(UnevenError, match=r"769 puzzles cannot be split evenly over 64 devices; use 768 or") as caught:
        make_loop(batch_size=769).accumulation(64)
    assert caught.value.key == "loop.batch_size"


def test_a_curriculum_grows_linearly_to_the_models_own_cycles() -> None:
    curriculum = {"h_cycles": 1, "l_cycles": 2, "epochs": 10_000}
    loop, cfg = make_loop(batch_size=6144, curriculum=curriculum), Trm.model_validate(load_group("model/trm"))
    assert puzzle.all_cycles(cfg, loop) == [(1, 2), (1, 3), (2, 4), (2, 5), (3, 6)]
    assert puzzle.cycles_of(cfg, loop, 813) == (1, 3)
    assert puzzle.cycles_of(cfg, loop, 814) == (2, 4)  # half of 10,000 epochs
    assert puzzle.cycles_of(cfg, loop, 8_000) == (3, 6)


def test_exploration_is_drawn_evenly_and_anneals() -> None:
    loop = make_loop(batch_size=20_000, halt_exploration=0.3, halt_exploration_final=0.05, epochs=None, steps=101)
    for iteration, share in ((0, 0.3), (50, 0.175), (100, 0.05)):
        counts = Counter(puzzle.exploration(loop, 7, iteration).tolist())
        assert set(counts) == {0, *range(2, 17)}
        assert 1 - counts.pop(0) / 20_000 == pytest.approx(share, abs=0.01)
        assert max(counts.values()) < 1.5 * min(counts.values()) + 30
    np.testing.assert_array_equal(puzzle.exploration(loop, 7, 3), puzzle.exploration(loop, 7, 3))
    assert (puzzle.exploration(loop, 7, 3) != puzzle.exploration(loop, 8, 3)).any()


@pytest.mark.deep
def test_a_resumed_run_equals_an_uninterrupted_one(
    puzzle_run: dict[str, Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The carry is in the checkpoint. The same devices give the same bits; another mesh begins with the same state."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "extend")
    own: dict[str, Any] = {"evaluations": {"solved": "my_evaluation:solved"}}
    own["curriculum"] = {"h_cycles": 1, "l_cycles": 1, "epochs": 2}
    run = changed(puzzle_run, loop=own, checkpoint={"save_interval": 4})
    whole, cut = (changed(run, dir=str(tmp_path / name)) for name in ("whole", "cut"))
    SharedPrograms().install(monkeypatch)
    expected = train(whole, tmp_path / "whole-local")
    run_until(cut, tmp_path / "first-life", 4, monkeypatch)
    shutil.copytree(tmp_path / "cut", tmp_path / "elsewhere")
    resumed = train(cut, tmp_path / "second-life")
    monkeypatch.undo()
    assert trained(resumed) == trained(expected)
    state = final_state(whole)
    assert Counter(np.asarray(state.carry.steps).tolist()).keys() <= {1, 2, 3}
    jax.tree.map(np.testing.assert_array_equal, final_state(cut), state)
    elsewhere = changed(run, dir=str(tmp_path / "elsewhere"), mesh={"data": 2, "fsdp": 4})
    half = [final_state(changed(elsewhere, mesh=mesh)) for mesh in (run["mesh"], elsewhere["mesh"])]
    jax.tree.map(np.testing.assert_array_equal, *half)
    result = json.loads((tmp_path / "whole-local/summary.json").read_text())
    assert result["eval_puzzles"] == 20
    assert result["eval_solved_exact"] == result["eval_exact_accuracy"]
    assert result["eval_exact_accuracy_low"] <= result["eval_exact_accuracy"] <= result["eval_exact_accuracy_high"]
    assert result["eval_gap"] == result["eval_train_exact_accuracy"] - result["eval_exact_accuracy"]
    checkpoint, copy = f"{whole['dir']}/checkpoints/8", tmp_path / "copy"
    assert convert.main(["export", checkpoint, str(copy), "--format", "slipway"]) == 0
    assert convert.main(["export", checkpoint, str(tmp_path / "hf")]) == 2
    assert "transformers has no trm; use `--format slipway`" in capsys.readouterr().err
    experiment = RunFile.model_validate(changed(whole, model={"weights": str(copy)}))
    again = train_step.init_state(experiment.model, experiment.optimizer, make_mesh(8, 1, 1), jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, again.params, train_step.eval_params(state))
    boards = lines_of(tmp_path / "whole-local", "transcripts.jsonl")
    assert len(boards) == 4
    assert boards[0]["board"]["steps"].keys() >= {"1"}
    events = [event for file in (tmp_path / "whole-local/tb").iterdir() for event in EventFileLoader(str(file)).Load()]
    logged = [(event.step, value) for event in events for value in event.summary.value if value.tag == "boards/1"]
    assert [step for step, _ in logged] == [4, 8]
    width, height, png = logged[0][1].tensor.string_val  # as the loader migrates a picture
    assert Image.open(io.BytesIO(png)).size == (int(width), int(height))


def test_evaluations_take_the_average_and_the_last_one_also_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def solve(self: Any, params: Any, batches: Any, between: Any) -> Any:
        asked.append(params["net"])
        halves = np.full(2, 0.5 if params["net"] == "average" else 0.25)
        return {"exact": np.ones((2, 3), bool), "halt": np.ones((2, 3)), "cells": halves, "nats": halves}, halves, []

    for name, stub in (("__init__", lambda self: None), ("solve", solve), ("_show", lambda *words: None)):
        monkeypatch.setattr(puzzle.PuzzleUpdates, name, stub)
    compiled: Any = puzzle.PuzzleUpdates()  # pyright: ignore[reportCallIssue]
    compiled.loop = make_loop(epochs=None, steps=8, eval_train_puzzles=0)
    compiled.dataset = SimpleNamespace(test_batches=lambda size, count: iter(()))
    state = train_step.State(None, {"net": "weights"}, None, None, {"net": "average"})
    assert compiled.evaluate(state, 4, lambda: None)["eval_cell_accuracy"] == 0.5
    assert asked == ["average"]
    assert compiled.evaluate(state, 8, lambda: None)["eval_cell_accuracy"] == 0.5
    assert asked == ["average", "average", "weights"]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("sizes", "dtype", "mixer"),
    [
        ((2, 2, 2), "float32", "attention"),
        pytest.param((1, 1, 1), "bfloat16", "attention", marks=pytest.mark.wide),
        pytest.param((1, 1, 1), "float16", "mlp", marks=pytest.mark.wide),
    ],
)
def test_other_meshes_and_types_of_activations_have_the_numbers_of_one_device(
    sizes: tuple[int, ...], dtype: str, mixer: str
) -> None:
    """Two updates from equal weights: losses, gradients, halting and states."""
    more = {"position_embedding": "rope"} if mixer == "attention" else {}
    cfg = make_trm(h_cycles=1, l_cycles=1, mixer=mixer, **more)
    one, alone = two_updates(cfg, 1, 1, 1)
    several, carry = two_updates(cfg.model_copy(update={"activation_dtype": dtype}), *sizes)
    assert carry.latents.h.dtype == dtype
    if dtype != "float32":
        assert float(several["loss"]) == pytest.approx(float(one["loss"]), rel=0.02)
        return
    for name in ("loss", "grad_norm", "q_loss"):
        assert float(several[name]) == pytest.approx(float(one[name]), rel=1e-4), name
    np.testing.assert_array_equal(carry.steps, alone.steps)
    np.testing.assert_allclose(carry.latents.h, alone.latents.h, atol=1e-3)


@cache
def two_updates(cfg: Trm, *sizes: int) -> tuple[dict[str, Any], Any]:
    """Metrics of the second update, and the carry after it."""
    mesh, loop = make_mesh(*sizes), make_loop(batch_size=8, supervision_steps=3)
    opt = TypeAdapter(Optimizer).validate_python(load_group("optimizer/adam_atan2"))
    wide = cfg.model_copy(update={"activation_dtype": "float32"})
    first = jax.device_get(train_step.init_state(wide, opt, make_mesh(1, 1, 1), jax.random.key(0)))
    placed = jax.tree.map(lambda _: meshes.named_sharding(mesh, "batch"), losses.initial_carry(cfg, 8))
    with jax.set_mesh(mesh):
        carry = jax.jit(lambda: losses.initial_carry(cfg, 8), out_shardings=placed)()
        state = jax.device_put(first, train_step.state_shardings(cfg, opt, mesh))._replace(carry=carry)
        update = train_step.build_carry_update(losses.loss(cfg, loop), cfg, opt, mesh, placed)
        for i in (1, 2):
            cells = np.random.default_rng(i).integers(1, 6, (2, 8, 16)).astype(np.int32)
            least = np.zeros(8, np.int32)
            batch = {"inputs": cells[0], "labels": cells[1], "ids": least, "min_steps": least}
            state, metrics = update(state, shard_batch(batch, mesh))
        return jax.device_get((metrics, state.carry))
