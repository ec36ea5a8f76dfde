"""A loss that is not finite: hardware is to blame where devices differ about the same rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conf.schema.training.run_yaml import RunFile
from tests.trainer.bits import in_own_memory, set_nan
from tests.trainer.conftest import make_mesh
from trainer.distributed import mesh as meshes
from trainer.distributed.checksums import CorruptionError
from trainer.step import nan_diagnosis
from trainer.step.metric_sums import Mean
from trainer.step.nan_check import check_finite
from trainer.step.nan_diagnosis import FiniteTable, judge
from trainer.step.train_step import State


def loss(params, batch, carry):
    rows = jnp.log(batch["x"] @ params["w"])
    return {"loss": Mean(rows.sum(), jnp.float32(rows.size))}, carry


def recomputed(rows, data=4, accumulation=1, shard=None):
    mesh = make_mesh(data, 1, 1)
    weights = in_own_memory(jax.device_put(np.ones(2, np.float32), meshes.named_sharding(mesh)))
    if shard is not None:
        set_nan(weights, shard=shard)
    axes = ("batch",) if accumulation == 1 else (None, "batch")
    batch = {"x": jax.device_put(np.array(rows, np.float32), meshes.named_sharding(mesh, *axes))}
    recompute = nan_diagnosis.build_recompute(loss, None, mesh, accumulation)
    return recompute(State(0, {"w": weights}, None, 0, None), batch)


GOOD, BAD = [1.0, 1.0], [-1.0, -1.0]


def test_rows_that_no_device_can_compute_are_the_programs():
    found = recomputed([GOOD, GOOD, BAD, GOOD])
    assert found.table.tolist() == [[True, True, False, True]] * 4
    judge(found, 7, repeated=False)
    parts = recomputed([[GOOD] * 4, [GOOD, BAD, GOOD, GOOD]], accumulation=2)
    assert parts.table.tolist() == [[True, False, True, True]] * 4


def test_a_device_that_fails_on_rows_that_others_can_compute_is_at_fault():
    found = recomputed([GOOD] * 4, shard=2)
    assert found.table.tolist() == [[True] * 4, [True] * 4, [False] * 4, [True] * 4]
    with pytest.raises(CorruptionError, match=r"^hardware fault: worker 1: in update 7 it got NaN or infinity"):
        judge(found._replace(workers=[0, 0, 1, 1]), 7, repeated=True)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([[True, True], [False, False]], "worker 0 or 1: in update 7"),  # of two that differ either may be at fault
        ([[True]], "some worker: update 7 was not finite, but is when"),  # at the second try it is the program's
    ],
)
def test_devices_that_differ_or_compute_it_later_are_at_fault(table, words):
    found = FiniteTable(np.array(table), [*range(len(table))])
    with pytest.raises(CorruptionError, match=f"^hardware fault: {words}"):
        judge(found, 7, repeated=False)
    if len(table) == 1:
        judge(found, 7, repeated=True)


def test_an_update_that_is_to_be_skipped_is_told_with_the_place_of_its_batch(lm_run, capsys):
    lm_run["optimizer"] |= {"nan_policy": "skip"}
    metrics = {"loss": jnp.float32(np.nan), "grad_norm": jnp.float32(1)}
    check_finite(7, metrics, {"x": np.ones(2)}, RunFile.model_validate(lm_run), lambda repeated: None)
    assert capsys.readouterr().out.endswith(f"{lm_run['dir']}/diverged/step-7. The update is skipped\n")
