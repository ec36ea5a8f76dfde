"""Compile a program of Tunix's GRPO for a v5litepod-16, in a Python that has google-tunix and libtpu.

    python tunix_programs.py update|prefill|decode [TENSOR]

Gemma-2 2B: an update of 128 rows of 1,024 + 1,024 tokens with AdamW, and 128 rows in the sampler. Weights and moments
are in bfloat16. TENSOR: devices of Tunix's `tp` axis; `fsdp` has the others.
"""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.gemma import model as gemma
from tunix.rl import algo_core, common
from tunix.rl.grpo.grpo_learner import GRPOConfig

ROWS, PROMPT, ANSWER = 128, 1024, 1024


class Tokens:
    """What Tunix asks of a tokenizer before any text is seen."""

    def encode(self, text: str, **options: Any) -> list[int]:
        del options
        return [ord(character) for character in text]

    def decode(self, ids: list[int], **options: Any) -> str:
        del options
        return "".join(chr(i) for i in ids)

    def bos_id(self) -> int:
        return 2

    def eos_id(self) -> int:
        return 1

    def pad_id(self) -> int:
        return 0


def main() -> None:
    program, tensor = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 4
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
    mesh = Mesh(np.array(devices).reshape(16 // tensor, tensor), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    compile_program = {"update": update, "prefill": sampling, "decode": sampling}[program]
    with jax.set_mesh(mesh):
        compile_program(mesh, program)


def policy(remat: gemma.RematConfig = gemma.RematConfig.NONE) -> gemma.Gemma:
    cfg = dataclasses.replace(gemma.ModelConfig.gemma2_2b(), remat_config=remat)
    return gemma.Gemma(cfg, rngs=nnx.Rngs(0))


def abstract(state: Any, mesh: Mesh) -> Any:
    """Return the state with Tunix's shardings, in bfloat16."""

    def array(x: Any, spec: Any) -> jax.ShapeDtypeStruct:
        kind = jnp.bfloat16 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        spec = spec if isinstance(spec, PartitionSpec) else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, kind, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(array, state, nnx.get_partition_spec(state))


def update(mesh: Mesh, name: str) -> None:
    def make() -> tuple[gemma.Gemma, nnx.Optimizer]:
        model = policy(gemma.RematConfig.DECODER)
        return model, nnx.Optimizer(model, optax.adamw(1e-6), wrt=nnx.Param)

    graph, state = nnx.split(nnx.eval_shape(make))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

    example = common.TrainExample(
        prompt_ids=array((ROWS, PROMPT), jnp.int32), prompt_mask=array((ROWS, PROMPT), jnp.bool_),
        completion_ids=array((ROWS, ANSWER), jnp.int32), completion_mask=array((ROWS, ANSWER), jnp.bool_),
        advantages=array((ROWS,), jnp.float32), ref_per_token_logps=array((ROWS, ANSWER), jnp.float32),
        old_per_token_logps=array((ROWS, ANSWER), jnp.float32),
    )  # fmt: skip
    config = GRPOConfig(num_generations=8, beta=0.001)
    config.temperature = 1.0

    def step(state: Any, example: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)

        def loss(model: gemma.Gemma) -> Any:
            found = algo_core.grpo_loss_fn(model, example, config, pad_id=0, eos_id=1, compute_logps_chunk_size=128)
            return found.primary_loss.compute()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), value

    step.__name__ = name
    jax.jit(step, donate_argnums=0).lower(abstract(state, mesh), example).compile()


def sampling(mesh: Mesh, name: str) -> None:
    graph, state = nnx.split(nnx.eval_shape(policy))
    model = nnx.merge(graph, abstract(state, mesh))
    cfg = CacheConfig(cache_size=PROMPT + ANSWER, num_layers=26, num_kv_heads=4, head_dim=256)
    sampler = Sampler(model, Tokens(), cfg)
    sampler.eos_ids = np.array([1])
    seed = jax.eval_shape(lambda: jax.random.key(0))
    params = abstract(nnx.state(model), mesh)
    state = jax.eval_shape(
        lambda ids, key: sampler.init_sample_state(
            ids, PROMPT + ANSWER, include_logits=False, forbidden_token_ids=None, temperature=1.0, top_p=1.0,
            top_k=None, seed=key, beam_size=None, include_logprobs=True,
        ),
        jax.ShapeDtypeStruct((ROWS, PROMPT), jnp.int32), seed,
    )  # fmt: skip
    rows, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
    heads = NamedSharding(mesh, PartitionSpec("fsdp", None, "tp"))
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=heads if x.ndim == 4 else rows if x.ndim and x.shape[0] == ROWS else whole
        ),
        state,
    )
    function = sampler._decode_fn if name == "decode" else sampler._prefill_fn
    jax.jit(function, donate_argnums=1).lower(params, state).compile()


if __name__ == "__main__":
    main()
