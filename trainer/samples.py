"""Texts that the model continues now and then, for people to read."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from conf.decoder import Model
from conf.loop import Samples
from conf.runfile import RunFileError
from trainer import distributed, sampler
from trainer import mesh as meshes
from trainer.data import batches
from trainer.share import whole
from trainer.weights import Params

NEVER = -1
"""No token's id: nothing ends a continuation but its length."""


class Continuations:
    """The prompts of `loop.samples` on the devices, and the compiled program that continues them.

    The randomness is the same each time, so that texts of one run can be compared. Raises RunFileError where prompt and
    continuation are longer than the model's context.
    """

    def __init__(self, settings: Samples, data: batches.Dataset, cfg: Model, mesh: Mesh, seed: int) -> None:
        self._settings = settings
        self._tokenizer = data.tokenizer
        begin, eos = data.begin, NEVER if data.end is None else data.end
        encoded = [[*begin, *ids.tolist()] for ids in self._tokenizer.encode(settings.prompts)]
        longest = max(len(ids) for ids in encoded)
        if longest + settings.length > cfg.context:
            raise RunFileError(
                f"loop.samples.length: a prompt of {longest} tokens and {settings.length} more do not fit "
                f"model.context, which is {cfg.context}"
            )
        if not all(encoded):
            raise RunFileError("loop.samples.prompts: a prompt is empty; there must be a token to continue")
        parts = meshes.shards(mesh, "batch")
        rows = -(-len(encoded) // parts) * parts
        tokens = np.zeros((rows, longest), np.int32)  # what stands behind a prompt is not looked at
        for row in range(rows):
            ids = encoded[row % len(encoded)]
            tokens[row, : len(ids)] = ids
        lengths = np.array([len(encoded[row % len(encoded)]) for row in range(rows)], np.int32)
        prompts = sampler.Prompts(tokens, lengths, np.arange(rows, dtype=np.int32))
        self._prompts = distributed.place_batch(prompts, mesh)
        self._key = jax.device_put(jax.random.key(seed), whole(mesh))
        self._temperature = jax.device_put(np.float32(settings.temperature), whole(mesh))
        self._sample: Any = sampler.build(cfg, settings.length, mesh, eos)

    def compile(self, params: Params) -> None:
        """Compile for weights of these shapes and shardings."""
        self._sample = self._sample.lower(params, self._prompts, self._key, self._temperature).compile()

    def texts(self, params: Params) -> list[str]:
        """Prompt and continuation of each, as Markdown. All processes must call it, and all get the same."""
        drawn = self._sample(params, self._prompts, self._key, self._temperature)
        own: dict[str, str] = {}
        for tokens, lengths in zip(drawn.tokens.addressable_shards, drawn.lengths.addressable_shards, strict=True):
            ids, counts = np.asarray(tokens.data), np.asarray(lengths.data)
            for row, at in enumerate(range(*tokens.index[0].indices(drawn.tokens.shape[0]))):
                if at < len(self._settings.prompts):
                    own[str(at)] = self._tokenizer.decode(ids[row, : counts[row]].tolist())
        everyone = distributed.gather_tree(own)
        return [
            f"{prompt}**{everyone[str(row)]}**".replace("\n", "  \n")
            for row, prompt in enumerate(self._settings.prompts)
        ]
