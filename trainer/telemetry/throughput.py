"""Update times by cause, and utilization of the hardware's speed and memory."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from conf.schema.infra.topology import find_topology
from conf.schema.training.model import Model
from conf.schema.training.run_yaml import PodFacts
from trainer.models import maha, weights
from trainer.models.decoder import is_local_layer

GIB = 2**30


class Stopwatch:
    """Seconds per update since the last lap; named host activities are counted separately."""

    def __init__(self, *names: str) -> None:
        self._seconds_by_name = dict.fromkeys(names, 0.0)
        self._lap_start, self._excluded_seconds = time.perf_counter(), 0.0

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the time in the context under one of the names."""
        began = time.perf_counter()
        yield
        self._seconds_by_name[name] += time.perf_counter() - began

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the time in the context from updates: evaluations, samples, checkpoints."""
        began = time.perf_counter()
        yield
        self._excluded_seconds += time.perf_counter() - began

    def lap(self, updates: int) -> dict[str, float]:
        """Return means over this many updates, and reset."""
        now = time.perf_counter()
        values = {"step_time": now - self._lap_start - self._excluded_seconds} | self._seconds_by_name
        self._seconds_by_name = dict.fromkeys(self._seconds_by_name, 0.0)
        self._lap_start, self._excluded_seconds = now, 0.0
        return {name: seconds / updates for name, seconds in values.items()}


def model_flops(cfg: Model, tokens: int, sequence: int) -> float:
    """Return the floating-point operations of an update on this many tokens, excluding recomputation.

    6 per matrix weight and token, 4 if it is frozen, plus attention over the tokens a layer may attend to, ignoring
    causality (https://arxiv.org/abs/2204.02311, appendix B). Of a model of the user's own, 6 per weight and token.
    """
    if cfg.implementation is not None:
        return 6.0 * tokens * weights.num_params(cfg)
    table = weights.weight_table(cfg)
    uses = maha.uses_per_token(cfg)
    each = {name: (6.0 if w.trained else 4.0) * math.prod(w.shape) for name, w in table["layers"].items()}
    layers = sum(uses.get(name, 1) * each[name] for name, w in table["layers"].items() if len(w.shape) > 2)
    seen = sum(min(sequence, cfg.sliding_window) if is_local_layer(cfg, i) else sequence for i in range(cfg.num_layers))
    if cfg.attention_form == "maha":  # a quarter of the pairs at each further scale
        seen *= sum(0.25**scale for scale in range(cfg.maha.scales))
    logits = (6.0 if cfg.lora is None else 4.0) * cfg.vocab_size * cfg.dim
    return tokens * (layers + logits + 12.0 * cfg.num_heads * cfg.head_dim * seen)


def model_flops_utilization(flops: float, seconds: float, pod: PodFacts) -> dict[str, float]:
    """Return model FLOPs utilization, as a fraction of peak bfloat16 speed; empty without TPU chips."""
    if pod.backend != "tpu" or pod.bf16_flops_per_chip is None:
        return {}
    return {"mfu": flops / seconds / (find_topology(pod.accelerator_type).chips * pod.bf16_flops_per_chip)}


def device_memory() -> dict[str, float]:
    """Return current and peak GiB in use on this process's fullest device; empty on CPU."""
    found = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    names = {"hbm_gib": "bytes_in_use", "hbm_peak_gib": "peak_bytes_in_use"}
    return {name: max(stats[key] for stats in found) / GIB for name, key in names.items() if found}
