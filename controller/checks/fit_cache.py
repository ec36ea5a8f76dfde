"""Cache of `slipway fit` results in the state folder, so that `plan` and `up` need not run the compiler."""

import functools
import importlib.util
from pathlib import Path
from typing import Any

from conf.schema.config import Config, digest
from controller.core import formats

SHAPELESS_FIELDS = frozenset(
    {"weights", "steps", "interval", "eval_interval", "eval_batches", "eval_prompts", "warmup_steps", "horizon_steps"}
)
"""Keys for times and locations, whose values do not change the size of the compiled program."""


def cache_key(config: Config) -> str:
    """Return a key of everything that affects compilation: model, loop, optimizer, mesh and slice, without rates and
    counts, and the trainer's code.
    """
    sections = config.model_dump(mode="json", include={"model", "loop", "optimizer", "mesh"})
    return digest([_shapes(sections), config.tpu.accelerator_type, _trainer_hash()])[:16]


@functools.cache
def _trainer_hash() -> str:
    """Hash the trainer's source without importing it, because the controller has no JAX."""
    spec = importlib.util.find_spec("trainer")
    assert spec is not None
    assert spec.origin is not None
    files = sorted(Path(spec.origin).parent.rglob("*.py"))
    return digest([file.read_text() for file in files])


def cache_file(config: Config) -> Path:
    """Return the path of this config's output of `python -m trainer.fit --json`, whether or not it exists."""
    return Path(config.run.state_dir).expanduser() / "fit" / f"{cache_key(config)}.json"


def load(config: Config) -> dict[str, Any] | None:
    """Return the stored document; None if it is missing or unreadable."""
    try:
        return formats.load(cache_file(config).read_text(), str(cache_file(config)))
    except (OSError, ValueError, formats.FormatError):
        return None


def suggested_overrides(config: Config) -> str:
    """Return the overrides that make the run fit; empty if unknown."""
    known = load(config)
    return " ".join(known["fix"]["overrides"]) if known and known["fix"] else ""


def _shapes(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shapes(v) for name, v in value.items() if name not in SHAPELESS_FIELDS}
    return "a number" if isinstance(value, float) else value
