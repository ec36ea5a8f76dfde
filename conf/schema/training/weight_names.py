"""The names of a model's weights, as the trainer's weight tables have them: what patterns of a config can match.

`trainer.models.weights.weight_table` has the weights themselves; a test compares the names.
"""

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from conf.schema.training.layer_kinds import stack_names
from conf.schema.training.loop_parts import Trm
from conf.schema.training.model import Model
from conf.schema.training.optimizer import ParamGroup

INPUT_AXES = {"query": 1, "key": 1, "value": 1, "output": 2, "gate": 1, "up": 1, "down": 1}
INPUT_AXES |= {"query_gate": 1, "delta_query": 1, "delta_key": 1, "delta_value": 1, "delta_gate": 1, "delta_output": 2}
INPUT_AXES |= {"expert_gate": 1, "expert_up": 1, "expert_down": 1}
"""Matrices of a layer that may have an adapter, and how many of their axes are inputs; the others are outputs."""
BESIDE_NORMS = ("post_dense_norm", "experts_norm", "post_experts_norm")
"""Of a dense block's output where experts are beside it, of what these read, and of their output."""
OF_PEFT = {
    **{"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output", "out_proj": "output"},
    **{"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "all-linear": "*"},
}
"""What PEFT calls the matrices of a layer."""


def unmatched_modules(cfg: Model) -> Iterator[tuple[str, str]]:
    """Yield the key of each pattern of `model.lora` that no matrix matches, and the choices."""
    choices = adapted_matrices(cfg)
    for i, pattern in enumerate(cfg.lora.target_modules if cfg.lora else ()):
        if not any(fnmatchcase(path, pattern) for path in choices):
            last = pattern.rpartition(".")[2]
            near = [f"layers.{of}{OF_PEFT.get(last, last)}" for of in ("", "expert_")]
            found = next((name for name in near if any(fnmatchcase(path, name) for path in choices)), None)
            meant = f"; did you mean {found}?" if found else ""
            message = f"{pattern!r} matches no matrix; choices: {', '.join(choices)}{meant}"
            yield f"model.lora.target_modules.{i}", message


def adapted_matrices(cfg: Model) -> dict[str, str]:
    """Return the matrices that may have an adapter, by their path."""
    absent = [] if cfg.has_dense_block or cfg.shared_dim else ["gate", "up", "down"]
    absent += [] if cfg.experts is not None else ["expert_gate", "expert_up", "expert_down"]
    absent += [] if cfg.is_gated else ["gate"]
    absent += [] if cfg.attention_gate else ["query_gate"]
    names = [name for name in INPUT_AXES if name not in absent]
    outside = {} if cfg.tie_word_embeddings else {"unembedding": "unembedding"}
    stacks = (stack for name in names for stack in stack_names(cfg, name))
    return {f"layers.{stack}": stack for stack in stacks} | outside


def targeted_matrices(cfg: Model) -> dict[str, str]:
    """Return the matrices that have an adapter, by their path."""
    patterns = cfg.lora.target_modules if cfg.lora else ()
    choices = adapted_matrices(cfg)
    return {path: choices[path] for path in choices if any(fnmatchcase(path, pattern) for pattern in patterns)}


def wrong_groups(groups: Sequence[ParamGroup], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the key of each required group of the optimizer that matches none of these weights, with the choices; and
    that the groups leave no weight to learn, if they do.
    """
    known = sorted(names)
    for i, group in enumerate(groups):
        if group.required and not any(fnmatchcase(path, group.match) for path in known):
            message = f"{group.match!r} matches no weight of the model; its weights: {', '.join(known)}"
            yield f"optimizer.param_groups.{i}.match", f"{message} (required: false allows it)"
    first = [next((group for group in groups if fnmatchcase(path, group.match)), None) for path in known]
    if first and all(group is not None and group.lr_scale == 0 for group in first):
        yield "optimizer.param_groups", "freezes every weight (lr_scale 0), so nothing is learned; leave one out"


def weight_names(cfg: Model | Trm) -> list[str]:
    """Return the dotted names of all weights of Slipway's own models."""
    if isinstance(cfg, Trm):
        return [*_of_trm(cfg)]
    layer = [*_of_attention(cfg), *_of_delta_net(cfg), *_of_maha(cfg), *_of_mlp(cfg), *_of_residual(cfg)]
    layer += _of_per_layer(cfg)
    stacks = [stack for name in layer for stack in stack_names(cfg, name)]
    found = ["embedding", *(f"layers.{stack}" for stack in stacks), *_of_norm(cfg, "final_norm")]
    found += _of_norm(cfg, "per_layer_norm") if cfg.per_layer_dim else []
    found += ["position_embedding"] * (cfg.position_embedding == "learned")
    found += _of_norm(cfg, "embedding_norm") if cfg.norm_embedding else []
    found += ["unembedding"] * (not cfg.tie_word_embeddings)
    return [*found, *(f"{path}_lora_{part}" for path in targeted_matrices(cfg) for part in "ab")]


def _of_norm(cfg: Model, name: str) -> list[str]:
    return [name] * (cfg.norm != "rms_plain") + [f"{name}_bias"] * (cfg.norm == "layer")


def _of_attention(cfg: Model) -> Iterator[str]:
    if cfg.pre_norms:
        yield from _of_norm(cfg, "attention_norm")
    for name in ("query", "key", "value", "output"):
        yield name
        if cfg.biases in ("attention", "all") or (cfg.biases == "qkv" and name != "output"):
            yield f"{name}_bias"
    if cfg.attention_gate:
        yield "query_gate"
    if cfg.attention_sinks:
        yield "sink_logits"
    if cfg.qk_norm != "none":
        yield from (*_of_norm(cfg, "query_norm"), *_of_norm(cfg, "key_norm"))
    if cfg.post_norms:
        yield from _of_norm(cfg, "post_attention_norm")


def _of_delta_net(cfg: Model) -> Iterator[str]:
    if cfg.delta_net is not None:
        mixed = [f"delta_{name}" for name in ("query", "key", "value")]
        yield from (*mixed, *(f"{name}_kernel" for name in mixed))
        parts = ("gate", "rate", "decay", "time_bias", "decay_log", "norm", "output")
        yield from (f"delta_{part}" for part in parts)


def _of_maha(cfg: Model) -> Iterator[str]:
    if cfg.attention_form == "maha":
        scales = range(1, cfg.maha.scales)
        yield from (f"{name}_{scale}" for scale in scales for name in ("query", "key", "downsample"))
        yield from ("scale_logits",) if cfg.maha.aggregation == "convex" else ()


def _of_mlp(cfg: Model) -> Iterator[str]:
    block = ("gate", "up", "down") if cfg.is_gated else ("up", "down")
    matrices = ("router", "expert_gate", "expert_up", "expert_down") if cfg.experts is not None else ()
    matrices += (("shared_gate",) if cfg.shared_dim else ()) + (block if cfg.has_dense_block or cfg.shared_dim else ())
    yield from _of_norm(cfg, "mlp_norm") if cfg.pre_norms else ()
    yield from matrices
    yield from (f"{name}_bias" for name in matrices if cfg.biases in ("mlp", "all"))
    if cfg.experts is not None and cfg.has_dense_block:
        yield from ("router_scale", "expert_scale")
        yield from (part for name in BESIDE_NORMS for part in _of_norm(cfg, name))
    yield from _of_norm(cfg, "post_mlp_norm") if cfg.post_norms else ()


def _of_per_layer(cfg: Model) -> Iterator[str]:
    if cfg.per_layer_dim:
        yield from (f"per_layer_{name}" for name in ("table", "input", "gate", "output"))
        yield from _of_norm(cfg, "post_per_layer_norm")
    yield from ("layer_scale",) if cfg.layer_scalars else ()


def _of_residual(cfg: Model) -> Iterator[str]:
    yield from ("residual_scale", "embedding_scale") if cfg.residual_scalars else ()
    if cfg.residual != "plain":
        parts = ("mixing_logits", "layer_scale") if cfg.residual == "nash_hc" else _STREAMS
        yield from (f"{name}_{part}" for name in ("attention", "mlp") for part in parts)


_STREAMS = ("streams", "streams_bias", "streams_scale")


def _of_trm(cfg: Trm) -> Iterator[str]:
    yield from ("embedding", "initial_h", "initial_l", "unembedding", "halt", "halt_bias")
    gated = ("gate", "up", "down")
    mixer = ("query", "key", "value", "output") if cfg.mixer == "attention" else [f"mixer_{name}" for name in gated]
    yield from (f"layers.{name}" for name in (*mixer, *gated))
    yield from ("puzzle_embedding",) if cfg.puzzle_width else ()
    yield from ("position_embedding",) if cfg.position_embedding == "learned" else ()
