"""What GRPO's programs compute besides losses: the reference, updates in parts, and which programs there are."""

from typing import Any

import jax
import numpy as np
import pytest

from conf.schema.training.run_yaml import RunFile
from tests.trainer.conftest import make_mesh
from tests.trainer.loops.test_grpo import with_echo
from trainer.distributed import mesh as meshes
from trainer.distributed.runtime import shard_batch
from trainer.losses.grpo import ROW_FIELDS, TOKEN_FIELDS
from trainer.losses.grpo import loss as policy_loss
from trainer.rl.programs import abstract_reference, build_update, initial_reference, programs
from trainer.step import train_step


@pytest.mark.parametrize(("dtype", "expected"), [(None, "float32"), ("bfloat16", "bfloat16")])
def test_the_reference_is_a_copy_of_the_type_that_is_wanted(grpo_run, dtype, expected):
    """It outlives the policy's buffers, lies where they do, and is what a checkpoint is restored into."""
    experiment = RunFile.model_validate(grpo_run | {"loop": grpo_run["loop"] | {"reference_dtype": dtype}})
    mesh = make_mesh(1, 2, 2)
    state = train_step.init_state(experiment.model, experiment.optimizer, mesh, jax.random.key(0))
    before = jax.device_get(state.params)
    reference = initial_reference(state.params, experiment, mesh)
    wanted = abstract_reference(experiment, mesh)
    jax.tree.map(lambda x: x.delete(), state.params)
    for found, like, was in zip(*(jax.tree.leaves(t) for t in (reference, wanted, before)), strict=True):
        assert found.dtype == like.dtype == expected
        assert found.sharding.is_equivalent_to(like.sharding, found.ndim)
        np.testing.assert_array_equal(found, was.astype(expected))


@pytest.mark.deep
def test_pairs_stay_together_where_an_update_is_computed_in_parts(grpo_run):
    """DPO's loss reads neighbouring rows; sixteen of them on two devices, all or two at a time."""
    loop = grpo_run["loop"] | {"loss_type": "dpo", "kl_coef": 0.3}
    mesh, random = make_mesh(1, 2, 1), np.random.default_rng(0)
    batch = {"tokens": random.integers(0, 256, (16, 40), dtype=np.int32), "mask": np.ones((16, 39), np.float32)}
    batch |= {name: random.normal(size=(16, 39)).astype(np.float32) for name in TOKEN_FIELDS}
    batch |= dict.fromkeys(ROW_FIELDS, np.ones(16, np.float32))
    losses = []
    for micro_batch_size in (None, 2):
        raw = grpo_run | {"loop": loop | {"micro_batch_size": micro_batch_size}}
        experiment = RunFile.model_validate(raw)
        with jax.set_mesh(mesh):
            state = train_step.init_state(experiment.model, experiment.optimizer, mesh, jax.random.key(0))
            own = policy_loss(experiment.decoder, experiment.loop)
            update = build_update(own, experiment, experiment.optimizer, mesh)
            _, metrics = update(state, shard_batch(batch, mesh))
        losses.append((float(metrics["loss"]), float(metrics["reward_margin"]), float(metrics["grad_norm"])))
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_programs_of_later_turns_are_listed(grpo_run: Any) -> None:
    """A prompt of a later turn may be as long as prompt and response together."""
    raw = with_echo(grpo_run)
    experiment = RunFile.model_validate(raw)
    found = {program.name: program for program in programs(experiment, meshes.build_mesh(experiment.mesh))}
    rows = raw["loop"]["prompts_per_step"] * raw["loop"]["group_size"] * raw["loop"]["updates_per_rollout"]
    first, later = (found[name].arguments[1].shape for name in ("prefill", "prefill_turn"))
    assert (first, later) == ((rows // 2, 40), (rows, 40))
    assert "admit_turn" in found
    assert "decode_turn" not in found
