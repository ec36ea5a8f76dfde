"""LoRA (https://arxiv.org/abs/2106.09685): frozen matrices W with trained adapters A and B of rank r.

The layer computes x W + scale (x A) B, with scale = lora_alpha / r. Adapters are entries of the weight table beside
their matrix, so meshes, optimizers, averages and checkpoints apply to them as to any weight.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

import jax
import numpy as np
from jax.nn.initializers import zeros

from conf.schema.training.model import Lora, Model
from conf.schema.training.run_yaml import RunFileError
from trainer.models.weights import Params, Weight, uniform

INPUT_AXES = {"query": 1, "key": 1, "value": 1, "output": 2, "gate": 1, "up": 1, "down": 1}
"""Matrices of a layer that may have an adapter, and how many of their axes are inputs; the others are outputs."""


def with_adapters(table: Params, cfg: Model) -> Params:
    """Return a weight table whose weights are frozen and whose adapters are trained.

    Raises RunFileError if a pattern of `model.lora.target_modules` matches no matrix.
    """
    lora = cfg.lora
    if lora is None:
        return table
    frozen = jax.tree.map(lambda w: replace(w, trained=False, dtype=lora.base_dtype), table)
    choices = {f"layers.{name}": name for name in INPUT_AXES if name in table["layers"]}
    if not cfg.tie_word_embeddings:
        choices["unembedding"] = "unembedding"
    for i, pattern in enumerate(lora.target_modules):
        if not any(fnmatchcase(path, pattern) for path in choices):
            raise RunFileError(
                f"model.lora.target_modules.{i}: {pattern!r} matches no matrix; choices: {', '.join(choices)}"
            )
    for path, name in choices.items():
        if any(fnmatchcase(path, pattern) for pattern in lora.target_modules):
            place = frozen["layers"] if path != name else frozen
            place |= dict(_adapter(name, table["layers"][name] if path != name else table[name], lora))
    return frozen


def _adapter(name: str, weight: Weight, lora: Lora) -> Iterator[tuple[str, Weight]]:
    """Yield the adapter of a weight: A begins as in PEFT, uniform within 1 / sqrt(inputs), and B with zeros."""
    if name == "unembedding":  # stored as [vocab, dim]
        (vocab, dim), (rows, columns) = weight.shape, weight.axes
        yield f"{name}_lora_a", Weight((dim, lora.r), (columns, None), uniform(dim**-0.5))
        yield f"{name}_lora_b", Weight((lora.r, vocab), (None, rows), zeros)
        return
    layers, inputs = weight.shape[0], 1 + INPUT_AXES[name]
    size = math.prod(weight.shape[1:inputs])
    axes = ("layers", *weight.axes[1:inputs], None)
    yield f"{name}_lora_a", Weight((layers, *weight.shape[1:inputs], lora.r), axes, uniform(size**-0.5))
    shape = (layers, lora.r, *weight.shape[inputs:])
    yield f"{name}_lora_b", Weight(shape, ("layers", None, *weight.axes[inputs:]), zeros)


def merged_weight(params: Params, name: str, cfg: Model) -> np.ndarray:
    """Return W + scale A B in float32, for a matrix of `params`, or of its layers, that has an adapter."""
    assert cfg.lora is not None, "only its adapters have such names"
    a, b = (np.asarray(params[f"{name}_lora_{part}"], np.float32) for part in "ab")
    weight = np.asarray(params[name]).astype(np.float32)
    if name == "unembedding":
        return weight + cfg.lora.scale * (a @ b).T
    stacked = a.reshape(len(a), -1, cfg.lora.r) @ b.reshape(len(b), cfg.lora.r, -1)
    return weight + cfg.lora.scale * stacked.reshape(weight.shape)
