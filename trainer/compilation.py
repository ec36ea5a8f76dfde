"""The persistent compilation cache: a program that was compiled by an earlier life of a run is loaded."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import jax

from conf.runfile import PodFacts


def keep_programs(folder: str | None, pod: PodFacts) -> None:
    """Look for compiled programs in `folder`, and put new ones there; before the first compilation. None: do not.

    gs:// will do: JAX writes each program whole, from process 0 only, and goes on without the cache where it fails.
    The names of programs are hashes of all that they derive from: code, shapes, topology, compiler and its flags.
    """
    if folder is None:
        return
    jax.config.update("jax_compilation_cache_dir", f"{folder.rstrip('/')}/{_platform(pod)}")


def _platform(pod: PodFacts) -> str:
    """XLA compiles for the very CPU it runs on, which is not in the hash."""
    if pod.backend != "cpu":
        return pod.backend
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"cpu-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
