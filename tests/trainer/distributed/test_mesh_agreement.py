"""Fifty updates have the same losses and gradients on any mesh, in one process and in four; devices hold their part."""

import re

import jax
import numpy as np
import pytest

from tests.conftest import deep
from tests.trainer.conftest import make_mesh
from tests.trainer.distributed import mesh_agreement
from tests.trainer.processes import start_processes, wait_processes
from trainer.distributed import mesh
from trainer.distributed.runtime import shard_batch
from trainer.step import train_step

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def alone() -> dict[str, np.ndarray]:
    """On one device."""
    return mesh_agreement.train_on_mesh(mesh_agreement.model_of(scan_layers=False), make_mesh(1, 1, 1))


def assert_agree(found: dict[str, np.ndarray], alone: dict[str, np.ndarray]) -> None:
    """Loss and norm of the gradient at each update; every weight's gradient, beside its largest entry."""
    np.testing.assert_allclose(found["curve"], alone["curve"], rtol=TOLERANCE)
    assert found.keys() == alone.keys()
    for name in found.keys() - {"curve", "held", "table"}:
        largest = np.abs(alone[name]).max()
        np.testing.assert_allclose(found[name], alone[name], rtol=0, atol=TOLERANCE * largest, err_msg=name)
    assert set(found["held"]) == {int(found["table"])}


@pytest.mark.deep  # three updates on 2 x 2 x 2: tests/trainer/step/test_train_step.py
@pytest.mark.parametrize(("sizes", "scan"), [*zip(mesh_agreement.MESHES, (True, True, False, False), strict=True)])
def test_fifty_updates_on_any_mesh(alone, sizes, scan):
    assert alone["curve"][-1, 0] < 0.7 * alone["curve"][0, 0]
    assert_agree(mesh_agreement.train_on_mesh(mesh_agreement.model_of(scan_layers=scan), make_mesh(*sizes)), alone)


@pytest.mark.deep
def test_fifty_updates_in_four_processes(alone, tmp_path, compile_cache):
    """Two devices each, weights, moments and batch spread over all eight."""
    result = tmp_path / "result.npz"
    module = ["tests.trainer.distributed.mesh_agreement", str(result)]
    for ended in wait_processes(start_processes(module, tmp_path, compile_cache, {}, {}, {}, {})):
        assert ended.exit_code == 0, ended.stderr
    for process in range(4):
        with np.load(tmp_path / f"result-{process}.npz") as file:
            arrays = dict(file)
        for sizes in mesh_agreement.MESHES[1:]:
            start = f"{'x'.join(map(str, sizes))}/"
            found = {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
            assert len(found["held"]) == 2
            assert_agree(found, alone)


@pytest.mark.parametrize("sizes", [(2, 2, 2), *deep((1, 4, 2))])
def test_activations_are_split_as_the_table_says(sizes):
    """Of all arrays of the compiled update, those whose size is a multiple of the sequence's prime length."""
    length, devices = 23, make_mesh(*sizes)
    cfg = mesh_agreement.model_of(remat="none", num_layers=1, attention_pattern="L")
    with jax.set_mesh(devices):
        state = train_step.abstract_state(cfg, mesh_agreement.adamw(), devices)
        step = train_step.build_update(mesh_agreement.make_loss(cfg), cfg, mesh_agreement.adamw(), devices)
        text = step.lower(state, shard_batch(mesh_agreement.make_rows(length), devices)).compile().as_text()
    shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", text)}
    activations = {shape for shape in shapes if np.prod(shape) % length == 0}
    rows, hidden, heads = (
        size // mesh.num_shards(devices, axis)
        for axis, size in (("batch", 8), ("hidden", cfg.mlp_dim), ("heads", cfg.num_heads))
    )
    assert {(rows, length, cfg.dim), (rows, length, hidden), (rows, length, heads, cfg.head_dim)} <= activations
    assert max(np.prod(shape) for shape in activations) == rows * length * hidden
