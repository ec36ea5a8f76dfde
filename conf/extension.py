"""What people plug in without touching the package: functions and classes of their own modules.

A config names one as `module:name`. The module lies in a folder of `code.modules`, by default `./slipway`, and is
shipped beside the trainer. Each kind is a Protocol here; its positional parameters and those of the plugged-in
function are compared before anything is billed, and again on the workers. docs/extend.md has an example of each.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from conf.environment import EnvironmentClass

Array = Any
"""A `jax.Array`: this module is read by the controller too, which has no JAX."""
MODULES_FOLDER = "modules"
"""Folder of the shipped code with the user's modules; it is on the trainer's module search path."""


class ExtensionError(ValueError):
    """A plugged-in function or class cannot be used. The message begins with the config key."""


class Answered(NamedTuple):
    """One answer of the policy to a question, as evaluations see it."""

    prompt: str
    response: str
    answer: str
    correct: bool


class Reward(Protocol):
    """Score a response: `loop.rewards`. It must be deterministic; it runs in a process of its own under a time limit.

    response: what the policy wrote, without special tokens; answer: the correct answer. The reward is a finite number.
    Further parameters are passed by name, as TRL does with columns: `prompt`, the text that the policy read; `row`, all
    columns of the question's row; or the name of a column. `**columns` takes all of these.
    """

    def __call__(self, response: str, answer: str, /) -> float: ...


class Questions(Protocol):
    """Return the questions of the GRPO loop: `data.source` of `data=questions`, with `data.options`.

    path: `data.path`, then `data.eval_path`. Each row has the texts `question` and `answer`, and may have `solution`,
    a worked response for the warm start; without it, that is `#### ANSWER`. Rewards see all of its columns. Every
    process must get the same rows.
    """

    def __call__(self, path: str, /, **options: Any) -> Iterable[Mapping[str, Any]]: ...


class Documents(Protocol):
    """Return the texts of the language-model loop: `data.source` of `data=documents`, with `data.options`.

    path: `data.path`, or `data.eval_path`. The sequence needs `len` and indexing only, and the same index must give
    the same text at any time, so that shuffling and resuming are exact.
    """

    def __call__(self, path: str, /, **options: Any) -> Sequence[str]: ...


class Prompt(Protocol):
    """Return the text of a question in a prompt: `data.prompt.formatter`, in place of `data.prompt.question`.

    A chat template still puts it into the user's turn, and `data.prompt.shots` pass through it too.
    """

    def __call__(self, question: str, /) -> str: ...


class EvaluatedModel(Protocol):
    """The model that is being trained, as an evaluation of a language model sees it.

    The function runs on worker 0 alone; all workers compute what it asks for.
    """

    step: int
    """Updates done."""
    max_seq_len: int
    """Tokens that the model can read. Of a longer text it reads the end."""
    bos: tuple[int, ...]
    """Token before each text; empty if the tokenizer has none, as that of Qwen or GPT-2."""
    eos: int | None
    prefix: int
    """Token before an empty text, so that its first token can be scored: `bos`, else `eos`, else a newline."""

    def encode(self, texts: Sequence[str], /) -> list[list[int]]:
        """Return the tokens of each text, without special tokens."""
        ...

    def decode(self, tokens: Sequence[int], /) -> str: ...

    def score(self, rows: Sequence[Sequence[int]], /) -> list[tuple[Array, Array]]:
        """Return for tokens 1 to n - 1 of each row their log-probabilities in nats, and whether each is the likeliest.

        Where the model could not read the beginning, they are NaN and False.
        """
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        /,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
    ) -> list[str]:
        """Return the continuation of each prompt, up to the end-of-text token or the first of the texts `stop`."""
        ...


class EvaluatedSolver(Protocol):
    """The model of the puzzle loop, as an evaluation sees it."""

    step: int
    dataset: Any
    """A `PuzzleDataset`, with `test_batches`."""

    def solve(self, puzzles: Array, /) -> Array:
        """Return the answers to puzzles, int32 [N, cells], after all supervision steps."""
        ...


class Evaluation(Protocol):
    """Return metrics of the run so far: `loop.evaluations`, with its options. It runs on worker 0.

    If the first parameter is called `model`, it gets an EvaluatedModel, or an EvaluatedSolver in the puzzle loop.
    Otherwise it gets the answers to the held-out questions, which only the GRPO loop has. Each metric is logged as
    `eval_<name in loop.evaluations>_<name here>`. A list of numbers, one for each example, becomes their mean with its
    standard error and interval. An exception, NaN or too long a time is an alert, and the run goes on.
    """

    def __call__(self, answers_or_model: Any, /, **options: Any) -> "Mapping[str, float | Sequence[float]]": ...


class PolicyLoss(Protocol):
    """Return the loss of each token, float32 [B, T]: `loop.loss_type` of GRPO, with `loop.loss_options`.

    logprobs: log-probabilities of the response's tokens under the policy, in nats, float32 [B, T]; old_logprobs: under
    the policy that drew them; advantages: float32 [B, 1]; mask: 1 for tokens that count, [B, T]. The trainer takes the
    mean over the tokens that count, on all devices, and adds KL and entropy terms by their coefficients.
    """

    def __call__(
        self, logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, /, **options: Any
    ) -> Array: ...


class PolicyLossClass(Protocol):
    """A class derived from `trainer.losses.policy.PolicyLoss`: `loop.loss_type` of GRPO, with `loop.loss_options`.

    It is made from the section `loop` and may replace the advantages, the ratio, the objective and the mean.
    """

    def __call__(self, loop: Any, /, **options: Any) -> Any: ...


class TokenLoss(Protocol):
    """Return the loss of each token, float32 [B, T]: `loop.loss` of the language-model loop, with `loop.loss_options`.

    logprobs: log-probabilities of the targets, in nats, float32 [B, T]; entropy: of each distribution, in nats, [B, T].
    The trainer takes the mean over the tokens that count. Evaluations keep reporting the cross-entropy.
    """

    def __call__(self, logprobs: Array, entropy: Array, /, **options: Any) -> Array: ...


class OptimizerRule(Protocol):
    """Return an optax transformation from gradients to directions: `optimizer.rule` of `optimizer=custom`.

    It gets `optimizer.options`. The trainer clips gradients before it, and multiplies directions by minus the learning
    rate and adds weight decay after it. Its state may hold trees like the weights, which are sharded like them.
    """

    def __call__(self, **options: Any) -> Any: ...


class Loop(Protocol):
    """Train: `loop.run` of `loop=custom`, with `loop.options`, on every process.

    experiment: the whole run.yaml, a `RunFile`; mesh: a `jax.sharding.Mesh` of all devices; log: a `MetricsLogger` with
    `log(step, phase, **metrics)` and `summarize(**results)`. It must resume from its own checkpoints in
    `experiment.dir`.
    """

    def __call__(self, experiment: Any, mesh: Any, log: Any, /, **options: Any) -> None: ...


class ModelFamily(Protocol):
    """A decoder for the language-model loop: `model.implementation`, a class without arguments or a module's object."""

    def weights(self, cfg: Any, /) -> Mapping[str, Any]:
        """Return a tree of (shape, axes, initializer) for every weight.

        axes: the logical axis of each dimension, e.g. ("embed", "hidden"), as in `trainer/distributed/mesh.py`; None is
        never split. initializer: as in `jax.nn.initializers`. It must have `embedding` [vocab, dim], and `unembedding`
        of the same shape unless `model.tie_word_embeddings`.
        """
        ...

    def forward(self, params: Mapping[str, Any], cfg: Any, tokens: Array, positions: Array, segments: Any, /) -> Array:
        """Return the last hidden states, [B, T, dim], for tokens and positions [B, T]; see `decoder.forward`."""
        ...


class CheckFunction(Protocol):
    """Yield what is wrong with a config, as (key, message) pairs: `code.checks`. Each is an error of `slipway plan`."""

    def __call__(self, config: Any, /) -> Iterable[tuple[str, str]]: ...


class Notifier(Protocol):
    """Tell someone about an event of a run: `notify.notifier`, called by the machine that drives the run.

    event: `text`, `event` (end, failure or preemption), `run`, `pod`, `verdict` and `results`, as JSON data. An
    exception from it is a warning.
    """

    def __call__(self, event: Mapping[str, Any], /) -> None: ...


class Tracker(Protocol):
    """Show the metrics of a run: `logging.trackers`, a class or function; worker 0 makes one at each attempt.

    It runs in a process of its own beside the program. run: id of the run, the same after each preemption; config: the
    settings of the run; folder: a folder for files, which survives preemptions and is copied to the run's folder. An
    exception is told once in the log and counted in the results; the run goes on.
    """

    def __call__(self, run: str, config: Mapping[str, Any], folder: str, /) -> "TrackedRun": ...


class TrackedRun(Protocol):
    """What a tracker returns."""

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Take all metrics of a step. Each step comes once, in rising order, whatever interrupts the run."""
        ...

    def finish(self, results: Mapping[str, Any] | None, /) -> None:
        """End. results: what summary.json holds; None where an attempt has ended and the run has not."""
        ...


class ResourceKind(Protocol):
    """A step of the plan: `code.resources`, a class whose argument is the config. Its objects have what OwnStep has."""

    def __call__(self, config: Any, /) -> "OwnStep": ...


class OwnStep(Protocol):
    """Something on Google Cloud that must exist before the pod is created. `down --all` deletes it.

    google: `google.call(API, METHOD, **parameters)` sends one request of an API that Google describes, such as
    `call("pubsub:v1", "projects.topics.get", topic=...)`, and raises a GoogleError, which need not be caught. project:
    the id of the project.
    """

    name: str
    """Name of the step, unique among those of the same config."""
    wanted: Mapping[str, Any]
    """What `read` must return for nothing to be done."""
    apis: Sequence[str]
    """Google APIs to enable, such as pubsub.googleapis.com; may be left out."""

    def read(self, google: Any, project: str, /) -> Mapping[str, Any]:
        """Return the values of `wanted` as they are, and `managed`: whether Slipway created it. 404 means absent."""
        ...

    def create(self, google: Any, project: str, /) -> None:
        """Create it, with a mark that `read` recognizes."""
        ...

    def delete(self, google: Any, project: str, /) -> None:
        """Delete it. Called only if it is managed."""
        ...


OWN_STEP_METHODS = ("read", "create", "delete")
PROTOCOLS: Mapping[str, type] = {
    "reward": Reward,
    "environment": EnvironmentClass,
    "questions": Questions,
    "documents": Documents,
    "prompt": Prompt,
    "evaluation": Evaluation,
    "policy loss": PolicyLoss,
    "policy loss class": PolicyLossClass,
    "token loss": TokenLoss,
    "optimizer rule": OptimizerRule,
    "loop": Loop,
    "model family": ModelFamily,
    "check": CheckFunction,
    "notifier": Notifier,
    "tracker": Tracker,
    "resource kind": ResourceKind,
}
"""Every kind, by its name in messages."""


def positional(kind: str) -> tuple[str, ...]:
    """Return the positional parameters with which a function of this kind, or a class, is called."""
    call = vars(PROTOCOLS[kind]).get("__call__")  # a model family has none: it may be an object
    parameters = [*inspect.signature(call).parameters.values()][1:] if call is not None else []
    return tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)


class ByName(NamedTuple):
    """What a reward wants besides response and answer. required: parameters without a default."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_all: bool


def wanted_by_name(signature: inspect.Signature) -> ByName:
    """Return the parameters of a reward that are passed by name."""
    parameters = [*signature.parameters.values()]
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = {p.name for p in by_place[: len(positional("reward"))]}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in taken]
    required = tuple(p.name for p in named if p.default is p.empty)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return ByName(tuple(p.name for p in named), required, takes_all)


def call_problem(signature: inspect.Signature, kind: str, options: Iterable[str], reference: str = "") -> str:
    """Return why a function of this signature cannot be called as its kind with these options; empty if it can.

    reference: its `module:name`. What takes a learning rate in optax steps against the gradient already.
    """
    arguments, options = positional(kind), [*options]
    if kind == "reward":
        options += [name for name in wanted_by_name(signature).required if name not in options]
    is_optax = reference.partition(":")[0].partition(".")[0] == "optax"
    if kind == "optimizer rule" and is_optax and "learning_rate" in signature.parameters:
        return (
            "takes a learning_rate, so it is a whole optimizer, with a sign of its own; a rule gives a direction, such "
            "as optax:scale_by_adam, and rate and decay are optimizer.lr and optimizer.weight_decay"
        )
    try:
        signature.bind(*arguments, **dict.fromkeys(options))
    except TypeError as error:
        called = ", ".join([*arguments, *(f"{name}=…" for name in options)])
        return f"takes {signature}, but is called as ({called}): {error}"
    return ""


def wants_model(function: Any) -> bool:
    """Return whether an evaluation, or its signature, wants the model in place of answers."""
    try:
        signature = function if isinstance(function, inspect.Signature) else inspect.signature(function)
    except (TypeError, ValueError):  # without a signature, as some of C
        return False
    return next(iter(signature.parameters), "") == "model"


def load(kind: str, reference: str, key: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Import what a config names and compare its signature with its kind.

    Args:
        kind: a name in PROTOCOLS.
        reference: `module:name`.
        key: config key, for messages.
        options: keyword arguments that it will be called with.

    Raises:
        ExtensionError: the module cannot be imported, lacks the name, or the signature does not fit.
    """
    module_name, _, name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ExtensionError(f"{key}: {kind} {reference}: cannot import {module_name}: {error!r}") from error
    found = getattr(module, name, None)
    if found is None:
        own = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ExtensionError(
            f"{key}: {kind} {reference}: the module has no {name}; it has {', '.join(own) or 'nothing'}"
        )
    if kind == "policy loss" and isinstance(found, type):
        kind = "policy loss class"
    if kind != "model family":
        try:
            problem = call_problem(inspect.signature(found), kind, options or {}, reference)
        except (TypeError, ValueError):  # not callable, or without a signature, as some of C
            problem = "" if callable(found) else "is not callable"
        if problem:
            raise ExtensionError(f"{key}: {kind} {reference} {problem}")
    return found
