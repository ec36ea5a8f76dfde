"""A sampler: a process on a worker of its own, which draws tasks of rollouts with the trainer's newest weights."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import AxisType, Mesh

from conf.formats import RESULT_FILE, RunFileError
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.run_yaml import RunFile
from trainer.data import questions
from trainer.data.prompting import Draw
from trainer.distributed import agreement
from trainer.distributed import mesh as meshes
from trainer.models.weights import Params
from trainer.rewards.pool import RewardPool, RewardResult, Submission
from trainer.rl.programs import stop_criteria
from trainer.rl.remote.identity import CHILD_VARIABLE, NO_TRAINER_EXIT_CODE, SamplerKey, own_name
from trainer.rl.remote.leases import Task
from trainer.rl.remote.server import ADDRESS_FILE
from trainer.rl.remote.wire import Arrays, Channel, WireError
from trainer.rl.rollouts import reward_names, score_sample
from trainer.sampler import Completion, Sampler, SamplerSettings
from trainer.sampler.copies import abstract_params

Scored = tuple[Completion, Future[RewardResult]]

CONNECT_SECONDS = 3600.0
"""How long a sampler looks for the trainer, which may read data, compile and warm up first."""
RETRY_SECONDS = 1.0
POD_RETRY_SECONDS = 3.0
"""The same on a pod of samplers, which may wait until the trainer's pod has been replaced."""
REPORT_SECONDS = 10.0
"""Longest silence of a sampler that waits for rewards or weights; after wire.SILENCE_SECONDS it loses its tasks."""
TAKE_SECONDS = 0.2
"""Interval at which a sampler that waits for rewards asks for another task."""
MAX_SCORED_TASKS = 2
"""Tasks of a sampler whose rewards are computed; with more of them it waits before it draws another one."""


class AbandonedError(Exception):
    """Another sampler has the task that is being drawn, or the run ends."""


@dataclass(eq=False)
class _Unsent:
    """Samples of one task that have been drawn and not sent, by their number in the rollout."""

    task: Task
    samples: dict[int, Scored] = field(default_factory=dict)


class Deliveries:
    """Sends samples of several tasks as they are scored: a sampler draws one while rewards of others are computed."""

    def __init__(self, channel: Channel, checks: RewardPool, loop: GrpoLoop) -> None:
        self._channel, self._checks, self._loop = channel, checks, loop
        self._names = reward_names(loop)
        self._drawn: _Unsent | None = None
        self._scored: list[_Unsent] = []

    @property
    def tasks(self) -> list[Task]:
        """The tasks that have been drawn, some of whose samples have not been sent."""
        return [unsent.task for unsent in self._scored]

    def begin(self, task: Task) -> None:
        """Say that samples of a task come next. `end` must follow."""
        self._drawn = _Unsent(task)

    def add(self, number: int, drawn: Completion, submission: Submission) -> None:
        """Score a sample of the task that is being drawn, whose rollout has it under this number."""
        assert self._drawn is not None, "begun"
        self._drawn.samples[number] = drawn, self._checks.submit(self._names, submission)

    def end(self, *, whole: bool) -> None:
        """Say that no more samples of the task come; whole: all have. Else those that are not sent are dropped."""
        unsent, self._drawn = self._drawn, None
        if unsent is not None and whole and unsent.samples:
            self._scored.append(unsent)
        elif unsent is not None:
            _cancel(unsent)

    def send(self) -> None:
        """Send what is scored, which also says that this sampler is alive.

        Raises:
            AbandonedError: samples of the task that is being drawn are not wanted any more.
        """
        for unsent in list(self._scored):
            if not self._send_of(unsent):
                _cancel(unsent)
            if not unsent.samples:
                self._scored.remove(unsent)
        if self._drawn is not None and not self._send_of(self._drawn):
            raise AbandonedError

    def wait(self, seconds: float) -> None:
        """Wait until the oldest task that has been drawn is scored, for at most that long, and send what is scored."""
        wait([check for _, check in self._scored[0].samples.values()], seconds)
        self.send()

    def cancel(self) -> None:
        """Drop everything that is not sent: rewards of samples that nobody wants should not hold up others."""
        for unsent in self._scored:
            _cancel(unsent)
        self._scored.clear()
        self.end(whole=False)

    def _send_of(self, unsent: _Unsent) -> bool:
        """Send what is scored of a task; return whether the trainer wants the rest of it."""
        task, done = unsent.task, [row for row, (_, check) in unsent.samples.items() if check.done()]
        finished = [unsent.samples[row][0].finished for row in done]
        arrays: Arrays = {}
        for row in done:
            drawn, check = unsent.samples.pop(row)
            scores = np.array(score_sample(check.result(), self._loop), np.float64)
            parts = {"tokens": drawn.tokens, "logprobs": drawn.logprobs, "versions": drawn.versions}
            parts |= {"scores": scores} | ({} if drawn.routes is None else {"routes": drawn.routes})
            arrays |= {f"{row}/{name}": values for name, values in parts.items()}
        message: dict[str, Any] = {"kind": "samples", "rollout": task.rollout, "first": task.first}
        reply, _ = self._channel.ask(message | {"rows": done, "finished": finished}, arrays)
        return reply["go_on"]


def _cancel(unsent: _Unsent) -> None:
    for _, check in unsent.samples.values():
        check.cancel()
    unsent.samples.clear()


def run(experiment: RunFile) -> int:
    """Draw what the trainer asks for, on this worker's devices; return the exit code that the trainer sends."""
    loop = experiment.loop
    assert isinstance(loop, GrpoLoop)
    devices = (jax.device_count(), *(1,) * len(meshes.MESH_AXES[1:]))
    mesh = jax.make_mesh(devices, meshes.MESH_AXES, axis_types=(AxisType.Auto,) * len(devices))
    with jax.set_mesh(mesh), RewardPool(loop.reward_workers, loop.reward_timeout_seconds) as checks:
        return _SamplerProcess(experiment, loop, mesh, checks).run()


class _SamplerProcess:
    """A sampler's state, above all its newest weights."""

    def __init__(self, experiment: RunFile, loop: GrpoLoop, mesh: Mesh, checks: RewardPool) -> None:
        self._experiment, self._loop, self._checks, self._key = experiment, loop, checks, SamplerKey.own()
        self._questions = questions.load_questions(experiment, loop)
        prompting, rows = self._questions.prompt_encoder, loop.prompts_per_task * loop.group_size
        sampling = loop.sampler.model_copy(update={"mesh": None})  # that of the config is for the trainer's devices
        lengths = loop.max_prompt_length, loop.max_new_tokens
        settings = SamplerSettings.from_config(sampling, *lengths, rows, returns_routes=loop.replay_routes)
        self._sampler = Sampler(experiment.decoder, settings, mesh, stop_criteria(loop, prompting))
        self._abstract = abstract_params(self._sampler.programs.cfg, self._sampler.programs.mesh)
        self._random_key = jax.random.key(experiment.seed)
        self._parent = int(os.environ[CHILD_VARIABLE])
        self._feed: _WeightFeed | None = None
        self._copy: tuple[int, Params] = (-1, {})

    def run(self) -> int:
        """Work for the trainer; while it does not answer, look for it again. Returns this sampler's exit code.

        That is the one that the trainer sends; on a pod of samplers an attempt of the trainer that ends is not the
        end: there it is 0 once the run has finished, and NO_TRAINER_EXIT_CODE if no other attempt listens for long.
        """
        lost, outlives = time.monotonic(), self._key.outlives_attempts
        pause = POD_RETRY_SECONDS if outlives else RETRY_SECONDS
        while time.monotonic() - lost < CONNECT_SECONDS and os.getppid() == self._parent:
            try:
                if outlives and (epath.Path(self._experiment.dir) / RESULT_FILE).exists():
                    return 0
                address = json.loads((epath.Path(self._experiment.dir) / ADDRESS_FILE).read_text())
                token = self._key.token_for(address)
                if "exit_code" in address:
                    return address["exit_code"]
                channel, weights = self._connect(address, token), self._connect(address, token)
            except (OSError, ValueError, KeyError, TypeError):  # not written yet, damaged, or nobody listens there
                time.sleep(pause)
                continue
            try:
                code = self._work(channel, weights)
                if not outlives:
                    return code
                time.sleep(pause)
            except (OSError, EOFError) as error:
                print(f"the connection to the trainer has ended: {error}", file=sys.stderr, flush=True)
            finally:
                channel.close()
                weights.close()
            lost = time.monotonic()
        return NO_TRAINER_EXIT_CODE if outlives else 1

    def _connect(self, address: dict[str, Any], token: str) -> Channel:
        """Raises OSError, or RunFileError if the trainer has another config, code or data."""
        channel, name = Channel.connect(address["host"], address["port"], token), own_name()
        reply, _ = channel.ask({"name": name, "facts": agreement.sampling_facts(self._experiment)})
        if different := reply["different"]:
            raise RunFileError(f"the sampler on {name} and the trainer differ in {', '.join(different)}")
        return channel

    def _work(self, channel: Channel, weights: Channel) -> int:
        self._copy = (-1, {})  # a trainer that has resumed may have older ones
        self._feed = _WeightFeed(weights)
        deliveries = Deliveries(channel, self._checks, self._loop)
        try:
            while True:
                self._check_parent()
                scored = deliveries.tasks
                if len(scored) == MAX_SCORED_TASKS:
                    deliveries.wait(REPORT_SECONDS)
                    continue
                held = [[task.rollout, task.first] for task in scored]
                reply, _ = channel.ask({"kind": "take", "held": held})
                if reply["exit_code"] is not None:
                    return reply["exit_code"]
                if reply["task"]:
                    with suppress(AbandonedError):
                        self._draw(deliveries, Task(**reply["task"]))
                elif scored:
                    deliveries.wait(TAKE_SECONDS)
        finally:
            deliveries.cancel()

    def _weights(self, at_least: int = 0, meanwhile: Callable[[], None] = lambda: None) -> tuple[Params, int]:
        """Return the newest weights on the devices, and their version. Raises WireError if no more arrive.

        meanwhile: called now and then while there are none of at least that version.
        """
        assert self._feed is not None, "connected"
        while (newest := self._feed.newest(at_least, REPORT_SECONDS)) is None:
            self._check_parent()
            meanwhile()
        version, arrays = newest
        if version != self._copy[0]:
            self._copy = -1, {}  # frees the old ones first
            leaves, structure = jax.tree.flatten(self._abstract)
            placed = [
                jax.device_put(arrays.pop(str(i)).view(like.dtype).reshape(like.shape), like.sharding)
                for i, like in enumerate(leaves)
            ]
            self._copy = version, jax.tree.unflatten(structure, placed)
        return self._copy[1], version

    def _draw(self, deliveries: Deliveries, task: Task) -> None:
        """Draw a task's samples. Raises AbandonedError."""
        loop, prompts = self._loop, self._loop.prompts_per_step * self._loop.updates_per_rollout
        asked = self._questions.train(Draw("rollout", task.rollout), prompts)[task.first : task.first + task.count]
        key = jax.random.fold_in(jax.random.fold_in(self._random_key, 0), task.rollout)
        copy, _ = self._weights(task.version, deliveries.send)
        first = task.first * loop.group_size

        def between() -> None:
            self._check_parent()
            deliveries.send()

        numbers = range(first, first + len(asked) * loop.group_size)
        drawing = self._sampler.generate(
            copy, [q.prompt_tokens for q in asked], loop.group_size, key, loop.temperature, between,
            numbers=numbers, weights=self._weights,
        )  # fmt: skip
        deliveries.begin(task)
        whole = False
        try:
            for drawn in drawing:
                question = asked[drawn.row // loop.group_size]
                text = self._questions.prompt_encoder.decode(drawn.tokens.tolist())
                submission = Submission(text, question.answer, question.prompt, question.row)
                deliveries.add(first + drawn.row, drawn, submission)
            whole = True
        finally:
            deliveries.end(whole=whole)

    def _check_parent(self) -> None:
        """Raise WireError if the supervisor has ended, which would start no other sampler."""
        if os.getppid() != self._parent:
            raise WireError("the parent of this process has ended")


class _WeightFeed:
    """The newest weights of one connection, which a thread receives."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._arrived = channel, threading.Condition()
        self._newest: tuple[int, Arrays] = (-1, {})
        self._error: Exception | None = None
        threading.Thread(target=self._receive, daemon=True, name="weights").start()

    def newest(self, at_least: int, seconds: float) -> tuple[int, Arrays] | None:
        """Return the newest version and its arrays; None if it is below `at_least` after that long.

        The caller may take the arrays out of the dictionary, which frees their memory.

        Raises:
            WireError: no more weights arrive.
        """
        with self._arrived:
            self._arrived.wait_for(lambda: self._error or self._newest[0] >= at_least, seconds)
            if self._error is not None:
                raise WireError(f"no more weights arrive: {self._error}") from self._error
            return self._newest if self._newest[0] >= at_least else None

    def _receive(self) -> None:
        version = -1
        try:
            while True:
                message, arrays = self._channel.ask({"kind": "weights", "version": version})
                version = message["version"]
                if arrays:
                    with self._arrived:
                        self._newest = version, arrays
                        self._arrived.notify_all()
        except Exception as error:  # of any kind: `newest` raises it in the sampler's own thread
            with self._arrived:
                self._error = error
                self._arrived.notify_all()
