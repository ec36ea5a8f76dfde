"""What `slipway fit` has found, kept in the state folder so that `plan` and `up` need not ask the compiler."""

import functools
import importlib.util
from pathlib import Path
from typing import Any

from conf.schema.config import Config, digest
from controller.core import formats

SHAPELESS_FIELDS = frozenset(
    {"weights", "steps", "interval", "eval_interval", "eval_batches", "eval_prompts", "warmup_steps", "horizon_steps"}
)
"""Keys that say when something happens or where it lies; another value compiles to a program of the same size."""


def cache_key(config: Config) -> str:
    """Names all that decides what is compiled: model, loop, optimizer, mesh and slice, without rates and counts, and
    the trainer's own code.
    """
    sections = config.model_dump(mode="json", include={"model", "loop", "optimizer", "mesh"})
    return digest([_shapes(sections), config.tpu.accelerator_type, _trainer_hash()])[:16]


@functools.cache
def _trainer_hash() -> str:
    """Hash of the trainer's source. It is looked up, not imported: the controller knows no JAX."""
    spec = importlib.util.find_spec("trainer")
    assert spec is not None
    assert spec.origin is not None
    files = sorted(Path(spec.origin).parent.rglob("*.py"))
    return digest([file.read_text() for file in files])


def cache_file(config: Config) -> Path:
    """Where the document of `python -m trainer.fit --json` for this config is, or would be."""
    return Path(config.run.state_dir).expanduser() / "fit" / f"{cache_key(config)}.json"


def load(config: Config) -> dict[str, Any] | None:
    """The stored document; None where nobody has asked yet, or where it cannot be read."""
    try:
        return formats.load(cache_file(config).read_text(), str(cache_file(config)))
    except (OSError, ValueError, formats.FormatError):
        return None


def suggested_overrides(config: Config) -> str:
    """With which overrides it fits, as far as that is known; empty where it is not."""
    known = load(config)
    return " ".join(known["fix"]["overrides"]) if known and known["fix"] else ""


def _shapes(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shapes(v) for name, v in value.items() if name not in SHAPELESS_FIELDS}
    return "a number" if isinstance(value, float) else value
