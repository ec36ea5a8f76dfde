"""The sampler's compiled programs, and how their arrays lie on the devices.

Where every device holds the whole copy, each one prefills and decodes its own rows, and stops a chunk when they have
ended: none waits for another. Otherwise the partitioner splits heads, feed-forward width and vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from conf.schema.training.model import Model
from trainer.distributed import mesh as meshes
from trainer.sampler import decode, placement
from trainer.sampler.cache import AXES, PREFILLED, Cache
from trainer.sampler.decode import Slots
from trainer.sampler.prefill import Prefilled, prefill
from trainer.sampler.settings import Settings

PREFILL_TOKENS = 16_384
"""Tokens of prompts that are computed at a time, at most: their keys and values wait on every device."""

WHOLE, ROWS, OF_ROWS = PartitionSpec(), meshes.spec("batch"), meshes.spec(None, "batch")


class Programs:
    """Those of a model and its settings. What depends on the bucket of the prompts is compiled for each anew.

    Attributes:
        reshard: weights to their copy.
        prefill: (copy, tokens [P, bucket], lengths [P]) to Prefilled.
        admit: (Slots, Prefilled, int32 [3, slots]: source, length and row of each slot) to Slots.
        decode: (copy, Slots, wanted [slots], key data, temperature) to Slots and int32 [2, slots, chunk].
        The slots given are given up to those returned.
    """

    def __init__(self, cfg: Model, settings: Settings, mesh: Mesh, ends: tuple[int, ...]) -> None:
        self.cfg, self.settings = placement.decoder(cfg, settings), settings
        self.mesh = placement.mesh_of(cfg, settings, mesh)
        self._shards = meshes.shards(self.mesh, "batch")
        self.slots = -(-settings.slots // self._shards) * self._shards
        copy = jax.tree.map(lambda sharding: sharding.spec, placement.shardings(cfg, self.mesh))
        slots, waiting = self._slots(), Prefilled(WHOLE, self._cache(PREFILLED))
        own = Prefilled(ROWS, self._cache(AXES))

        def admitted(slots: Slots, prompts: Prefilled, rows: jax.Array) -> Slots:
            return decode.admit(slots, prompts, rows[0], rows[1], rows[2])

        def decoded(copy: Any, slots: Slots, wanted: jax.Array, key: jax.Array, temperature: jax.Array) -> Any:
            randomness = jax.random.wrap_key_data(key)
            return decode.decode(copy, self.cfg, settings, ends, slots, wanted, randomness, temperature)

        self.reshard = self._jit("reshard", lambda params: placement.copied(params, self.cfg), copy)
        computed = self._on_each(lambda *given: prefill(self.cfg, *given), (copy, ROWS, ROWS), own)
        self.prefill = self._jit("prefill", computed, waiting)
        self.admit = self._jit("admit", self._on_each(admitted, (slots, waiting, OF_ROWS), slots), slots, donated=(0,))
        taken = (copy, slots, ROWS, WHOLE, WHOLE)
        self.decode = self._jit("decode", self._on_each(decoded, taken, (slots, OF_ROWS)), (slots, WHOLE), donated=(1,))
        self._empty: dict[int, Callable[[], Slots]] = {}

    def empty(self, bucket: int) -> Slots:
        """Slots without rows, for prompts of a bucket."""
        if bucket not in self._empty:
            length = bucket + self.settings.max_new_tokens
            self._empty[bucket] = self._jit("empty", lambda: decode.empty(self.cfg, self.slots, length), self._slots())
        return self._empty[bucket]()

    def prompts_at_a_time(self, samples: int, bucket: int) -> int:
        """Prompts that are computed together: those that fill the slots, where they are not too many."""
        wanted = min(-(-self.slots // samples), max(1, PREFILL_TOKENS // bucket))
        return -(-wanted // self._shards) * self._shards

    def whole(self, values: Any) -> Any:
        """NumPy arrays, the same on every process, on every device."""
        return self._placed(values, WHOLE)

    def rows(self, values: Any) -> Any:
        """NumPy arrays, the same on every process, dealt out by their first axis."""
        return self._placed(values, ROWS)

    def listed(self, samples: int) -> Iterator[tuple[str, Any, tuple[Any, ...], Any]]:
        """Name, function and abstract arguments of each program but `reshard`, for the longest prompts; and what of the
        sampler's lies on the devices beside its arguments. samples: of each prompt."""
        bucket, settings = self.settings.max_prompt_length, self.settings
        prompts, copy = self.prompts_at_a_time(samples, bucket), placement.abstract(self.cfg, self.mesh)
        tokens, lengths = self._abstract(
            (jax.ShapeDtypeStruct((prompts, bucket), "int32"), jax.ShapeDtypeStruct((prompts,), "int32")), (ROWS, ROWS)
        )
        slots = jax.eval_shape(lambda: decode.empty(self.cfg, self.slots, bucket + settings.max_new_tokens))
        slots = self._abstract(slots, self._slots())
        waiting = jax.eval_shape(partial(prefill, self.cfg), copy, tokens, lengths)
        waiting = self._abstract(waiting, Prefilled(WHOLE, self._cache(PREFILLED)))
        rows, wanted, key, temperature = self._abstract(
            (
                jax.ShapeDtypeStruct((3, self.slots), "int32"),
                jax.ShapeDtypeStruct((self.slots,), "bool"),
                jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))),
                jax.ShapeDtypeStruct((), "float32"),
            ),
            (WHOLE,) * 4,
        )
        yield "prefill", self.prefill, (copy, tokens, lengths), slots
        yield "admit", self.admit, (slots, waiting, rows), copy
        yield "decode", self.decode, (copy, slots, wanted, key, temperature), waiting

    def _slots(self) -> Slots:
        return Slots(ROWS, ROWS, ROWS, ROWS, ROWS, WHOLE, self._cache(AXES))

    def _cache(self, axes: tuple[str | None, ...]) -> Cache:
        return Cache(*((meshes.spec(*axes),) * self.cfg.num_layers for _ in range(2)))

    def _on_each(self, function: Callable[..., Any], taken: Any, given: Any) -> Callable[..., Any]:
        """The function of each device's own part, where every device holds all weights."""
        if not meshes.is_data_parallel(self.mesh):
            return function
        return lambda *arguments: jax.shard_map(function, in_specs=taken, out_specs=given, check_vma=False)(*arguments)

    def _jit(self, name: str, function: Callable[..., Any], given: Any, donated: tuple[int, ...] = ()) -> Any:
        """Compiled for the sampler's mesh, whichever the caller is in. given: partitions of what it returns."""

        def on_mesh(*arguments: Any) -> Any:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return function(*arguments)

        on_mesh.__name__ = name  # as logs and profiles show it
        return jax.jit(on_mesh, out_shardings=self._named(given), donate_argnums=donated)

    def _named(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: jax.NamedSharding(self.mesh, spec), specs)

    def _abstract(self, shapes: Any, specs: Any) -> Any:
        placed = self._named(specs)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, placed)

    def _placed(self, values: Any, spec: PartitionSpec) -> Any:
        sharding = jax.NamedSharding(self.mesh, spec)

        def put(x: np.ndarray) -> jax.Array:
            own = sharding.addressable_devices_indices_map(x.shape)
            parts = jax.device_put([x[at] for at in own.values()], list(own))
            return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

        return jax.tree.map(put, values)
