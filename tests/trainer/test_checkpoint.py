"""Checkpoints: what is saved comes back, on other meshes too; what is half written does not count."""

import jax
import numpy as np
import pytest

from conf.runfile import RunFileError
from conf.training import Checkpoint
from tests.trainer.conftest import mesh_of
from trainer import update
from trainer.checkpoint import Checkpoints


@pytest.fixture
def state(tiny, adamw):
    return update.init_state(tiny, adamw, mesh_of(8, 1, 1), jax.random.key(0))


def kept(keep: int, **others) -> Checkpoint:
    return Checkpoint(**{"every": 2, "keep": keep, "best": None, "verify_every": 0} | others)


def assert_equal(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 1, 1)])
def test_restored_on_any_mesh(tmp_path, tiny, adamw, state, sizes):
    written = Checkpoints(str(tmp_path), kept(1))
    assert written.latest() is None
    written.save(3, state, {"phase": "warm start", "drawn": [1, 2]})
    written.close()
    read = Checkpoints(str(tmp_path), kept(1))
    abstract = update.abstract_state(tiny, adamw, mesh_of(*sizes))
    restored, position = read.restore(read.latest(), abstract)
    read.close()
    assert position == {"phase": "warm start", "drawn": [1, 2]}
    assert_equal(restored, state)
    assert restored.params["embedding"].sharding == abstract.params["embedding"].sharding


def test_the_newest_are_kept_and_a_half_written_one_does_not_count(tmp_path, state):
    checkpoints = Checkpoints(str(tmp_path), kept(2))
    for step in (1, 2, 3):
        checkpoints.save(step, state, {"step": step})
    checkpoints.close()
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3"]
    half = folder / "4.orbax-checkpoint-tmp-1700000000"  # as Orbax names a checkpoint until it is complete
    (half / "state").mkdir(parents=True)
    again = Checkpoints(str(tmp_path), kept(2))
    assert again.latest() == 3
    again.save(5, state, {})
    again.close()
    assert sorted(path.name for path in folder.iterdir()) == ["3", "5"]


def test_the_reference_is_saved_once(tmp_path, tiny, adamw, state):
    checkpoints = Checkpoints(str(tmp_path), kept(1))
    checkpoints.save_reference(state.params)
    checkpoints.save_reference(jax.tree.map(lambda x: x + 1, state.params))
    abstract = update.abstract_state(tiny, adamw, mesh_of(1, 4, 2)).params
    assert_equal(checkpoints.restore_reference(abstract), state.params)
    checkpoints.close()


def test_a_checkpoint_of_another_model_is_refused(tmp_path, tiny, adamw, state):
    checkpoints = Checkpoints(str(tmp_path), kept(1))
    checkpoints.save(1, state, {})
    other = update.abstract_state(tiny.model_copy(update={"hidden": 128}), adamw, mesh_of(8, 1, 1))
    with pytest.raises(
        RunFileError, match=r"params\.layers\.down is \(2, 256, 64\) in the checkpoint of step 1, .* \(2, 128, 64\)"
    ):
        checkpoints.restore(1, other)
    checkpoints.close()
