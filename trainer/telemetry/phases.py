"""Where the time of a run goes: wall and CPU seconds of each phase, over all workers, and of JAX's compilation."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from trainer.distributed.runtime import gather_texts

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
