"""Compiled programs as JAX's compilation cache reads and writes them, on one worker or on all workers of a pod.

Worker 0 compiles a program, writes it to its folder and sends it to the others, which meanwhile wait for it, then load
it. Nobody waits without end: worker 0 says when it begins to compile, and when there is nothing to send, because the
program cannot be serialized or does not compile. The others then compile it themselves, as they do if worker 0 says
nothing, or takes too long. Waiting needs no collective, so it cannot block one. If worker 0 dies, JAX ends the others.
"""

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax._src import cache_key, compilation_cache, compiler

from trainer.distributed.exchange import Exchange

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
    """Compiled programs on their way from worker 0 to the others."""

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
