"""Compiled programs of the GRPO loop, and the rows they take: updates, scoring of rollouts, the sampler."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax import lax
from jax.sharding import Mesh

from conf.formats import RunFileError
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.loop_parts import stop_problem
from conf.schema.training.model import Model
from conf.schema.training.optimizer import Optimizer
from conf.schema.training.run_yaml import RunFile
from trainer.data.prompting import PromptEncoder, Question
from trainer.distributed import mesh as meshes
from trainer.distributed.mesh import Batch, DeviceBatch, check_accumulation
from trainer.environments.episodes import Episode
from trainer.losses import grpo
from trainer.models import routes, weights
from trainer.models.routes import Replay
from trainer.models.shared_prompt import prompt_group
from trainer.pretrained import store
from trainer.sampler import Sampler, SamplerSettings, StopCriteria
from trainer.sampler.programs import SamplerPrograms as Sampling
from trainer.step import train_step
from trainer.step.program import Program, abstract_rows

PAD_ID = 0
"""Pads the end of a row, where no token attends."""
ROUTES = "routes"
"""Batch field with `loop.replay_routes`: the experts of each token, [B, T, layers * per_token]."""


def build_sampler(cfg: Model, loop: GrpoLoop, mesh: Mesh, prompting: PromptEncoder) -> Sampler:
    """Return the sampler for rollouts and evaluations, which share its programs. Raises RunFileError."""
    if problem := stop_problem(loop.sampler.stop, prompting.tokenizer.special_tokens):
        raise RunFileError(f"loop.sampler.stop: {problem}")
    for key, problem in loop.sampler.unknown_ids(cfg.vocab_size):
        raise RunFileError(f"{key}: {problem}")
    return Sampler(cfg, sampler_settings(loop), mesh, stop_criteria(loop, prompting))


def stop_criteria(loop: GrpoLoop, prompting: PromptEncoder) -> StopCriteria:
    """Return what ends a response of the loop."""
    ids = [*prompting.stop_tokens, *loop.sampler.stop_token_ids]
    return StopCriteria.of(ids, loop.sampler.stop, prompting.tokenizer)


def sampler_settings(loop: GrpoLoop) -> SamplerSettings:
    """Return the sampler's settings. With an environment, what was said before a turn is part of its prompt."""
    turns = loop.environment
    prompt, new = loop.max_prompt_length, loop.max_new_tokens
    if turns.name is not None:
        prompt, new = loop.row_widths[-1], turns.max_turn_tokens or new
    rows = loop.rows * loop.updates_per_rollout
    return SamplerSettings.from_config(loop.sampler, prompt, new, rows, returns_routes=loop.replay_routes)


def supervised_batch(questions: Sequence[Question], loop: GrpoLoop, episodes: Sequence[Episode] | None = None) -> Batch:
    """Return a batch for `grpo.supervised_loss`. The worked responses fit: those that do not are left out before.

    episodes: with the worked responses, where there is an environment.
    """
    worked = [e.tokens for e in episodes] if episodes else [question.solution_tokens for question in questions]
    tokens, mask = pad_sequences([question.prompt_tokens for question in questions], worked, loop.row_widths[-1])
    if episodes:
        mask[mask == 1] = np.concatenate([episode.by_model for episode in episodes])
    return {"tokens": tokens, "mask": mask}


def pad_sequences(prompts: list[list[int]], responses: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate prompt and response, padded on the right: int32 [B, width], and mask float32 [B, width - 1].

    The mask is 1 where the next token belongs to the response.
    """
    tokens = np.full((len(prompts), width), PAD_ID, np.int32)
    mask = np.zeros((len(prompts), width - 1), np.float32)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        end = len(prompt) + len(response)
        tokens[row, :end] = prompt + response
        mask[row, len(prompt) - 1 : end - 1] = 1
    return tokens, mask


LogprobsFn = Callable[[weights.Params, weights.Params, DeviceBatch], tuple[jax.Array, jax.Array]]
"""Maps (policy, reference, batch) to the response log-probabilities under each, [B, T - 1]; 0 elsewhere."""


class GrpoPrograms:
    """The compiled programs of a run, one set per batch width in `loop.widths`."""

    def __init__(self, loop: GrpoLoop, compiled: dict[str, Any]) -> None:
        """Take the compiled programs by their names in `all_programs`."""
        self._loop, self._compiled = loop, compiled

    def update(self, state: train_step.State, batch: DeviceBatch) -> tuple[train_step.State, dict[str, jax.Array]]:
        """Run the GRPO update, see `train_step.build_update`."""
        return self._program("update", batch)(state, batch)

    def score(self, params: weights.Params, reference: weights.Params, batch: DeviceBatch) -> Any:
        """Score a batch, see `build_logprobs`."""
        given = {name: batch[name] for name in ("tokens", "mask", ROUTES) if name in batch}
        return self._program("logprob", batch)(params, reference, given)

    def warm_start(self, state: train_step.State, batch: DeviceBatch) -> tuple[train_step.State, dict[str, jax.Array]]:
        return self._compiled["warm_start"](state, batch)

    def _program(self, name: str, batch: DeviceBatch) -> Any:
        return self._compiled[_program_name(name, self._loop, batch["tokens"].shape[1])]


def programs(experiment: RunFile, mesh: Mesh) -> Iterator[Program]:
    """Yield the programs that decide whether a run fits: those of the longest samples."""
    loop = experiment.loop
    assert isinstance(loop, GrpoLoop)
    state, reference = _resident_arrays(experiment, mesh)
    yield from _training_programs(experiment, loop, mesh, loop.row_widths[-1:])
    sampler = Sampling(experiment.decoder, sampler_settings(loop), mesh, ends=(0,))
    yield from _sampling_programs(experiment, loop, mesh, sampler, longest_only=True)
    yield Program("resident", None, resident=(state, reference))


def all_programs(experiment: RunFile, loop: GrpoLoop, mesh: Mesh, sampler: Sampling) -> Iterator[Program]:
    """Yield everything a run compiles before its first step. sampler: provides the functions that the run calls."""
    yield from _sampling_programs(experiment, loop, mesh, sampler)
    yield from _training_programs(experiment, loop, mesh, loop.row_widths)


def _training_programs(experiment: RunFile, loop: GrpoLoop, mesh: Mesh, widths: list[int]) -> Iterator[Program]:
    cfg, opt = experiment.decoder, experiment.optimizer
    state, reference = _resident_arrays(experiment, mesh)
    train = build_update(grpo.loss(cfg, loop, grouped=loop.keeps_groups_together), experiment, opt, mesh)
    score = build_logprobs(experiment, loop, mesh)
    for width in reversed(widths):
        drawn = _abstract_rollout(loop, mesh, width)
        if loop.replay_routes:
            shape = loop.rows, width, routes.per_row(cfg)
            drawn |= {ROUTES: abstract_rows(mesh, shape, routes.dtype(cfg).name)}
        batch = drawn | dict.fromkeys(grpo.TOKEN_FIELDS, drawn["mask"])
        batch |= {name: abstract_rows(mesh, (loop.rows,), "float32") for name in grpo.ROW_FIELDS}
        yield Program(_program_name("update", loop, width), train, (state, batch), resident=reference)
        yield Program(
            _program_name("logprob", loop, width), score, (state.params, reference, drawn), resident=state.optimizer
        )
    if loop.warm_start_steps:
        supervised = build_update(grpo.supervised_loss(cfg), experiment, opt.with_constant_lr(loop.warm_start_lr), mesh)
        yield Program("warm_start", supervised, (state, _abstract_rollout(loop, mesh, loop.row_widths[-1])))


def _sampling_programs(
    experiment: RunFile, loop: GrpoLoop, mesh: Mesh, sampler: Sampling, *, longest_only: bool = False
) -> Iterator[Program]:
    """Yield the programs that draw responses, with all resident arrays; evaluations use the same programs.

    longest_only: as in `SamplerPrograms.list_programs`.
    """
    state, reference = _resident_arrays(experiment, mesh)
    for name, function, there in sampler.reshard_programs():
        yield Program(name, function, (state.params,), resident=(state.optimizer, reference, there))
    listed = [*sampler.list_programs(loop.group_size, longest_only=longest_only)]
    if loop.environment.name is not None:  # from the second turn on, each episode is a prompt of its own
        later = sampler.list_programs(1, longest_only=longest_only)
        listed += [(f"{name}_turn", *rest) for name, *rest in later if name.startswith(("prefill", "admit"))]
    for name, function, arguments, others in listed:
        yield Program(name, function, arguments, resident=(state, reference, others), max_iterations=loop.sampler.chunk)


def _resident_arrays(experiment: RunFile, mesh: Mesh) -> tuple[train_step.State, weights.Params]:
    """Return the abstract state and reference, which stay on the devices."""
    state = train_step.abstract_state(experiment.decoder, experiment.optimizer, mesh)
    return state, abstract_reference(experiment, mesh)


def _abstract_rollout(loop: GrpoLoop, mesh: Mesh, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    mask = abstract_rows(mesh, (loop.rows, width - 1), "float32")
    return {"tokens": abstract_rows(mesh, (loop.rows, width), "int32"), "mask": mask}


def _program_name(name: str, loop: GrpoLoop, width: int) -> str:
    return name if width == loop.row_widths[-1] else f"{name}_{width}"


def build_update(loss: train_step.LossFn, experiment: RunFile, opt: Optimizer, mesh: Mesh) -> jax.stages.Wrapped:
    """Return `train_step.build_update` for whole batches [B, ...], split by `loop.micro_batch_size` rows per device."""
    assert isinstance(experiment.loop, GrpoLoop)
    parts = check_accumulation(experiment.loop, mesh)
    step = train_step.build_update(loss, experiment.decoder, opt, mesh, parts)
    if parts == 1:
        return step

    pair = 2 if experiment.loop.loss_type == "dpo" else 1
    unit = experiment.loop.group_size if experiment.loop.keeps_groups_together else pair  # rows that stay together

    def dealt(x: jax.Array) -> jax.Array:
        """Give every part rows of each device, so that no row moves."""
        x = x.reshape(x.shape[0] // parts // unit, parts, unit, *x.shape[1:]).swapaxes(0, 1)
        x = x.reshape(parts, -1, *x.shape[3:])
        return meshes.constrain(x, None, "batch", *(None,) * (x.ndim - 2))

    return jax.jit(lambda state, batch: step(state, jax.tree.map(dealt, batch)), donate_argnums=0)


def build_logprobs(experiment: RunFile, loop: GrpoLoop, mesh: Mesh) -> LogprobsFn:
    """Return the jitted program that scores a batch under the policy that drew it and under the reference.

    With `loop.on_policy` the former is 0, since the update computes it anyway; if no loss needs it, the latter is 0.
    """
    cfg = experiment.decoder

    def score(params: weights.Params, reference: weights.Params, batch: DeviceBatch) -> tuple[jax.Array, jax.Array]:
        group = prompt_group(cfg, loop, batch["tokens"].shape[1]) if loop.keeps_groups_together else None

        def under(policy: weights.Params) -> jax.Array:
            model = cfg if policy is params else reference_model(experiment)
            replay = Replay.of(batch) if policy is params else None  # the reference chooses its own experts
            if model is cfg:  # the reference has only what training changes
                policy = weights.overlay(params, policy)
            return grpo.per_token_logps(policy, model, batch, loop.token_temperature, group, replay)[0] * batch["mask"]

        nothing = jnp.zeros_like(batch["mask"])
        return nothing if loop.on_policy else under(params), under(reference) if loop.scores_reference else nothing

    def score_in_parts(params: weights.Params, reference: weights.Params, batch: DeviceBatch) -> Any:
        parts = check_accumulation(loop, mesh)
        split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
        found = lax.map(lambda part: score(params, reference, part), split)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)

    own = score
    if meshes.is_data_parallel(mesh):
        whole, rows = jax.sharding.PartitionSpec(), meshes.partition_spec("batch")
        own = jax.shard_map(score_in_parts, mesh=mesh, in_specs=(whole, whole, rows), out_specs=rows, check_vma=False)
    return jax.jit(own, out_shardings=meshes.named_sharding(mesh, "batch"))


def reference_model(experiment: RunFile) -> Model:
    """Return the model of the reference: the teacher's, or the policy's own."""
    assert isinstance(experiment.loop, GrpoLoop)
    return experiment.loop.teacher or experiment.decoder


def initial_reference(params: weights.Params, experiment: RunFile, mesh: Mesh) -> weights.Params:
    """Return the teacher's weights, or a copy of the policy, since updates donate its buffers; empty if unused.

    Raises StoreError if the teacher's weights cannot be read.
    """
    wanted, model = abstract_reference(experiment, mesh), reference_model(experiment)
    if not wanted:
        return wanted
    if model is not experiment.decoder:
        assert model.weights is not None, "the schema requires them"
        read = store.load_sharded(epath.Path(model.weights), model, mesh)
        return jax.tree.map(lambda x, like: x.astype(like.dtype), read, wanted)
    trained = weights.trained_part(params, model)
    return jax.tree.map(lambda x, like: jnp.array(x, like.dtype, copy=True), trained, wanted)


def abstract_reference(experiment: RunFile, mesh: Mesh) -> weights.Params:
    """Return the reference's shapes, dtypes and shardings; empty if the loss needs none.

    Of the policy it has the weights that training changes, since the others are there already.
    """
    assert isinstance(experiment.loop, GrpoLoop)
    if not experiment.loop.scores_reference:
        return {}
    model, kind = reference_model(experiment), experiment.loop.reference_dtype
    whole = meshes.with_shardings(weights.abstract_params(model), weights.param_shardings(model, mesh))
    whole = jax.tree.map(lambda x: x.update(dtype=kind or x.dtype), whole)
    return weights.trained_part(whole, model) if model is experiment.decoder else whole
