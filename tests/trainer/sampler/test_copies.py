"""The mesh that splits the sampler's copy, and the parts in which it arrives."""

import math
import re

import jax
import numpy as np
import pytest

from conf.schema.training.model import Model
from conf.schema.training.settings import Mesh
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from tests.trainer.sampler.test_programs import PROMPT, RESPONSE, SLOTS, model_of
from trainer.models import weights
from trainer.sampler import SamplerSettings, copies
from trainer.sampler.programs import SamplerPrograms


@pytest.mark.parametrize(("model", "tensor"), [("gemma2_2b", 4), ("gemma2_9b", 8), ("gemma3_1b", 1), ("tiny", 1)])
def test_the_mesh_is_derived_from_weights_and_heads(model, tensor):
    """As large as makes the copy small, as the key heads allow; gemma3_1b has one."""
    settings = SamplerSettings(PROMPT, RESPONSE, SLOTS, chunk=8)
    found = copies.sampler_mesh(Model(**load_group(f"model/{model}")), settings, make_mesh(1, 8, 1))
    assert dict(found.shape) == {"data": 8 // tensor, "fsdp": 1, "tensor": tensor, "expert": 1}


@pytest.mark.parametrize(
    ("sizes", "tensor", "expert"),
    [
        ({"inner_dim": 6}, 2, 4),
        ({"shared_dim": 6}, 2, 4),
        ({}, 4, 2),
        ({"inner_dim": 6, "count": 3}, 2, 1),  # three experts are not split over four devices
        ({"inner_dim": 768}, 2, 4),  # parts of 192 would be no whole lanes of 128
    ],
)
def test_the_mesh_splits_each_width_of_experts_and_the_rest_splits_experts(sizes, tensor, expert):
    own = {"count": 4, "per_token": 2, "norm_topk_prob": True} | sizes
    cfg = model_of(num_layers=500, dim=2048, num_heads=4, num_kv_heads=4, mlp_dim=1024, vocab_size=512, experts=own)
    settings = SamplerSettings(PROMPT, RESPONSE, SLOTS, chunk=8)
    found = copies.sampler_mesh(cfg, settings, make_mesh(1, 8, 1))
    assert (found.shape["tensor"], found.shape["expert"]) == (tensor, expert)


@pytest.mark.parametrize("sizes", [(1, 4, 1), (1, 2, 2)])
def test_a_copy_that_is_moved_in_parts_is_the_copy(sizes, monkeypatch):
    """At most so much arrives at once, or one array; what arrived before is told to `fit`."""
    cfg, mesh = model_of(), make_mesh(*sizes)
    settings = SamplerSettings(PROMPT, RESPONSE, SLOTS, chunk=8, dtype="float32")
    params = jax.jit(
        lambda: weights.init_params(cfg, jax.random.key(0)), out_shardings=weights.param_shardings(cfg, mesh)
    )()
    whole = SamplerPrograms(cfg, settings, mesh, ends=(1,))
    assert [name for name, *_ in whole.reshard_programs()] == ["reshard"]
    most = 40_000
    monkeypatch.setattr(copies, "RESHARD_BYTES", most)
    parted = SamplerPrograms(cfg, settings, mesh, ends=(1,))
    with jax.set_mesh(mesh):
        jax.tree.map(np.testing.assert_array_equal, parted.reshard(params), whole.reshard(params))
        before = 0
        for number, (name, function, there) in enumerate(parted.reshard_programs(), 1):
            assert name == ("reshard" if number == 1 else f"reshard_{number}")
            assert sum(math.prod(x.shape) * 4 for x in there) == before
            moved = function(params)
            assert len(moved) == 1 or sum(x.nbytes for x in moved) <= most
            before += sum(x.nbytes for x in moved)
    assert number > 3
    assert before == sum(x.nbytes for x in jax.tree.leaves(whole.reshard(params)))


def test_experts_are_exchanged_between_devices_and_not_gathered_on_each():
    """From a split of their rows over eight devices to one of experts by four and widths by two."""
    own = {"count": 8, "per_token": 2, "norm_topk_prob": True}
    cfg, mesh = model_of(experts=own, vocab_size=256), make_mesh(1, 8, 1)
    split = Mesh(data=1, fsdp=1, tensor=2, expert=4)
    settings = SamplerSettings(PROMPT, RESPONSE, SLOTS, chunk=8, dtype="float32", mesh=split)
    programs = SamplerPrograms(cfg, settings, mesh, ends=(1,))
    placed = weights.param_shardings(cfg, mesh)
    params = jax.jit(lambda: weights.init_params(cfg, jax.random.key(0)), out_shardings=placed)()
    ((_, function, _),) = programs.reshard_programs()
    hlo = function.lower(params).compile().as_text()
    gathered = {tuple(map(int, found.split(","))) for found in re.findall(r"\[([\d,]+)\]\S* all-gather\(", hlo)}
    whole = math.prod(weights.weight_table(cfg)["layers"]["expert_up"].shape[1:])
    assert max(map(math.prod, gathered)) < whole
    assert "all-to-all" in hlo
    copy = programs.reshard(params)
    for layer, found in enumerate(copy["layers"]):
        assert found["expert_up"].sharding.spec[0] == "expert"
        np.testing.assert_array_equal(found["expert_up"], params["layers"]["expert_up"][layer])
        np.testing.assert_array_equal(found["expert_down"], params["layers"]["expert_down"][layer])
