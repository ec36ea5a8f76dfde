"""The persistent compilation cache: programs are compiled once per run, not once per worker or attempt.

Every worker loads from a folder of its own, so JAX never waits for the bucket. Worker 0 alone compiles, and
copies new files to the run's folder in the background, where a replacement VM finds them.
Programs are kept however quickly they compiled, so that a restart compiles nothing. File names hash everything a
program derives from: its operations, shapes, topology, compiler and flags.
"""

import hashlib
import json
import logging
import platform
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from etils import epath
from jax._src import cache_key, compilation_cache, compiler

from conf.schema.training.run_yaml import PodFacts
from trainer.distributed.runtime import Exchange, connect, gather_texts

SUFFIX = "-cache"
DIGEST_BYTES = hashlib.sha256().digest_size
COMPILE_SECONDS = 3600.0
"""How long the others wait for a program that worker 0 compiles."""
PATIENCE_SECONDS = 300.0
"""How long a worker waits, summed over all programs, for worker 0 to begin to compile them; four wait at a time."""


def seal(value: bytes) -> bytes:
    """Return the content of an entry's file: a digest and the value."""
    return hashlib.sha256(value).digest() + value


def unseal(content: bytes) -> bytes | None:
    """Return the value in an entry's file, or None if it is truncated or altered."""
    value = content[DIGEST_BYTES:]
    return value if hashlib.sha256(value).digest() == content[:DIGEST_BYTES] else None


def write_atomically(path: Any, content: bytes) -> None:
    """Write a file, local or gs://, that is complete or absent."""
    partial = path.parent / f"{path.name}.partial"
    partial.write_bytes(content)
    partial.replace(path)


class ProgramExchange:
    """Compiled programs on their way from worker 0 to the others.

    Worker 0 compiles a program, writes it to its folder and sends it to the others, which meanwhile wait for it, then
    load it. Nobody waits without end: worker 0 says when it begins to compile, and when there is nothing to send,
    because the program cannot be serialized or does not compile. The others then compile it themselves, as they do if
    worker 0 says nothing, or takes too long. Waiting needs no collective, so it cannot block one. If worker 0 dies, JAX
    ends the others.
    """

    def __init__(self, exchange: Exchange, lacking: set[str]) -> None:
        """Take the exchange, and the keys that worker 0 has in its folder and another worker has not."""
        self._exchange, self.lacking = exchange, lacking
        self._sent: set[str] = set()
        self._patience = PATIENCE_SECONDS
        self.leads = exchange.process == 0

    def begin(self, key: str) -> None:
        """Tell the others that worker 0 compiles a program."""
        if key not in self._sent:
            self._exchange.put(f"compiling/{key}", b"")

    def send(self, key: str, value: bytes | None) -> None:
        """Send a program to the others; None: there is nothing to send."""
        if key not in self._sent:
            self._sent.add(key)
            self._exchange.put(f"compiled/{key}", value or b"")

    def receive(self, key: str) -> bytes | None:
        """Wait for a program of worker 0. Returns None if this worker must compile it itself."""
        began = time.monotonic()
        while time.monotonic() - began < COMPILE_SECONDS:
            asked = time.monotonic()
            value = self._exchange.get(f"compiled/{key}", 1.0 if self._patience > 0 else 0.001)
            if value is not None:
                return value or None
            if self._exchange.get(f"compiling/{key}", 0.001) is None:
                self._patience -= time.monotonic() - asked
                if self._patience <= 0:
                    return None
        logging.warning("worker 0 has not compiled %s within %.0f s; it is compiled here as well", key, COMPILE_SECONDS)
        return None


class SharedCache:
    """Entries of JAX's cache: files in a folder, and those that worker 0 sends. JAX calls `put` on worker 0 only."""

    def __init__(self, folder: Path, programs: ProgramExchange | None) -> None:
        self._path, self._programs = folder, programs

    def get(self, key: str) -> bytes | None:
        """Return a program that is on this worker, or that worker 0 sends. Else JAX compiles it."""
        value = self._read(key)
        if self._programs is None:
            return value
        if self._programs.leads:
            if value is None:
                self._programs.begin(key)
            else:
                self._programs.send(key, value if key in self._programs.lacking else None)
            return value
        if value is None and (value := self._programs.receive(key)) is not None:
            self.put(key, value)
        return value

    def put(self, key: str, value: bytes) -> None:
        """Keep a program, and send it to the others."""
        if self._programs is not None and self._programs.leads:
            self._programs.send(key, value)
        write_atomically(self._path / f"{key}{SUFFIX}", seal(value))

    def compiled(self, key: str) -> None:
        """Tell the others that worker 0 is done with a program, sent or not."""
        if self._programs is not None and self._programs.leads:
            self._programs.send(key, None)

    def _read(self, key: str) -> bytes | None:
        path = self._path / f"{key}{SUFFIX}"
        if not path.exists():
            return None
        value = unseal(path.read_bytes())
        if value is None:
            logging.warning("the compiled program %s is damaged; it is compiled again", path)
        return value


def install(cache: SharedCache, folder: Path, backend: str) -> Callable[[], None]:
    """Make JAX use the cache. Returns a function that restores JAX. Call it before the first compilation.

    Raises AttributeError, and changes nothing, if this version of JAX has other names than those replaced here.
    """
    real = compiler._compile_and_write_cache

    def compile_and_write(*arguments: Any) -> Any:
        try:
            return real(*arguments)
        finally:
            cache.compiled(arguments[-1])

    replaced = [(compiler, "_compile_and_write_cache", compile_and_write)]
    if backend == "cpu":
        replaced += _equal_cpu_keys()
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # applies to GPUs only, and would otherwise make the folder's path part of a program's name
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    # by default, programs that compile within a second are compiled again by each attempt
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    compilation_cache._cache, compilation_cache._cache_initialized = cache, True  # pyright: ignore[reportAttributeAccessIssue]
    for module, name, value in replaced:
        setattr(module, name, value)

    def restore() -> None:
        for module, name, value in before:
            setattr(module, name, value)
        compilation_cache.reset_cache()

    return restore


def _equal_cpu_keys() -> list[tuple[Any, str, Any]]:
    """Return what makes the keys of programs equal on all workers, as they are on TPUs.

    JAX hashes the devices of a process's own topology and the ids of a program's devices, of which a program for CPUs
    is independent.
    """
    hash_options = cache_key._hash_serialized_compile_options

    def without_devices(hashed: Any, options: Any, strip_device_assignment: bool = False) -> None:
        hash_options(hashed, options, strip_device_assignment=True)

    return [
        (cache_key, "_hash_accelerator_config", cache_key._hash_devices),
        (cache_key, "_hash_serialized_compile_options", without_devices),
    ]


CACHE_FOLDER = "compile_cache"
COPY_INTERVAL_SECONDS = 20.0
NUM_DOWNLOADS = 16
"""Files that are read from the run's folder at the same time: most are small, and each takes a request."""


class CompileCache:
    """Compilation cache of one process; all processes create and close it.

    local: the folder the program writes to; remote: the run's folder, local or gs://. Create it before the first
    compilation. Failures are warnings: without the cache the run is only slower.
    """

    def __init__(self, local: Path, remote: str, pod: PodFacts, writes: bool) -> None:
        key = _platform_key(pod)
        self._local = local / CACHE_FOLDER / key
        self._remote = epath.Path(remote) / CACHE_FOLDER / key
        self._copied: set[str] = set()
        self._stop = threading.Event()
        self.requested = self.loaded = 0
        try:
            self._fetch()
        except Exception as error:
            logging.warning("cannot read compiled programs from %s: %s", self._remote, error)
        programs = _connect(key, {path.name.removesuffix(SUFFIX) for path in self._local.glob(f"*{SUFFIX}")}, pod)
        cache = SharedCache(self._local, programs)
        try:
            self._restore_jax = install(cache, self._local, pod.backend)
        except AttributeError as error:
            logging.warning("compiled programs are neither kept nor shared with JAX %s: %s", jax.__version__, error)
            self._restore_jax = lambda: None
        jax.monitoring.register_event_listener(self._count)
        self._thread = threading.Thread(target=self._copy_loop, name="compile_cache", daemon=True)
        if writes:
            self._thread.start()

    def close(self) -> str:
        """Copy the remaining files, and return how many programs each worker has compiled and loaded."""
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join()
        jax.monitoring.unregister_event_listener(self._count)
        self._restore_jax()
        counts = gather_texts(f"{self.requested - self.loaded} compiled, {self.loaded} loaded")
        return "programs: " + "; ".join(f"worker {worker} {count}" for worker, count in enumerate(counts))

    def _count(self, event: str, **_: Any) -> None:
        self.requested += event == "/jax/compilation_cache/compile_requests_use_cache"
        self.loaded += event == "/jax/compilation_cache/cache_hits"

    def _fetch(self) -> None:
        self._local.mkdir(parents=True, exist_ok=True)
        if not self._remote.exists():
            return
        with ThreadPoolExecutor(NUM_DOWNLOADS) as pool:
            self._copied |= set(filter(None, pool.map(self._fetch_file, self._remote.glob(f"*{SUFFIX}"))))

    def _fetch_file(self, source: epath.Path) -> str | None:
        """Copy a file to this worker. Returns its name, or None if it is damaged, so that a good one replaces it."""
        target = self._local / source.name
        content = (target if target.exists() else source).read_bytes()
        if unseal(content) is None:
            target.unlink(missing_ok=True)
            return None
        if not target.exists():
            write_atomically(target, content)
        return source.name

    def _copy_loop(self) -> None:
        try:
            while not self._stop.wait(COPY_INTERVAL_SECONDS):
                self._copy()
            self._copy()
        except Exception as error:
            logging.warning("cannot write compiled programs to %s: %s", self._remote, error)

    def _copy(self) -> None:
        """Copy new files."""
        for path in sorted(self._local.glob(f"*{SUFFIX}")):
            if path.name not in self._copied:
                self._remote.mkdir(parents=True, exist_ok=True)
                write_atomically(self._remote / path.name, path.read_bytes())
                self._copied.add(path.name)


def _connect(platform_key: str, keys: set[str], pod: PodFacts) -> ProgramExchange | None:
    """Return the exchange of programs with worker 0, if this worker can use what it compiles.

    keys: of the programs on this worker. On GPUs, all workers share the search for the fastest kernels, so all compile.
    """
    if jax.process_count() == 1 or pod.backend == "gpu":
        return None
    own = {"platform": platform_key, "keys": sorted(keys)}
    first, *others = [json.loads(text) for text in gather_texts(json.dumps(own))]
    if platform_key != first["platform"]:
        return None
    lacking = {key for other in others for key in set(first["keys"]) - set(other["keys"])}
    return ProgramExchange(connect(), lacking)


def _platform_key(pod: PodFacts) -> str:
    """Identify the CPU model, which XLA compiles for but does not include in a program's name."""
    if pod.backend != "cpu":
        return pod.backend
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"cpu-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
