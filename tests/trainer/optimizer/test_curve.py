"""A nanochat of 4 layers: the preset's loss curve does not depend on the number of devices."""

import jax
import numpy as np
import pytest

from conf.schema.training.loop import LmLoop
from conf.schema.training.model import Model
from conf.schema.training.optimizer import Muon
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from trainer.distributed import batch_sharding
from trainer.losses import lm
from trainer.step import train_step

SIZES = {
    "num_layers": 4,
    "dim": 256,
    "num_heads": 2,
    "num_kv_heads": 2,
    "mlp_dim": 1024,
    "vocab_size": 128,
    "sliding_window": 17,
}
UPDATES = 5


@pytest.mark.deep
def test_the_curve_is_the_same_on_eight_and_on_four_devices():
    """Accumulation is derived: 16 rows are one part of 2 per device on eight, two such parts on four."""
    small = {"activation_dtype": "float32", "scan_layers": True, "remat": "none"}
    cfg = Model(**load_group("model/nanochat_d16") | SIZES | small)
    loop = LmLoop(**load_group("loop/lm") | {"total_batch_tokens": 16 * 32, "micro_batch_size": 2, "seq_len": 32})
    raw = load_group("optimizer/nanochat") | {"orthogonalization_dtype": "float32"}
    raw["schedule"] |= {"horizon_steps": UPDATES, "decay_steps": 4}
    raw["weight_decay_schedule"] |= {"horizon_steps": UPDATES}
    curves = {devices: curve(cfg, Muon.model_validate(raw), loop, devices) for devices in (8, 4)}
    assert curves[8][-1] < curves[8][0] - 0.5
    np.testing.assert_allclose(curves[4], curves[8], rtol=1e-4)


def curve(cfg: Model, opt: Muon, loop: LmLoop, devices: int) -> np.ndarray:
    """The loss at each update, [updates]."""
    mesh = make_mesh(devices, 1, 1)
    split = batch_sharding.shard_rows(loop, mesh)
    assert split.accumulation == 8 // devices
    random = np.random.default_rng(0)
    found = []
    with jax.set_mesh(mesh):
        state = train_step.init_state(cfg, opt, mesh, jax.random.key(5))
        step = train_step.build_update(lm.loss(cfg), cfg, opt, mesh, split.accumulation)
        for _ in range(UPDATES):
            tokens = random.zipf(1.5, (16, 33)).clip(max=127).astype(np.int32)
            batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((16, 32), np.float32)}
            state, metrics = step(state, split.to_devices(batch))
            found.append(metrics["loss"])
    return np.array(jax.device_get(found))
