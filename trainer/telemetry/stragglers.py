"""Which worker delays the others, and by which share of an update.

All workers wait for the slowest one in every collective, so all updates take equally long. Two measurements tell who it
is. On its host: the slow one is busy while the others wait for their devices. On its devices: a small computation
without collectives takes longer there than elsewhere.
"""

import statistics
import time
from collections import deque
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trainer.distributed.runtime import gather_numbers

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
