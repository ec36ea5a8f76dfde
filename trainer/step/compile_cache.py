"""The persistent compilation cache, which reuses programs compiled in earlier attempts of a run.

JAX reads and writes a local folder, so it never waits for the network. Only process 0 writes; it copies new files to
the run's folder in the background, where a replacement VM finds them. Programs are kept however quickly they compiled,
so that a restart compiles nothing. File names hash everything a program derives
from: its operations, shapes, topology, compiler and flags.
"""

import hashlib
import logging
import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
from etils import epath

from conf.schema.training.run_yaml import PodFacts

CACHE_FOLDER = "compile_cache"
COPY_INTERVAL_SECONDS = 20.0
NUM_DOWNLOADS = 16
"""Files that are read from the run's folder at the same time: most are small, and each takes a request."""


class CompileCache:
    """Compilation cache of one process.

    local: the folder the program writes to; remote: the run's folder, local or gs://. Create it before the first
    compilation. Failures are warnings: without the cache the run is only slower.
    """

    def __init__(self, local: Path, remote: str, pod: PodFacts, writes: bool) -> None:
        self._local = local / CACHE_FOLDER / _platform_key(pod)
        self._remote = epath.Path(remote) / CACHE_FOLDER / _platform_key(pod)
        self._sizes: dict[str, int] = {}
        self._copied: set[str] = set()
        self._stop = threading.Event()
        try:
            self._fetch()
        except Exception as error:
            logging.warning("cannot read compiled programs from %s: %s", self._remote, error)
        jax.config.update("jax_compilation_cache_dir", str(self._local))
        # applies to GPUs only, and would otherwise make the folder's path part of a program's name
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
        # by default, programs that compile within a second are compiled again by each attempt
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        self._thread = threading.Thread(target=self._copy_loop, name="compile_cache", daemon=True)
        if writes:
            self._thread.start()

    def close(self) -> None:
        """Copy the remaining files, then stop."""
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join()

    def _fetch(self) -> None:
        self._local.mkdir(parents=True, exist_ok=True)
        if not self._remote.exists():
            return
        with ThreadPoolExecutor(NUM_DOWNLOADS) as pool:
            self._copied |= set(pool.map(self._fetch_file, self._remote.glob("*-cache")))

    def _fetch_file(self, source: epath.Path) -> str:
        target = self._local / source.name
        if not target.exists():
            partial = target.with_suffix(".partial")
            partial.write_bytes(source.read_bytes())
            partial.replace(target)
        return source.name

    def _copy_loop(self) -> None:
        try:
            while not self._stop.wait(COPY_INTERVAL_SECONDS):
                self._copy(finished=False)
            self._copy(finished=True)
        except Exception as error:
            logging.warning("cannot write compiled programs to %s: %s", self._remote, error)

    def _copy(self, finished: bool) -> None:
        """Copy files that have not changed since the last pass; JAX writes them in place."""
        for path in sorted(self._local.glob("*-cache")):
            size = path.stat().st_size
            settled = finished or self._sizes.get(path.name) == size
            self._sizes[path.name] = size
            if settled and path.name not in self._copied:
                self._remote.mkdir(parents=True, exist_ok=True)
                partial = self._remote / f"{path.name}.partial"
                partial.write_bytes(path.read_bytes())
                partial.replace(self._remote / path.name)
                self._copied.add(path.name)


def _platform_key(pod: PodFacts) -> str:
    """Identify the CPU model, which XLA compiles for but does not include in a program's name."""
    if pod.backend != "cpu":
        return pod.backend
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"cpu-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
