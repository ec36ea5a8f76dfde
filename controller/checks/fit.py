"""Memory: the run fits the chips, according to the TPU compiler in `slipway fit`."""

import functools
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conf.schema.config import Config, digest
from conf.schema.training.layer_kinds import LayerKind, has_own_values, layer_kinds, sized
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.loop_parts import Trm
from conf.schema.training.model import AnyModel, Model
from conf.schema.training.weight_names import targeted_matrices
from controller.checks.training import mesh_axes
from controller.core import json_documents
from controller.core.finding import Issue, check
from controller.inputs.modules import module_files, trainer_references

SHAPELESS_FIELDS = frozenset(
    {"weights", "steps", "interval", "eval_interval", "eval_batches", "eval_prompts", "warmup_steps", "horizon_steps"}
)
"""Keys for times and locations, whose values do not change the size of the compiled program."""


def cache_key(config: Config) -> str:
    """Return a key of everything that affects compilation: model, loop, optimizer, mesh and slice, without rates and
    counts, and the code: the trainer's and the user's own.
    """
    sections = config.model_dump(mode="json", include={"model", "loop", "optimizer", "mesh"})
    own = []
    if [*trainer_references(config)]:
        own = [[name, path.read_text()] for name, path in module_files(config, Path.cwd()).items()]
    return digest([_shapes(sections), config.tpu.accelerator_type, _trainer_hash(), own])[:16]


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
        return json_documents.load(cache_file(config).read_text(), str(cache_file(config)))
    except (OSError, ValueError, json_documents.FormatError):
        return None


def suggested_overrides(config: Config) -> str:
    """Return the overrides that make the run fit; empty if unknown."""
    known = load(config)
    return " ".join(known["fix"]["overrides"]) if known and known["fix"] else ""


def _shapes(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shapes(v) for name, v in value.items() if name not in SHAPELESS_FIELDS}
    return "a number" if isinstance(value, float) else value


SMALL_MODEL_PARAMS = 100_000_000
"""Models up to this size always fit."""


DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
STATE_BYTES = {"adamw": 8, "adam_atan2": 8, "lion": 4, "muon": 4}
"""Bytes of an optimizer's moments per weight. For Muon those of matrices; of the others at least 0."""
CROWDED = 0.75
"""Share of the memory above which what stays there leaves little for activations."""
GIB = 2**30


@check("fit", "error", "model", "mesh", also=("warning", "note"), of_pods=True)
def fits_the_chips(config: Config) -> Iterator[Issue]:
    """A program that does not fit fails minutes after the pod is created. The compiler can tell without a TPU. Without
    it, arithmetic tells what stays in memory: weights, moments, averages and the reference are certain; gradients are
    as large as the weights.
    """
    model = config.model
    if config.program.kind != "trainer" or model is None or config.cloud.kind == "local":
        return
    stored = load(config)
    if stored is None and (crowded := [*_crowded(config, model)]):
        yield from crowded
    elif stored is None and estimate_num_params(model) > SMALL_MODEL_PARAMS:
        yield Issue("memory use is unknown; run `slipway fit` to check that it fits the chips", severity="note")
    short = [program for program in stored["programs"] if not program["fits"]] if stored else []
    if stored and short:
        worst = max(short, key=lambda program: program["peak_gib"])
        fix = f"it fits with {found}" if (found := suggested_overrides(config)) else "see `slipway fit`"
        yield Issue(
            f"{worst['name']} needs {worst['peak_gib']:.2f} GiB per chip (usable: {stored['usable_gib']:.2f}); {fix}"
        )


def _crowded(config: Config, model: AnyModel) -> Iterator[Issue]:
    """Yield that what stays in the memory of each device leaves no room, or little."""
    topology, axes = config.topology, mesh_axes(config)
    if topology.hbm_bytes_per_chip is None or axes is None:
        return
    memory = topology.hbm_bytes_per_chip * topology.chips / topology.devices
    state, gradients = (share / (math.prod(axes.values()) // axes["data"]) for share in lasting_bytes(config, model))
    shape = config.mesh.shape(axes)
    advice = "split them over more devices (mesh.fsdp, mesh.tensor), or use a larger slice"
    if state > memory:
        took = f"on mesh {shape}, weights and optimizer state take {state / GIB:.1f} GiB of each device's"
        yield Issue(f"{took} {memory / GIB:.1f}; {advice}", "mesh")
    elif state + gradients > CROWDED * memory:
        took = f"on mesh {shape}, weights, gradients and optimizer state take {(state + gradients) / GIB:.1f} GiB"
        yield Issue(
            f"{took} of each device's {memory / GIB:.1f}; run `slipway fit` to see what activations add; {advice}",
            "mesh",
            "warning",
        )


def lasting_bytes(config: Config, model: AnyModel) -> tuple[int, int]:
    """Return the bytes of what stays in memory between updates, and of the gradients, on all devices that share it."""
    weights, optimizer, loop, frozen = estimate_num_params(model), config.optimizer, config.loop, 0
    if isinstance(model, Model) and model.lora is not None:  # the base is its own reference
        frozen, weights = weights * DTYPE_BYTES[model.lora.base_dtype], _adapters_of_experts(model, model.lora.r)
    each = DTYPE_BYTES["float32"]
    if optimizer is not None:
        each += STATE_BYTES.get(optimizer.kind, 0) + (4 if optimizer.ema_decay is not None else 0)
    if isinstance(loop, GrpoLoop) and loop.kl_coef > 0 and loop.teacher is None:
        each += DTYPE_BYTES[loop.reference_dtype or "float32"]
    return frozen + weights * each, weights * DTYPE_BYTES["float32"]


def _adapters_of_experts(model: Model, rank: int) -> int:
    """Return the number of weights of the experts' adapters; those of other matrices are few."""
    if model.experts is None:
        return 0
    matrices = sum(name.startswith("expert_") for name in targeted_matrices(model).values())
    each = rank * (model.dim + (model.experts.inner_dim or model.mlp_dim))
    return model.num_layers * model.experts.count * matrices * each


def estimate_num_params(model: AnyModel) -> int:
    """Return the approximate number of parameters: the matrices and the embedding tables."""
    if isinstance(model, Trm):
        return sum(size for size, _ in model.matrices) + 2 * model.vocab_size * model.dim
    tables = model.dim * (1 if model.tie_word_embeddings else 2) + model.num_layers * model.per_layer_dim
    return matrix_weights(model) + model.vocab_size * tables


def matrix_weights(model: Model, *, per_token: bool = False) -> int:
    """Return the number of weights in the matrices of all layers, or of those that a token takes."""
    return sum(_layer_weights(model, kind, per_token=per_token) for kind in layer_kinds(model))


def _layer_weights(model: Model, kind: LayerKind, *, per_token: bool) -> int:
    size = sized(model, kind)
    keys = 0 if kind.shares else size.num_kv_heads * (2 if has_own_values(model, kind) else 1)
    attention = size.dim * size.head_dim * ((3 if model.attention_gate else 2) * size.num_heads + keys)
    if kind.is_recurrent and (own := model.delta_net) is not None:
        values = own.num_value_heads * (3 * own.value_head_dim + 2)
        attention = model.dim * (2 * own.num_key_heads * own.key_head_dim + values)
    each = (3 if model.is_gated else 2) * model.dim
    feed_forward = each * size.mlp_dim if model.has_dense_block else 0
    if model.experts is not None:
        taken = model.experts.per_token if per_token else model.experts.count
        feed_forward += taken * each * (model.experts.inner_dim or model.mlp_dim) + model.dim * model.experts.count
        feed_forward += each * model.shared_dim + model.dim * (model.shared_dim > 0)
    if model.attention_form == "maha":
        attention += (model.maha.scales - 1) * model.dim * (2 * model.num_heads * model.head_dim + 3 * model.dim)
    return attention + feed_forward + 3 * model.dim * model.per_layer_dim + 2 * _residual_weights(model)


def _residual_weights(model: Model) -> int:
    """Return the weights of one residual connection."""
    if model.residual in ("plain", "nash_hc"):
        return model.dim**2 if model.residual == "nash_hc" else 0
    n = model.hyper.streams
    return n * model.dim * (2 * n + (n * n if model.residual == "mhc" else math.factorial(n)))
