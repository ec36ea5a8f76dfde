"""Where the time of a run goes: by phase, by cause within an update, by worker; and use of the hardware.

All workers wait for the slowest one in every collective, so all updates take equally long. Two measurements tell who it
is. On its host: the slow one is busy while the others wait for their devices. On its devices: a small computation
without collectives takes longer there than elsewhere.
"""

import json
import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from conf.schema.topology import find_topology
from conf.schema.training.layer_kinds import attended_entries
from conf.schema.training.model import Model
from conf.schema.training.run_yaml import PodFacts
from trainer.distributed.runtime import gather_numbers, gather_texts
from trainer.models import experts, maha, weights

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

    6 per token and matrix weight that it takes, 4 if that is frozen, plus attention over the tokens a layer may attend
    to, ignoring causality (https://arxiv.org/abs/2204.02311, appendix B). Of a model of the user's own, 6 per weight
    and token.
    """
    if cfg.implementation is not None:
        return 6.0 * tokens * weights.num_params(cfg)
    table = weights.weight_table(cfg)
    uses = maha.uses_per_token(cfg) | experts.uses_per_token(cfg) | {"per_layer_table": 0}
    each = {name: (6.0 if w.trained else 4.0) * math.prod(w.shape) for name, w in table["layers"].items()}
    layers = sum(uses.get(name, 1) * each[name] for name, w in table["layers"].items() if len(w.shape) > 2)
    seen = attended_entries(cfg, sequence)
    if cfg.attention_form == "maha":  # a quarter of the pairs at each further scale
        seen *= sum(0.25**scale for scale in range(cfg.maha.scales))
    logits = (6.0 if cfg.lora is None else 4.0) * cfg.vocab_size * cfg.dim
    return tokens * (layers + logits + 12.0 * seen)


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


COMPILATION = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile or load",
}
"""JAX's names of the parts of compilation, whose wall time it reports."""


class PhaseTimes:
    """Seconds of this process by phase. Time in a phase inside another one counts for the inner one only.

    The first phase, start, has all CPU time since the process began: imports and joining the others.
    """

    def __init__(self) -> None:
        self._open = ["start"]
        self._wall, self._cpu = time.perf_counter(), 0.0
        self._seconds = defaultdict[str, list[float]](lambda: [0.0, 0.0])
        self._compilation = dict.fromkeys(COMPILATION.values(), 0.0)

    def listen(self) -> None:
        """Count JAX's compilation until `close`."""
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def enter(self, phase: str) -> None:
        """End the outermost phase and begin another one."""
        self._lap()
        self._open[0] = phase

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Count what is done in the context for a phase inside the open one."""
        self._lap()
        self._open.append(phase)
        try:
            yield
        finally:
            self._lap()
            self._open.pop()

    def close(self) -> list[str]:
        """Return lines to print; all processes must call it.

        Wall seconds are those of worker 0, CPU seconds the sum over all workers.
        """
        self._lap()
        jax.monitoring.unregister_event_duration_listener(self._count)
        own = {"cpu": {phase: cpu for phase, (_, cpu) in self._seconds.items()}, "compilation": self._compilation}
        everyone = [json.loads(text) for text in gather_texts(json.dumps(own))]
        phases = [
            f"{phase} {wall:.1f} ({sum(each['cpu'].get(phase, 0.0) for each in everyone):.1f})"
            for phase, (wall, _) in self._seconds.items()
        ]
        parts = [
            " ".join([part, *(f"{each['compilation'][part]:.1f}" for each in everyone)]) for part in self._compilation
        ]
        return [
            f"seconds of worker 0 (CPU seconds of all workers): {', '.join(phases)}",
            f"seconds of compilation, by worker: {', '.join(parts)}",
        ]

    def _count(self, event: str, duration_secs: float, **_: Any) -> None:
        if event in COMPILATION:
            self._compilation[COMPILATION[event]] += duration_secs

    def _lap(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        counted = self._seconds[self._open[-1]]
        counted[0] += wall - self._wall
        counted[1] += cpu - self._cpu
        self._wall, self._cpu = wall, cpu


PROBE_SIZE = 256
PROBE_SHARE = 0.002
"""Largest share of the time that the probe may take; it is left out until then."""
PROBES = 5
"""Number of measurements that count."""
PROBE_SLOWER = 1.25
"""Factor above the median of the others from which a probe counts as slow; below, it is noise."""


class WorkerTimes(NamedTuple):
    """Seconds of one worker: per update on its host, and waiting for its devices; and of its last probe."""

    host: float
    wait: float
    probe: float


class Straggler(NamedTuple):
    """The slowest worker, and the seconds by which its host and its devices delay each update."""

    worker: int
    host_seconds: float
    device_seconds: float

    @property
    def seconds(self) -> float:
        return self.host_seconds + self.device_seconds


def find_straggler(times: list[WorkerTimes]) -> Straggler:
    """Return who delays the others most. times: of two or more workers, in order."""
    found, computing = [], min(each.wait for each in times)  # who waits longer waits for another host too
    for worker, own in enumerate(times):
        others = [each for other, each in enumerate(times) if other != worker]
        longer = own.host - statistics.median(each.host for each in others)
        waited = statistics.median(each.wait for each in others) - own.wait
        usual = statistics.median(each.probe for each in others)
        slow = usual > 0 and own.probe > PROBE_SLOWER * usual
        on_devices = computing * (1 - usual / own.probe) if slow else 0.0
        found.append(Straggler(worker, max(0.0, min(longer, waited)), on_devices))
    return max(found, key=lambda each: each.seconds)


class StragglerWatch:
    """Compares the workers at every metric line. All processes call it, at the same points of the program."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._probe = DeviceProbe() if jax.process_count() > 1 else None

    def compare(self, step_time: float, wait_time: float) -> dict[str, float]:
        """Return metrics that name the slowest worker; empty with one worker.

        step_time, wait_time: seconds per update since the last line, and those of them spent waiting for the devices.
        """
        if self._probe is None:
            return {}
        own = WorkerTimes(max(0.0, step_time - wait_time), wait_time, self._probe.seconds)
        table = gather_numbers(self._mesh, np.array(own, np.float32))
        self._probe.measure()  # now that the devices have nothing else to do
        found = find_straggler([WorkerTimes(*row) for row in table.tolist()])
        share = min(1.0, found.seconds / step_time) if step_time > 0 else 0.0
        return {
            "slow_worker": found.worker,
            "slow_worker_share": share,
            "slow_worker_host_time": found.host_seconds,
            "slow_worker_device_time": found.device_seconds,
        }


class DeviceProbe:
    """A matrix product on every device of this process, without the others."""

    def __init__(self) -> None:
        devices = jax.local_devices()
        self._mesh = jax.make_mesh((len(devices),), ("local",), devices=devices, axis_types=(AxisType.Auto,))
        ones = np.ones((len(devices), PROBE_SIZE, PROBE_SIZE), np.float32)
        self._input = jax.device_put(ones, NamedSharding(self._mesh, PartitionSpec("local")))
        self._multiply = jax.jit(lambda x: x @ x)
        self._run()  # compiles it
        self._last, self._recent = time.perf_counter(), deque[float]([], PROBES)

    @property
    def seconds(self) -> float:
        """Return the shortest of the last measurements, which noise does not lengthen; 0 before the first."""
        return min(self._recent, default=0.0)

    def measure(self) -> None:
        """Measure again, unless that would cost too much so soon."""
        began = time.perf_counter()
        if max(self._recent, default=0.0) <= PROBE_SHARE * (began - self._last):
            self._run()
            self._last = time.perf_counter()
            self._recent.append(self._last - began)

    def _run(self) -> None:
        with jax.set_mesh(self._mesh):  # the loop's own mesh has devices of other processes
            jax.block_until_ready(self._multiply(self._input))
