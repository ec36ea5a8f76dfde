"""A loss that is not finite: hardware is to blame where devices differ about the same rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conf.formats import RunFileError
from conf.schema.training.run_yaml import RunFile
from conf.schema.training.settings import CheckpointSettings
from tests.trainer.bits import in_own_memory, set_nan
from tests.trainer.conftest import make_mesh
from trainer.distributed import mesh as meshes
from trainer.distributed.checksums import CorruptionError
from trainer.step import batch_check, nan_diagnosis
from trainer.step.batch_check import BatchCheck
from trainer.step.metric_sums import Mean
from trainer.step.nan_diagnosis import FiniteTable, check_finite, judge
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


def settings(**others):
    known = {"save_interval": 100, "max_to_keep": 3, "best": None, "max_outage_hours": 24}
    return CheckpointSettings(**known | {"verify_interval": 5, "verify_data": True} | others)


def batch(step, **others):
    rows = np.arange(24, dtype=np.int32).reshape(2, 12) + step
    return {"tokens": rows, "weights": np.ones((2, 12), np.float32)} | others


@pytest.fixture
def said_by_all(monkeypatch):
    """What the processes say of their own rows and of those they read again; this one is the first."""
    table = []
    monkeypatch.setattr(batch_check, "gather_numbers", lambda mesh, row: np.array(table or [row], np.uint32))
    monkeypatch.setattr(batch_check.jax, "process_count", lambda: len(table) or 1)
    return table


def count(check, first, last):
    for step in range(first, last):
        check.count(batch(step))


def test_one_bit_in_one_batch_is_found_at_the_next_comparison():
    """And rows that are the same at the second reading are right."""
    second = [batch(step) for step in range(10)]
    second[6]["tokens"][1, 3] ^= 1 << 5
    check = BatchCheck(settings(), make_mesh(1, 1, 1), iter(second).__next__)
    for last in (5, 9):
        count(check, 0 if last == 5 else 5, last)
        check.compare_if_due(last)
    count(check, 9, 10)
    with pytest.raises(CorruptionError, match=r"^hardware fault: worker 0: its data differ in updates 6 to 10$"):
        check.compare_if_due(10)


def test_rows_that_cannot_be_read_again_differ_unless_their_owner_fails_as_well():
    def unreadable():
        raise RunFileError("data.path: rows.jsonl:7 is not JSON")

    check = BatchCheck(settings(), make_mesh(1, 1, 1), unreadable)
    count(check, 0, 5)
    with pytest.raises(CorruptionError):
        check.compare(5)


def test_where_it_is_off_nothing_is_read(said_by_all):
    check = BatchCheck(settings(verify_data=False), make_mesh(1, 1, 1), lambda: pytest.fail("it was read"))
    count(check, 0, 5)
    said_by_all.extend([[1, 2], [3, 4]])
    check.compare(5)


WHOLE = [([7, 7, 7, 7], None), ([7, 7, 9, 7], "2"), ([7, 9], "0 or 1"), ([7, 9, 8, 7], "1 and 2")]


@pytest.mark.parametrize(
    ("own", "again", "who"),
    [
        *((sums, [0] * len(sums), who) for sums, who in WHOLE),  # of whole batches the majority is right
        ([1, 2, 3, 4], [4, 1, 2, 3], None),
        ([1, 9, 3, 4], [4, 1, 2, 3], "1 or 2"),  # one flipped bit: the worker's rows, or those of its reader
        ([1, 9, 3, 4], [4, 8, 2, 3], "1"),  # its memory of the data set: its rows and those that it reads again
        ([1, 9], [2, 1], "0 or 1"),
        ([5], [6], "0"),
    ],
)
def test_who_is_blamed_for_rows_that_were_read_differently(said_by_all, own, again, who):
    said_by_all.extend([a, b] for a, b in zip(own, again, strict=True))
    check = BatchCheck(settings(), make_mesh(1, 1, 1), (lambda: batch(0)) if any(again) else None)
    count(check, 0, 5)
    if who is None:
        check.compare(5)
        return
    with pytest.raises(CorruptionError) as error:
        check.compare(5)
    lines = [f"hardware fault: worker {one}: its data differ in updates 1 to 5" for one in who.split(" and ")]
    assert str(error.value).splitlines() == lines
