"""Updates and scores of a rollout that is computed in parts."""

from typing import Any

import jax
import numpy as np
import pytest

from conf.schema.training.run_yaml import RunFile
from tests.conftest import deep
from tests.trainer.conftest import make_mesh
from trainer.distributed.runtime import shard_batch
from trainer.fit import memory
from trainer.losses import grpo
from trainer.losses.grpo import ROW_FIELDS, TOKEN_FIELDS
from trainer.rl.programs import build_logprobs, build_update
from trainer.step import train_step


def in_groups(raw: dict[str, Any], micro_batch_size: int | None, **loop: Any) -> RunFile:
    """Eight prompts with two responses each; their samples stay together."""
    own = {"updates_per_rollout": 1, "micro_batch_size": micro_batch_size, "kl_coef": 0.1} | loop
    return RunFile.model_validate(raw | {"loop": raw["loop"] | own})


def rollout() -> dict[str, np.ndarray]:
    """Prompts of different lengths, and responses that begin after them."""
    random = np.random.default_rng(0)
    tokens = np.repeat(random.integers(0, 256, (8, 40)), 2, axis=0)
    mask = np.zeros((16, 39), np.float32)
    for row, length in enumerate(random.integers(4, 28, 8).repeat(2)):
        tokens[row, length:] = random.integers(0, 256, 40 - length)
        mask[row, length - 1 : length + random.integers(1, 11)] = 1
    batch = {"tokens": tokens.astype(np.int32), "mask": mask}
    batch |= {name: -np.abs(random.normal(size=(16, 39))).astype(np.float32) for name in TOKEN_FIELDS}
    return batch | {name: random.random(16, np.float32) for name in ROW_FIELDS}


@pytest.mark.parametrize("sizes", [(2, 1, 1), *deep((1, 2, 1))])
def test_groups_computed_in_parts_give_the_update_and_the_scores_of_the_whole(grpo_run, sizes):
    """Eight rows for each device: four groups, or two at a time."""
    mesh, batch, found = make_mesh(*sizes), rollout(), []
    for micro_batch_size in (None, 4):
        experiment = in_groups(grpo_run, micro_batch_size)
        cfg, loop, opt = experiment.decoder, experiment.loop, experiment.optimizer
        assert loop.keeps_groups_together
        with jax.set_mesh(mesh):
            state = train_step.init_state(cfg, opt, mesh, jax.random.key(0))
            placed = shard_batch(batch, mesh)
            given = {name: placed[name] for name in ("tokens", "mask")}
            reference = jax.tree.map(lambda x: x + 0.01, state.params)
            scores = build_logprobs(experiment, loop, mesh)(state.params, reference, given)
            update = build_update(grpo.loss(cfg, loop, grouped=True), experiment, opt, mesh)
            state, metrics = update(state, placed)
        found.append(jax.device_get((scores, state.optimizer, metrics)))
    assert np.abs(found[0][0][1]).sum() > 0, "the reference is scored"
    for whole, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(other, whole, rtol=1e-4, atol=1e-6)


def test_a_prompt_is_computed_once_for_its_group_in_each_part(grpo_run):
    def operations(micro_batch_size: int | None) -> float:
        raw = grpo_run | {"model": grpo_run["model"] | {"attention": "plain"}}
        experiment = in_groups(raw, micro_batch_size, group_size=4, prompts_per_step=4)
        return memory.count_flops("update", experiment, make_mesh(1, 1, 1))

    assert operations(4) == pytest.approx(operations(None), rel=0.02)
    assert not in_groups(grpo_run, 1).loop.keeps_groups_together
    assert not in_groups(grpo_run, 4, updates_per_rollout=2).loop.keeps_groups_together
    assert operations(2) > 1.3 * operations(4), "two of four samples are no whole group"
