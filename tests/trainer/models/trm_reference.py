"""Weights and puzzles that the fixtures of the recursive model and its tests make alike, from raw bits."""

from typing import Any

import numpy as np

CASES = {
    "mlp": {"mixer": "mlp", "position_embedding": "none", "h_cycles": 1, "l_cycles": 1},
    "mlp_cycles": {"mixer": "mlp", "position_embedding": "none", "h_cycles": 3, "l_cycles": 6},
    "attention": {"mixer": "attention", "position_embedding": "rope", "h_cycles": 1, "l_cycles": 1},
    "attention_cycles": {"mixer": "attention", "position_embedding": "rope", "h_cycles": 3, "l_cycles": 6},
    "learned": {"mixer": "attention", "position_embedding": "learned", "h_cycles": 2, "l_cycles": 2},
}
SIZES = {"vocab_size": 6, "seq_len": 16, "puzzle_len": 3, "dim": 16, "num_heads": 2, "num_layers": 2, "expansion": 4.0}
BATCH, STEPS, SUPERVISION_STEPS = 4, 3, 2
KEPT = 40
"""Entries of each gradient that a fixture keeps, evenly spaced."""


def uniform(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in [-1, 1) from raw bits, which no version of NumPy changes."""
    bits = np.random.Philox(key=seed).random_raw(int(np.prod(shape)))
    return ((bits >> 11) * 2.0**-52 - 1).astype(np.float32).reshape(shape)


def puzzles(step: int) -> dict[str, np.ndarray]:
    """The incoming batch of an update. Labels have a 0 here and there, which does not count."""
    cells = (BATCH, SIZES["seq_len"])
    inputs, labels = (np.int32(3 + 3 * uniform(100 * step + i, cells)) % 6 for i in (1, 2))
    return {"inputs": inputs, "labels": labels, "ids": np.zeros(BATCH, np.int32)}


def thinned(x: Any) -> np.ndarray:
    """Evenly spaced entries of an array."""
    flat = np.asarray(x).reshape(-1)
    return flat[:: max(1, flat.size // KEPT)]


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Weights by dotted path of the weight table: uniform, with the usual size of each."""
    found = {}
    for i, (name, shape) in enumerate(sorted(shapes.items())):
        inputs = shape[1] if name.startswith("layers.") else SIZES["dim"]
        inputs = shape[1] * shape[2] if name == "layers.output" else inputs
        size = 1.7 if name.startswith("initial") else 1.7 * inputs**-0.5
        found[name] = size * uniform(1000 + i, shape)
    return found
