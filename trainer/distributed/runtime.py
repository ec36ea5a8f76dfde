"""Processes of one run: join, exchange texts and numbers, exit together.

Texts and bytes go through JAX's coordination service, on the hosts: nothing is compiled.
"""

import ctypes
import json
import os
import sys
import time
import traceback
import warnings
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import version
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import xla_client

from conf.formats import LocalRunFileError
from conf.schema.training.run_yaml import PodFacts
from conf.xla_flags import complaint, ignored_words
from trainer.distributed import mesh as meshes

POLL_SECONDS = 2.0
"""How long one request for a value waits on the server."""
GATHER_TIMEOUT_SECONDS = 24 * 3600
"""Only a bound: JAX ends the others within seconds after a worker dies."""


class Exchange:
    """This process's access to the coordination service, which runs on worker 0 and ends with it."""

    def __init__(self, client: Any, process: int, processes: int) -> None:
        self._client, self._processes = client, processes
        self.process = process
        self._num_gathered = 0

    def gather(self, text: str) -> list[str]:
        """Return every process's text, in process order; all must call it, in the same order."""
        number, self._num_gathered = self._num_gathered, self._num_gathered + 1
        folder = f"slipway/gather/{number}/"
        self._client.key_value_set_bytes(f"{folder}{self.process:06}", text.encode())
        self._client.wait_at_barrier(f"slipway/gather/{number}", GATHER_TIMEOUT_SECONDS * 1000)
        rows = sorted(self._client.key_value_dir_get_bytes(folder))
        if self.process == 0 and number:  # all have read the previous texts, or they would not be here
            self._client.key_value_delete(f"slipway/gather/{number - 1}/")
        assert len(rows) == self._processes, f"{len(rows)} of {self._processes} texts"
        return [value.decode() for _, value in rows]

    def put(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(f"slipway/{key}", value, allow_overwrite=True)

    def get(self, key: str, timeout_seconds: float) -> bytes | None:
        """Return the value, or None if no process has put it within the timeout."""
        given_up = time.monotonic() + timeout_seconds
        while True:
            left = min(POLL_SECONDS, max(0.001, given_up - time.monotonic()))
            try:
                return self._client.blocking_key_value_get_bytes(f"slipway/{key}", int(left * 1000) or 1)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if time.monotonic() >= given_up:
                return None


@cache
def connect() -> Exchange:
    """Return the exchange of this process. Call it after the processes have joined."""
    from jax._src import distributed  # JAX has no public name for the client

    state = distributed.global_state
    return Exchange(state.client, state.process_id, jax.process_count())


HEARTBEAT_TIMEOUT_SECONDS = 30
"""Silence after which a peer counts as dead. JAX waits 100 s; a live migration of a VM may take more than 10 s."""

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of mallopt in malloc.h."""


class JoinError(RuntimeError):
    """The processes did not connect to each other in time."""


def check_xla_flags() -> None:
    """Raise LocalRunFileError if jaxlib would end this process because of XLA_FLAGS. Call it before any use of JAX.

    A fork of the process tries: a fresh one would load jaxlib again.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if not flags:
        return
    try:
        ignored = ignored_words(flags)
    except ValueError as error:
        raise LocalRunFileError(f"XLA_FLAGS: {error}") from None
    if ignored:
        raise LocalRunFileError(f"XLA_FLAGS: flags begin with --, and jaxlib ignores {' '.join(ignored)}")
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # threads of NumPy exist, of which the fork needs none
        child = os.fork()
    if not child:
        status = 1
        try:
            os.dup2(writer, 2)
            xla_client.CompileOptions()  # reads them
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8", errors="replace") as pipe:
        said = pipe.read()
    if os.waitpid(child, 0)[1]:
        raise LocalRunFileError(complaint(said, version("jaxlib")))


def set_cpu_threads(pod: PodFacts) -> None:
    """Give XLA's CPU backend enough threads. Call it before any use of JAX; a no-op on other backends.

    Each virtual device may hold a thread while it waits in a collective. With the default of a thread per core, a
    worker with more devices than cores can deadlock: all threads wait for a device that gets none.
    """
    if pod.backend == "cpu":
        # with more threads than available cores, each operation would wait for the last thread
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ.setdefault("PJRT_NPROC", str(max(cores, 2 * pod.devices // pod.workers)))


def keep_freed_memory(pod: PodFacts) -> None:
    """Make the C library keep freed memory for the next arrays; a no-op on other backends and without glibc.

    By default glibc returns large blocks to the kernel, which clears each page of the next large array again. XLA's
    CPU backend allocates the arrays of a step anew each time: that took a sixth of an update of `lm_tinyshakespeare`.
    Threads keep their own heaps, of at most 64 MB each: with one heap for all (M_ARENA_MAX) they wait for each other.
    Call it before any use of JAX. The process stays at its peak of memory.
    https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if pod.backend == "cpu" and mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, -1)
        mallopt(M_MMAP_MAX, 0)


def told_worker() -> int | None:
    """Return which worker of the pod this is, as the controller says; None without one."""
    told = os.environ.get("SLIPWAY_WORKER") or os.environ.get("TPU_WORKER_ID")
    return None if told is None else int(told)


def join_processes(pod: PodFacts, timeout_seconds: int) -> None:
    """Connect this process to those on the other workers; a no-op with one worker.

    The controller says who they are; without one, JAX asks the TPU VM's metadata. Raises JoinError after the timeout.
    """
    if pod.workers == 1:
        return
    worker, coordinator = told_worker(), os.environ.get("JAX_COORDINATOR_ADDRESS")
    initialize = partial(jax.distributed.initialize, num_processes=pod.workers)
    if worker is not None and coordinator:
        told = {"coordinator_address": coordinator, "process_id": worker}
        initialize = partial(initialize, **told, cluster_detection_method="deactivate")
    try:
        initialize(
            initialization_timeout=timeout_seconds,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
            shutdown_timeout_seconds=20,
        )
    except (RuntimeError, ValueError) as error:
        who = "with unknown index" if worker is None else worker
        raise JoinError(
            f"worker {who} (of {pod.workers}) could not connect to the others within {timeout_seconds} s. Does the "
            f"program run on all workers, and does a firewall rule let them reach worker 0? JAX reports: {error}"
        ) from error


def gather_texts(text: str) -> list[str]:
    """Return every process's text, in process order; all must call it. For texts of up to megabytes."""
    return [text] if jax.process_count() == 1 else connect().gather(text)


def gather_numbers(mesh: Mesh, row: np.ndarray) -> np.ndarray:
    """Return every process's row of numbers, [processes, n]; all must call it, with as many numbers of one dtype.

    It goes over the devices' network, which takes less than `gather_texts` but waits for what the devices compute.
    """
    if jax.process_count() == 1:
        return row[None]
    assert mesh.devices is not None, "a mesh of real devices"
    devices = list(mesh.devices.flat)
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    with jax.transfer_guard("allow"):
        rows = jax.make_array_from_callback((len(devices), len(row)), split, lambda _: row[None])
        table = np.asarray(_replicate(mesh)(rows).addressable_data(0))
    first_device = {device.process_index: place for place, device in reversed(list(enumerate(devices)))}
    return table[[first_device[process] for process in range(jax.process_count())]]


@cache
def _replicate(mesh: Mesh) -> Any:
    return jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))


def gather_tree(part: dict[str, Any]) -> dict[str, Any]:
    """Merge every process's part of a JSON tree of dicts; all must call it, and all get the same.

    Raises ValueError if two processes give different values for a key.
    """
    whole: dict[str, Any] = {}
    for text in gather_texts(json.dumps(part)):
        _merge(whole, json.loads(text), "")
    return whole


def _merge(whole: dict[str, Any], part: dict[str, Any], prefix: str) -> None:
    for key, value in part.items():
        known = whole.setdefault(key, value)
        if isinstance(known, dict) and isinstance(value, dict):
            _merge(known, value, f"{prefix}{key}.")
        elif known != value:
            raise ValueError(f"{prefix}{key} is {known!r} on one worker and {value!r} on another")


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Shard a whole batch (a pytree of NumPy arrays, equal on every process) over the mesh by rows.

    Each process keeps the rows of its own devices. Raises ValueError if the rows do not divide evenly.
    """
    rows = meshes.named_sharding(mesh, "batch")
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, rows, lambda index: x[index]), batch)


def gather_batch(x: jax.Array) -> np.ndarray:
    """Return a row-sharded array, as from `shard_batch`, in full; all processes must call it."""
    if jax.process_count() == 1:
        return np.asarray(x)
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(x, tiled=True))


def print_error(error: object) -> None:
    """Print an error to stderr. Where that is a file on a full disk, the exit code alone tells."""
    with suppress(OSError):
        print(error, file=sys.stderr, flush=True)


def exit_together(code: int) -> NoReturn:
    """Exit together with the other processes, each with its own exit code."""
    try:
        if jax.distributed.is_initialized():
            jax.distributed.shutdown()  # waits for the others, so that none mistakes the end of worker 0 for a crash
    except BaseException:
        code = code or 1
        print_error(traceback.format_exc())
    _exit(code)


def exit_now(code: int, error: object = "") -> NoReturn:
    """Print an error, if any, and exit at once; an orderly exit would wait for the other processes."""
    if error:
        print_error(error)
    _exit(code)


def _exit(code: int) -> NoReturn:
    """Exit without atexit handlers: JAX's would wait again, and threads of a broken collective would block them.

    Nothing that goes wrong here may turn this into an orderly exit: threads of Orbax wait for the other processes.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
