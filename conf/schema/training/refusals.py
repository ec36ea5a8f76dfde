"""What the trainer refuses although each key alone is valid. `plan` says the same before a pod is rented."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from conf.formats import RunFileError
from conf.schema.training.data import ArithmeticData, Data, QuestionData, TextData
from conf.schema.training.loop import OFFLINE_LOSSES, REJECTED, GrpoLoop, LmLoop, Loop, TextSamples
from conf.schema.training.loop_parts import PuzzleLoop
from conf.schema.training.model import AnyModel, Model
from conf.schema.training.optimizer import Optimizer
from conf.schema.training.run_yaml import RunFile
from conf.schema.training.settings import CheckpointSettings, Mesh
from conf.schema.training.weight_names import unmatched_modules, weight_names, wrong_groups

BITS_PER_BYTE = "eval_bits_per_byte"
EVALUATED: dict[type, tuple[str, ...]] = {
    LmLoop: ("eval_loss", BITS_PER_BYTE),
    GrpoLoop: ("eval_accuracy",),
    PuzzleLoop: ("eval_exact_accuracy", "eval_cell_accuracy", "eval_q_accuracy", "eval_lm_loss"),
}
"""The metrics by which a checkpoint can be the best, by loop."""
NO_PAIRS = f"dpo reads the column {REJECTED!r}, which data=arithmetic has not"
BACKENDS = {"cudnn": "gpu", "splash": "tpu"}
"""The backend of each kernel of `model.attention` that has one only."""


class Sections(Protocol):
    """What a config and a `run.yaml` share."""

    @property
    def model(self) -> AnyModel | None: ...
    @property
    def data(self) -> Data | None: ...
    @property
    def loop(self) -> Loop | None: ...
    @property
    def optimizer(self) -> Optimizer | None: ...
    @property
    def checkpoint(self) -> CheckpointSettings: ...
    @property
    def mesh(self) -> Mesh: ...


class Refusal(NamedTuple):
    """A key that cannot have its value, and why."""

    key: str
    message: str


def require(experiment: RunFile) -> None:
    """Raise RunFileError with every refusal."""
    if found := [f"{key}: {why}" for key, why in refusals(experiment, experiment.seed, experiment.pod.backend)]:
        raise RunFileError("\n".join(found))


def refusals(run: Sections, seed: int, backend: str) -> Iterator[Refusal]:
    """Yield what the trainer refuses. seed, backend: `seed` and `pod.backend` of `run.yaml`."""
    model, loop, data = run.model, run.loop, run.data
    if not isinstance(loop, LmLoop | GrpoLoop | PuzzleLoop):
        return  # a loop of the user's own decides for itself
    if (best := run.checkpoint.best) is not None:
        if why := unknown_metric(best.metric, EVALUATED[type(loop)]):
            yield Refusal("checkpoint.best.metric", why)
        elif best.mode != (mode := best.mode_of(best.metric)):
            yield Refusal("checkpoint.best.mode", f"{best.mode} keeps the worst {best.metric}; use {mode}")
    if model is not None and getattr(model, "experts", None) is None:
        sampling = loop.sampler.mesh if isinstance(loop, GrpoLoop) else None
        for key, mesh in (("mesh", run.mesh), ("loop.sampler.mesh", sampling)):
            if mesh is not None and mesh.expert != 1:
                yield Refusal(f"{key}.expert", "the axis is for experts, and the model has none; use 1")
    if isinstance(model, Model):
        yield from _lengths(model, loop, data)
        yield from _kernel(model, data, backend)
        if model.router_aux_loss_coef and not isinstance(loop, LmLoop):
            yield Refusal("model.router_aux_loss_coef", f"loop.kind={loop.kind} does not add this loss, only lm; use 0")
        offline = isinstance(loop, GrpoLoop) and loop.loss_type in OFFLINE_LOSSES
        if isinstance(loop, GrpoLoop) and loop.replay_routes and (offline or model.experts is None):
            why = f"{loop.loss_type} samples nothing" if offline else "the model has no experts"
            yield Refusal("loop.replay_routes", f"{why}; use false")
    if model is not None and getattr(model, "implementation", None) is None:
        lora = unmatched_modules(model) if isinstance(model, Model) else ()
        groups = run.optimizer.param_groups if run.optimizer else ()
        yield from (Refusal(*found) for found in (*lora, *wrong_groups(groups, weight_names(model))))
    if data is not None and (why := characters_problem(data)):
        yield Refusal("data.tokenizer", why)
    if isinstance(loop, GrpoLoop) and isinstance(data, ArithmeticData):
        yield from _made_questions(loop, data, seed)


def unknown_metric(metric: str, known: tuple[str, ...]) -> str:
    """Return why no checkpoint is the best by a metric; empty if one can be."""
    return "" if metric in known else f"{metric} is not evaluated; choices: {', '.join(known)}"


def characters_problem(data: Data | QuestionData) -> str:
    """Return why data cannot be read by the characters that they have; empty if they can, or are not to be."""
    if getattr(data, "tokenizer", "") != "characters" or isinstance(data, TextData):
        return ""
    kind = "questions" if isinstance(data, QuestionData) else data.kind
    return f"characters requires a text, not {kind}; use bytes"


def _lengths(model: Model, loop: LmLoop | GrpoLoop | PuzzleLoop, data: Data | None) -> Iterator[Refusal]:
    most = f"exceeds model.max_seq_len, {model.max_seq_len}"
    if isinstance(loop, LmLoop):
        if loop.seq_len > model.max_seq_len:
            yield Refusal("loop.seq_len", f"{loop.seq_len} {most}")
        if loop.text_samples.interval is not None and data is not None:
            yield from _texts(loop.text_samples, data, model)
    elif isinstance(loop, GrpoLoop):
        longest, room = loop.max_prompt_length + loop.max_new_tokens, model.max_sampled_len
        if longest > model.max_seq_len:
            why = f"with loop.max_prompt_length, their sum, {longest}, {most}; lower one of them"
            yield Refusal("loop.max_new_tokens", why)
        elif longest > room:
            why = f"rows of {longest} tokens, and longrope of this model leaves {room}; lower it or the prompts"
            yield Refusal("loop.max_new_tokens", why)


def _texts(texts: TextSamples, data: Data, model: Model) -> Iterator[Refusal]:
    """The tokens of a prompt are known if each is a byte; else it has one at least."""
    in_bytes = getattr(data, "tokenizer", "") == "bytes"
    longest = max(len(prompt.encode()) for prompt in texts.prompts) if in_bytes else 1
    if longest + texts.max_new_tokens > model.max_seq_len:
        why = f"a prompt of {longest} tokens plus {texts.max_new_tokens} exceeds model.max_seq_len, {model.max_seq_len}"
        yield Refusal("loop.text_samples.max_new_tokens", why)
    if "" in texts.prompts and getattr(data, "bos", None) is None:
        yield Refusal("loop.text_samples.prompts", "a prompt is empty; each needs at least one token")


def _kernel(model: Model, data: Data | None, backend: str) -> Iterator[Refusal]:
    """With documents in a row, cudnn gives way to the reference. A family of the user's own may use none of ours."""
    if model.implementation is not None:
        return
    wanted = BACKENDS.get(model.attention, backend)
    if wanted != backend and not (wanted == "gpu" and getattr(data, "packing", None) == "documents"):
        yield Refusal("model.attention", f"{model.attention} is a kernel of {wanted}, and this is {backend}; use auto")


def _made_questions(loop: GrpoLoop, data: ArithmeticData, seed: int) -> Iterator[Refusal]:
    if loop.loss_type == "dpo":
        yield Refusal("loop.loss_type", NO_PAIRS)
    tested = loop.test_prompts if loop.test_samples_per_prompt is not None else None
    most = data.num_held_out(seed)
    for key, count in (("loop.eval_prompts", loop.eval_prompts), ("loop.test_prompts", tested)):
        if (count or 0) > most:
            yield Refusal(key, f"only {most} held-out prompts exist, not {count}")
