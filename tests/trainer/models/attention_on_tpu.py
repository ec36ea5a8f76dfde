"""Compiles the attention of every kind of layer, forward and backward, for slices of eight chips that are not here:

python -m tests.trainer.models.attention_on_tpu v5e:2x4 v6e:2x4
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from conf.schema.training.model import Model
from tests.groups import load_group
from trainer.distributed import mesh
from trainer.models import attention

KINDS: dict[str, dict] = {
    "causal": {"attn_logit_softcap": None},
    "soft-cap, window and grouped queries": {
        "attn_logit_softcap": 50.0,
        "sliding_window": 200,
        "num_heads": 8,
        "num_kv_heads": 2,
    },
    "a row and heads to be padded": {"attn_logit_softcap": 50.0, "head_dim": 64, "max_seq_len": 200},
}
USUAL = {
    "attention": "splash",
    "activation_dtype": "bfloat16",
    "head_dim": 128,
    "max_seq_len": 1024,
    "sliding_window": 1024,
}


def main(slices: list[str]) -> None:
    for name in slices:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
        devices = Mesh(
            np.array(found).reshape(2, 2, 2), mesh.MESH_AXES, axis_types=(AxisType.Auto,) * len(mesh.MESH_AXES)
        )
        for kind, switches in KINDS.items():
            cfg = Model(**load_group("model/tiny") | USUAL | switches)
            for documents in (False, True):
                words = "documents" if documents else "one document"
                print(f"{name}, {kind}, {words}: {kernels(cfg, documents, devices)}")


def kernels(cfg: Model, documents: bool, devices: Mesh) -> int:
    """How often the compiled program calls a kernel: forward, gradient of the query, gradient of key and value."""
    rows = (8, cfg.max_seq_len)
    heads = (
        jax.ShapeDtypeStruct(
            (*rows, n, cfg.head_dim), "bfloat16", sharding=mesh.named_sharding(devices, "batch", None, axis)
        )
        for n, axis in ((cfg.num_heads, "heads"), (cfg.num_kv_heads, "kv_heads"), (cfg.num_kv_heads, "kv_heads"))
    )
    segments = (
        jax.ShapeDtypeStruct(rows, "int32", sharding=mesh.named_sharding(devices, "batch")) if documents else None
    )
    window = cfg.sliding_window if cfg.sliding_window < cfg.max_seq_len else None

    def total(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None) -> jax.Array:
        return attention.self_attention(query, key, value, segments, window, cfg).astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(devices.abstract_mesh):
        text = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*heads, segments).compile().as_text()
    return text.count('custom_call_target="tpu_custom_call"')


if __name__ == "__main__":
    main(sys.argv[1:])
