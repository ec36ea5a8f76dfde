"""Checks before the first step: expected devices, and equal config, code, packages and data on every worker."""

import hashlib
import json
import os
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

from conf.schema.training.run_yaml import PodFacts, RunFile
from trainer.distributed import fingerprint
from trainer.distributed.checksums import DisagreementError
from trainer.distributed.runtime import gather_texts, told_worker

PACKAGES = ("jax", "jaxlib", "libtpu", "optax", "orbax-checkpoint", "numpy")


class WrongDevicesError(RuntimeError):
    """Backend or number of devices differs from the pod's; the message is a table of workers."""


def check_devices(pod: PodFacts) -> None:
    """Compare JAX's devices with the pod's. Raises WrongDevicesError.

    Needs no communication: every process knows all devices, and builds the same table.
    """
    told, own = told_worker(), jax.process_index()
    if pod.workers > 1 and told not in (None, own):
        raise WrongDevicesError(
            f"the controller calls this worker {told}, the TPU runtime process {own}: Google lists the VMs in another "
            "order than their chips have. `slipway down` and `up` get another pod"
        )
    wanted = pod.devices // pod.workers
    backend = jax.default_backend()
    found = Counter(device.process_index for device in jax.devices())
    kind = jax.devices()[0].device_kind
    rows = [(str(worker), backend, kind, str(found[worker])) for worker in range(max(pod.workers, len(found)))]
    if backend == pod.backend and found == Counter(dict.fromkeys(range(pod.workers), wanted)):
        return
    title = f"{pod.accelerator_type} has {pod.workers} workers with {wanted} {pod.backend} devices each; JAX found:"
    raise WrongDevicesError("\n".join([title, *_format_table(("worker", "backend", "kind", "devices"), rows)]))


def check_agreement(run_file: Path, experiment: RunFile) -> None:
    """Compare config, code, packages and data over all workers; all must call it, and all raise DisagreementError."""
    facts = _facts(run_file.read_bytes(), experiment)
    everyone = [json.loads(text) for text in gather_texts(json.dumps(facts))]
    complaints = [line for name in everyone[0] for line in disagreements(name, [facts[name] for facts in everyone])]
    if complaints:
        raise DisagreementError("\n".join(complaints))


def sampling_facts(experiment: RunFile) -> dict[str, str]:
    """Return what a trainer and its samplers must agree on: questions and distribution, code, packages and data."""
    config = experiment.model_dump_json(include={"id", "seed", "loop", "data"})
    return _facts(config.encode(), experiment)


def _facts(config: bytes, experiment: RunFile) -> dict[str, str]:
    return {
        "config": hashlib.sha256(config).hexdigest(),
        "code": os.environ.get("SLIPWAY_CODE_SHA256", "unknown"),
        "packages": " ".join(f"{name}={_version(name)}" for name in PACKAGES),
    } | fingerprint.input_fingerprints(experiment)


def disagreements(name: str, values: list[str]) -> list[str]:
    """Return a line for each worker whose value is not the most common one; a tie goes to worker 0's value."""
    usual = Counter(values).most_common(1)[0][0]  # insertion order breaks ties towards worker 0
    majority = ",".join(str(worker) for worker, value in enumerate(values) if value == usual)
    return [
        f"worker {worker}: {name} {_abbreviate(value)} differs from {_abbreviate(usual)} on workers {majority}"
        for worker, value in enumerate(values)
        if value != usual
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _abbreviate(value: str) -> str:
    """Shorten a hash to its first digits; return anything else in full."""
    return f"{value[:12]}…" if len(value) == 64 and " " not in value else value


def _format_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    ]
