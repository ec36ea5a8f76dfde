"""Adafactor and Muon on meshes: the same updates as on one device, and no more memory than the tables say."""

import jax
import numpy as np
import pytest
from pydantic import TypeAdapter

from conf.schema.training.model import Model
from conf.schema.training.optimizer import Optimizer
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from tests.trainer.step.test_train_step import first_state, make_rows, trained
from trainer.step import train_step

SIZES = {"num_layers": 3, "dim": 32, "num_heads": 4, "num_kv_heads": 4, "head_dim": 4, "mlp_dim": 64, "vocab_size": 512}
PLAIN = {"activation_dtype": "float32", "scan_layers": True, "attention_pattern": "L", "remat": "none"}


@pytest.fixture(scope="module")
def cfg() -> Model:
    """A small nanochat: every kind of weight, and layers that do not divide by the devices."""
    return Model(**load_group("model/nanochat_d16") | SIZES | PLAIN | {"logit_chunk": 16})


def read(name: str, **changes) -> Optimizer:
    return TypeAdapter(Optimizer).validate_python(load_group(f"optimizer/{name}") | changes)


GENTLE = {"lr": 0.01, "b1": 0.8, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.0}  # does not magnify what is rounding
MUON = read("nanochat", orthogonalization_dtype="float32", ema_decay=0.5, adamw=GENTLE, param_groups=[])
ADAFACTOR = read("adafactor", b1=0.9, ema_decay=0.5, max_grad_norm=1.0)


@pytest.mark.parametrize(
    ("opt", "sizes"),
    [(MUON, (2, 2, 2)), (MUON, (8, 1, 1)), (ADAFACTOR, (1, 4, 2))],
    ids=["muon", "muon-data", "adafactor"],
)
@pytest.mark.deep
def test_many_devices_equal_one(cfg, opt, sizes):
    (one, _), (many, _) = (trained(cfg, opt, make_mesh(*each), make_rows(), 2) for each in ((1, 1, 1), sizes))
    for part, of_one, of_many in (("params", one.params, many.params), ("average", one.average, many.average)):
        for (path, a), b in zip(jax.tree.leaves_with_path(of_many), jax.tree.leaves(of_one), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, err_msg=f"{part} {jax.tree_util.keystr(path)}")


@pytest.mark.parametrize(("opt", "sizes"), [(MUON, (2, 2, 2)), (ADAFACTOR, (1, 4, 2))], ids=["muon", "adafactor"])
def test_each_device_holds_its_part_of_the_state(cfg, opt, sizes):
    """What lies there is what `abstract_state` says, and but for factored means it is its share of all."""
    devices = make_mesh(*sizes)
    state = first_state(cfg, opt, devices)
    abstract = train_step.abstract_state(cfg, opt, devices)
    jax.tree.map(lambda a, b: np.testing.assert_equal((a.shape, a.sharding), (b.shape, b.sharding)), state, abstract)
    held = dict.fromkeys(devices.devices.flat, 0)
    for array in jax.tree.leaves(state.optimizer):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    whole = sum(array.nbytes for array in jax.tree.leaves(state.optimizer))
    parts = sizes[1] * sizes[2]
    assert len(set(held.values())) == 1
    assert whole / parts <= max(held.values()) < 1.15 * whole / parts
