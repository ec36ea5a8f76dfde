"""The sampler's compiled programs, and the shardings of their arrays.

If every device holds the whole copy, each prefills and decodes its own rows and ends a chunk when they have ended,
without waiting for others. Otherwise the partitioner splits heads, feed-forward width and vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from conf.schema.training.model import Model
from trainer.distributed import mesh as meshes
from trainer.sampler import decode, placement
from trainer.sampler.cache import CACHE_AXES, PREFILL_AXES, KVCache
from trainer.sampler.decode import Slots
from trainer.sampler.prefill import PrefillResult, prefill
from trainer.sampler.settings import SamplerSettings

MAX_PREFILL_TOKENS = 16_384
"""Maximum prompt tokens per prefill; their keys and values wait on every device."""

REPLICATED = PartitionSpec()
ROW_SHARDED, COLUMN_SHARDED = meshes.partition_spec("batch"), meshes.partition_spec(None, "batch")


class SamplerPrograms:
    """Compiled programs for a model and its settings, for each prompt bucket and cache length that they depend on.

    Attributes:
        reshard: weights to their copy.
        prefill: (copy, tokens [P, bucket], lengths [P]) to PrefillResult.
        insert_prompts: (Slots, PrefillResult, int32 [3, slots]: source, length and row of each slot) to Slots. Donates
            the slots.
        decode: (copy, Slots, wanted [slots], key data, temperature) to Slots and int32 [2, slots, chunk]. Donates the
            slots.
    """

    def __init__(self, cfg: Model, settings: SamplerSettings, mesh: Mesh, ends: tuple[int, ...]) -> None:
        self.cfg, self.settings = placement.sampler_model(cfg, settings), settings
        self.mesh = placement.sampler_mesh(cfg, settings, mesh)
        self._shards = meshes.num_shards(self.mesh, "batch")
        self.slots = -(-settings.slots // self._shards) * self._shards
        copy = jax.tree.map(lambda sharding: sharding.spec, placement.param_shardings(cfg, self.mesh))
        slots, waiting = self._slot_specs(), PrefillResult(REPLICATED, self._cache_specs(PREFILL_AXES))
        own = PrefillResult(ROW_SHARDED, self._cache_specs(CACHE_AXES))

        def admitted(slots: Slots, prompts: PrefillResult, rows: jax.Array) -> Slots:
            return decode.insert_prompts(slots, prompts, rows[0], rows[1], rows[2])

        def decoded(copy: Any, slots: Slots, wanted: jax.Array, key: jax.Array, temperature: jax.Array) -> Any:
            randomness = jax.random.wrap_key_data(key)
            return decode.decode(copy, self.cfg, settings, ends, slots, wanted, randomness, temperature)

        self.reshard = self._jit("reshard", lambda params: placement.copy_params(params, self.cfg), copy)
        computed = self._per_device(lambda *given: prefill(self.cfg, *given), (copy, ROW_SHARDED, ROW_SHARDED), own)
        self.prefill = self._jit("prefill", computed, waiting)
        self.insert_prompts = self._jit(
            "admit", self._per_device(admitted, (slots, waiting, COLUMN_SHARDED), slots), slots, donated=(0,)
        )
        taken = (copy, slots, ROW_SHARDED, REPLICATED, REPLICATED)
        self.decode = self._jit(
            "decode", self._per_device(decoded, taken, (slots, COLUMN_SHARDED)), (slots, REPLICATED), donated=(1,)
        )
        lengths = {length for bucket in settings.buckets for length in settings.cache_lengths(bucket)}
        self._init = {length: self._build_init(length, slots) for length in lengths}
        self._resize = {length: self._build_resize(length, slots) for length in lengths}

    def init_slots(self, length: int) -> Slots:
        """Return slots without rows, with a cache of this length."""
        return self._init[length]()

    def resize_cache(self, slots: Slots, length: int) -> Slots:
        """Return the slots with a cache of another length, which should be the next longer or shorter one.

        Then there are few programs, and old and new cache together have 1.5 times the longest.
        """
        return self._resize[length](slots)

    def prefill_batch_size(self, samples: int, bucket: int) -> int:
        """Return how many prompts to prefill together: enough to fill the slots, within MAX_PREFILL_TOKENS."""
        wanted = min(-(-self.slots // samples), max(1, MAX_PREFILL_TOKENS // bucket))
        return -(-wanted // self._shards) * self._shards

    def replicate(self, values: Any) -> Any:
        """Replicate NumPy arrays, equal on every process, to every device."""
        return self._put(values, REPLICATED)

    def shard_by_row(self, values: Any) -> Any:
        """Shard NumPy arrays, equal on every process, by their first axis."""
        return self._put(values, ROW_SHARDED)

    def list_programs(
        self, samples: int, *, longest_only: bool = False
    ) -> Iterator[tuple[str, Any, tuple[Any, ...], Any]]:
        """Yield name, function, abstract arguments and other resident arrays of each program except `reshard`.

        Shapes are those of the longest prompts. samples: responses per prompt; longest_only: of programs for several
        lengths of the cache, only that which needs the most memory.
        """
        bucket = self.settings.max_prompt_length
        lengths = self.settings.cache_lengths(bucket)
        prompts, copy = self.prefill_batch_size(samples, bucket), placement.abstract_params(self.cfg, self.mesh)
        tokens, prompt_lengths, rows, wanted, key, temperature = self._abstract(
            (
                jax.ShapeDtypeStruct((prompts, bucket), "int32"),
                jax.ShapeDtypeStruct((prompts,), "int32"),
                jax.ShapeDtypeStruct((3, self.slots), "int32"),
                jax.ShapeDtypeStruct((self.slots,), "bool"),
                jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))),
                jax.ShapeDtypeStruct((), "float32"),
            ),
            (ROW_SHARDED, ROW_SHARDED, *(REPLICATED,) * 4),
        )
        waiting = jax.eval_shape(self._on_mesh(partial(prefill, self.cfg)), copy, tokens, prompt_lengths)
        waiting = self._abstract(waiting, PrefillResult(REPLICATED, self._cache_specs(PREFILL_AXES)))
        yield "prefill", self.prefill, (copy, tokens, prompt_lengths), self._abstract_slots(lengths[-1])
        for length in lengths[-1:] if longest_only else lengths:
            slots, suffix = self._abstract_slots(length), "" if length == lengths[-1] else f"_{length}"
            yield f"admit{suffix}", self.insert_prompts, (slots, waiting, rows), copy
            yield f"decode{suffix}", self.decode, (copy, slots, wanted, key, temperature), waiting
        growing = list(pairwise(lengths))
        for old, new in growing[-1:] if longest_only else [*growing, *((new, old) for old, new in growing)]:
            yield f"resize_{old}_to_{new}", self._resize[new], (self._abstract_slots(old),), (copy, waiting)

    def _abstract_slots(self, length: int) -> Slots:
        """Return the shapes and shardings of slots whose cache has this length."""
        slots = jax.eval_shape(self._on_mesh(lambda: decode.init_slots(self.cfg, self.slots, length)))
        return self._abstract(slots, self._slot_specs())

    def _build_init(self, length: int, slots: Slots) -> Any:
        """Return the program that makes slots with a cache of this length. slots: partitions."""
        return self._jit("empty", lambda: decode.init_slots(self.cfg, self.slots, length), slots)

    def _build_resize(self, length: int, slots: Slots) -> Any:
        """Return the program that gives the cache this length. slots: partitions."""

        def resized(old: Slots) -> Slots:
            return decode.resize_cache(old, self.cfg, length)

        return self._jit("resize", self._per_device(resized, (slots,), slots), slots)

    def _slot_specs(self) -> Slots:
        return Slots(
            ROW_SHARDED, ROW_SHARDED, ROW_SHARDED, ROW_SHARDED, ROW_SHARDED, REPLICATED, self._cache_specs(CACHE_AXES)
        )

    def _cache_specs(self, axes: tuple[str | None, ...]) -> KVCache:
        return KVCache(*((meshes.partition_spec(*axes),) * self.cfg.num_layers for _ in range(2)))

    def _per_device(self, function: Callable[..., Any], taken: Any, given: Any) -> Callable[..., Any]:
        """Run the function on each device's own part if every device holds all weights."""
        if not meshes.is_data_parallel(self.mesh):
            return function
        return lambda *arguments: jax.shard_map(function, in_specs=taken, out_specs=given, check_vma=False)(*arguments)

    def _jit(self, name: str, function: Callable[..., Any], given: Any, donated: tuple[int, ...] = ()) -> Any:
        """Jit for the sampler's mesh. given: partitions of the results."""
        on_mesh = self._on_mesh(function)
        on_mesh.__name__ = name  # the name in logs and profiles
        return jax.jit(on_mesh, out_shardings=self._shardings(given), donate_argnums=donated)

    def _on_mesh(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is traced for the sampler's mesh, regardless of the caller's mesh."""

        def on_mesh(*arguments: Any) -> Any:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return function(*arguments)

        return on_mesh

    def _shardings(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: jax.NamedSharding(self.mesh, spec), specs)

    def _abstract(self, shapes: Any, specs: Any) -> Any:
        return meshes.with_shardings(shapes, self._shardings(specs))

    def _put(self, values: Any, spec: PartitionSpec) -> Any:
        sharding = jax.NamedSharding(self.mesh, spec)

        def put(x: np.ndarray) -> jax.Array:
            own = sharding.addressable_devices_indices_map(x.shape)
            parts = jax.device_put([x[at] for at in own.values()], list(own))
            return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

        return jax.tree.map(put, values)
