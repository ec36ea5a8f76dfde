"""Fifty updates of a small model on a mesh, by one process or by each of several, which are started with

python -m tests.trainer.distributed.mesh_agreement RESULT.npz
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from conf.schema.training.model import Model
from conf.schema.training.optimizer import Adamw
from conf.schema.training.run_yaml import PodFacts
from tests.groups import load_group
from trainer.distributed import runtime
from trainer.distributed.batch import DeviceBatch
from trainer.distributed.mesh import MESH_AXES, num_shards
from trainer.distributed.runtime import shard_batch
from trainer.losses import token_logprobs
from trainer.models import decoder, weights
from trainer.step import train_step
from trainer.step.metric_sums import Mean, MetricSums

MESHES = ((1, 1, 1), (2, 2, 2), (1, 4, 2), (4, 1, 2))
NUM_UPDATES = 50
SEQ_LEN = 12


def model_of(**changes: object) -> Model:
    """The tiny model with soft-caps and a window low enough to matter."""
    low = {"attn_logit_softcap": 2.0, "final_logit_softcap": 3.0, "sliding_window": 5}
    return Model(**load_group("model/tiny") | low | {"logit_chunk": 5, "remat": "products"} | changes)


def adamw() -> Adamw:
    """Of the YAML group, without warm-up."""
    return Adamw(**load_group("optimizer/adamw") | {"schedule": {"kind": "constant", "warmup_steps": 0}})


def make_rows(length: int = SEQ_LEN) -> dict[str, np.ndarray]:
    """Eight rows of unlike weight: a mean of the devices' means would be wrong."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 512, (8, length + 1), dtype=np.int32)
    counted = (np.arange(length) < random.integers(0, length + 1, (8, 1))).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": counted}


def make_loss(cfg: Model) -> train_step.LossFn:
    def loss(params: weights.Params, batch: DeviceBatch) -> MetricSums:
        tokens = batch["tokens"]
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = decoder.forward(params, cfg, tokens, positions)
        total = token_logprobs.cross_entropy(hidden, params, batch["targets"], batch["weights"], cfg)
        return {"loss": Mean(total, batch["weights"].sum())}

    return loss


def bytes_per_device(cfg: Model, mesh: Mesh) -> int:
    """Bytes of the weights that each device holds, by the weight table."""
    total = 0
    for weight in jax.tree.leaves(weights.weight_table(cfg)):
        parts = math.prod(1 if axis is None else num_shards(mesh, axis) for axis in weight.axes)
        total += math.prod(weight.shape) * jnp.dtype(weight.dtype).itemsize // parts
    return total


def train_on_mesh(cfg: Model, devices: Mesh, updates: int = NUM_UPDATES) -> dict[str, np.ndarray]:
    """`curve` [UPDATES, 2]: loss and norm of the gradient; `gradient/…`: its running mean (Adam's first moment) after
    the last update, of every weight; `held`: bytes of weights and moments on each device of this process; `table`:
    as many as the weight table says."""
    with jax.set_mesh(devices):
        state = train_step.init_state(cfg, adamw(), devices, jax.random.key(5))
        step = train_step.build_update(make_loss(cfg), cfg, adamw(), devices)
        placed, found = shard_batch(make_rows(), devices), []
        for _ in range(updates):
            state, metrics = step(state, placed)
            found.append([metrics["loss"], metrics["grad_norm"]])
        whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(devices, PartitionSpec()))
        moments = whole(optax.tree_utils.tree_get(state.optimizer, "mu"))
    held = dict.fromkeys(devices.local_devices, 0)
    for array in jax.tree.leaves((state.params, state.optimizer)):
        if array.ndim:  # no counter of the optimizer's
            for shard in array.addressable_shards:
                held[shard.device] += shard.data.nbytes
    by_name = {
        f"gradient/{jax.tree_util.keystr(path, simple=True, separator='.')}": np.asarray(moment)
        for path, moment in jax.tree.leaves_with_path(moments)
    }
    table = np.array(3 * bytes_per_device(cfg, devices))
    return {"curve": np.array(jax.device_get(found)), "held": np.array([*held.values()]), "table": table} | by_name


def main(result: Path) -> None:
    """All meshes of eight devices, in processes that find each other as on a pod; each leaves its own file."""
    facts = {"accelerator_type": "v5litepod-8", "workers": 4, "devices": 8, "backend": "cpu"}
    pod = PodFacts(**facts, hbm_bytes_per_chip=None, bf16_flops_per_chip=None)
    runtime.set_cpu_threads(pod)  # on two cores, collectives that run side by side would wait for each other
    runtime.join_processes(pod, timeout_seconds=300)
    found = {}
    for sizes in MESHES[1:]:
        devices = jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
        # few collectives: between processes each takes its time
        arrays = train_on_mesh(model_of(scan_layers=True, remat="none", logit_chunk=SEQ_LEN), devices)
        found |= {f"{'x'.join(map(str, sizes))}/{name}": array for name, array in arrays.items()}
    np.savez(result.with_stem(f"{result.stem}-{jax.process_index()}"), **found)
    runtime.exit_together(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
