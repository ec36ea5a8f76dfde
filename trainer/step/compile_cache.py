"""The persistent compilation cache: programs are compiled once per run, not once per worker or attempt.

Every worker loads from a folder of its own, so JAX never waits for the bucket. Worker 0 alone compiles
(`shared_cache`), and copies new files to the run's folder in the background, where a replacement VM finds them.
Programs are kept however quickly they compiled, so that a restart compiles nothing. File names hash everything a
program derives from: its operations, shapes, topology, compiler and flags.
"""

import hashlib
import json
import logging
import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from etils import epath

from conf.schema.training.run_yaml import PodFacts
from trainer.distributed import exchange
from trainer.distributed.runtime import gather_texts
from trainer.step import shared_cache
from trainer.step.shared_cache import SUFFIX

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
        cache = shared_cache.SharedCache(self._local, programs)
        try:
            self._restore_jax = shared_cache.install(cache, self._local, pod.backend)
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
        if shared_cache.unseal(content) is None:
            target.unlink(missing_ok=True)
            return None
        if not target.exists():
            shared_cache.write_atomically(target, content)
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
                shared_cache.write_atomically(self._remote / path.name, path.read_bytes())
                self._copied.add(path.name)


def _connect(platform_key: str, keys: set[str], pod: PodFacts) -> shared_cache.ProgramExchange | None:
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
    return shared_cache.ProgramExchange(exchange.connect(), lacking)


def _platform_key(pod: PodFacts) -> str:
    """Identify the CPU model, which XLA compiles for but does not include in a program's name."""
    if pod.backend != "cpu":
        return pod.backend
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"cpu-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
