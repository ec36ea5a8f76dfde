"""The model that is being trained, as evaluations see it: it scores texts, continues prompts and solves puzzles.

Process 0 makes the calls and all processes carry them out, so that a plugged-in function can run on process 0 alone.
"""

import base64
import json
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from conf.formats import RunFileError
from conf.schema.training.loop_parts import PuzzleLoop, Trm
from conf.schema.training.model import Model
from trainer.distributed import mesh as meshes
from trainer.distributed import runtime
from trainer.distributed.preemption import PreemptedError
from trainer.losses import puzzle, token_logprobs
from trainer.models import decoder
from trainer.models.weights import Params
from trainer.puzzles.dataset import PuzzleDataset
from trainer.sampler import Sampler, SamplerSettings, StopCriteria
from trainer.tokenizer.loading import Tokenizer

HEARTBEAT_SECONDS = 60.0
"""Interval of the lines that tell the controller that the program does not hang."""


class EvaluationTimeoutError(BaseException):
    """The time of an evaluation is up. Functions that catch every Exception do not catch it."""


class Calls:
    """The functions of one evaluation that need all processes. Their arguments must be JSON.

    Process 0 uses `call` and then `finish`; the others use `follow`. Every call has the same arguments on every
    process, so all of them compute, or fail, in the same way.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._functions = functions
        self._busy = self._is_late = False
        self._preempted: PreemptedError | None = None

    def call(self, name: str, **arguments: Any) -> Any:
        """Call a function on all processes, and return its result here."""
        self.check()
        self._busy = True
        try:
            _broadcast({"call": name, "arguments": arguments})
            found = self._functions[name](**arguments)
        except PreemptedError as error:
            self._preempted = error
            raise
        finally:
            self._busy = False
        self.check()
        return found

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        """Tell the other processes the result of the evaluation."""
        _broadcast({"result": result})
        return result

    def follow(self) -> dict[str, Any]:
        """Carry out the calls of process 0 until the evaluation is over, and return its result."""
        while "result" not in (told := _broadcast({})):
            try:
                self._functions[told["call"]](**told["arguments"])
            except PreemptedError:
                raise
            except Exception:  # noqa: S112 - process 0 has the same one, and reports it
                continue
        return told["result"]

    def check(self) -> None:
        """Raise what ends the evaluation: a preemption, or the end of its time."""
        if self._preempted is not None:
            raise self._preempted
        if self._is_late:
            raise EvaluationTimeoutError

    @contextmanager
    def time_limit(self, name: str, seconds: float) -> Iterator[None]:
        """Interrupt what runs in this block after so many seconds, or after the call that is under way.

        Code in C that never looks for signals is not interrupted; the program then prints nothing, and counts as hung.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # signals reach the main thread only
            return
        began = time.monotonic()

        def tick(*_: object) -> None:
            spent = time.monotonic() - began
            self._is_late = spent >= seconds
            if not self._is_late:
                print(f"evaluation {name} has taken {spent:.0f} of at most {seconds:.0f} s", flush=True)
            elif not self._busy:
                raise EvaluationTimeoutError

        handler = signal.signal(signal.SIGALRM, tick)
        interval = seconds / max(1, round(seconds / HEARTBEAT_SECONDS))
        left = signal.setitimer(signal.ITIMER_REAL, interval, interval)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *left)
            signal.signal(signal.SIGALRM, handler)


def _broadcast(message: dict[str, Any]) -> dict[str, Any]:
    """Return process 0's message on every process."""
    if jax.process_count() == 1:
        return message
    text = base64.b64encode(zlib.compress(json.dumps(message).encode(), 1)).decode() if message else ""
    return json.loads(zlib.decompress(base64.b64decode(runtime.gather_texts(text)[0])))


TOKENS_PER_DEVICE = 2048
"""Tokens that a device scores at a time."""
MIN_WIDTH = 64
"""Rows are padded to this many tokens, or to a larger power of two, so that few programs are compiled."""
SLOTS_PER_DEVICE, CHUNK = 8, 16


class LoadedModel:
    """A model whose weights come and go with each evaluation.

    Attributes:
        step: updates of the weights.
        num_truncated: texts since `load` of which it has read only the end.
    """

    step = num_truncated = 0

    def __init__(self, **functions: Callable[..., Any]) -> None:
        """Create a model without weights. functions: what all processes compute together."""
        self._functions = functions

    def load(self, step: int, params: Params, between: Callable[[], None]) -> Calls:
        """Take the weights after `step` updates. between: called between batches."""
        self.step, self._params, self._between, self.num_truncated = step, params, between, 0
        self._calls = Calls(self._functions)
        return self._calls

    def unload(self) -> None:
        """Give up the weights, which the next update overwrites."""
        self._params = {}


class TextModel(LoadedModel):
    """A decoder and its tokenizer, see `conf.extension.EvaluatedModel`. `load` it before each use."""

    def __init__(self, cfg: Model, mesh: Mesh, tokenizer: Tokenizer, bos: Sequence[int], ends: Sequence[int]) -> None:
        """Create a model. ends: the tokens that end a response."""
        super().__init__(score=self._score_batch, generate=self._generate_batch)
        self._cfg, self._mesh, self._tokenizer, self._ends = cfg, mesh, tokenizer, tuple(ends)
        self.max_seq_len, self.eos = cfg.max_seq_len, ends[0] if ends else None
        self.bos = tuple(bos)
        self.prefix = (*self.bos, *self._ends, *self.encode(["\n"])[0])[0]
        self._shards = meshes.num_shards(mesh, "batch")
        self._score = jax.jit(self._scores, out_shardings=meshes.named_sharding(mesh))
        self._samplers: dict[tuple[Any, ...], Sampler] = {}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [ids.tolist() for ids in self._tokenizer.encode(list(texts))]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def score(self, rows: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        scored: list[Any] = [None] * len(rows)
        self.num_truncated += sum(len(row) > self.max_seq_len for row in rows)
        for width, numbers in self._batches([min(len(row), self.max_seq_len) for row in rows]):
            batch = [list(rows[i][-self.max_seq_len :]) for i in numbers]
            logprobs, greedy = self._calls.call("score", batch=batch, width=width)
            for place, i in enumerate(numbers):
                read, missing = len(batch[place]) - 1, len(rows[i]) - len(batch[place])
                if not np.isfinite(logprobs[place, :read]).all():  # else a NaN would be compared, and could be the best
                    raise ValueError(f"after update {self.step} the model's log-probabilities are not finite")
                scored[i] = (
                    np.concatenate([np.full(missing, np.nan, np.float32), logprobs[place, :read]]),
                    np.concatenate([np.zeros(missing, bool), greedy[place, :read]]),
                )
        return scored

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
    ) -> list[str]:
        room = self._cfg.max_sampled_len - max_new_tokens
        if room < 1:
            raise ValueError(
                f"max_new_tokens: {max_new_tokens} leaves no room in model.max_seq_len, {self._cfg.max_sampled_len}"
            )
        texts, count = [], SLOTS_PER_DEVICE * self._shards
        width = min(room, _power_of_two(max(map(len, prompts), default=1)))
        self.num_truncated += sum(len(prompt) > width for prompt in prompts)
        sizes = {"width": width, "max_new_tokens": max_new_tokens, "stop": list(stop), "temperature": temperature}
        for first in range(0, len(prompts), count):
            batch = [list(prompt[-width:]) or [self.prefix] for prompt in prompts[first : first + count]]
            for tokens in self._calls.call("generate", batch=batch, first=first, **sizes):
                text = self.decode(tokens)
                ends = [at for at in map(text.find, stop) if at >= 0]
                texts.append(text[: min(ends, default=len(text))])
        return texts

    def _batches(self, lengths: Sequence[int]) -> Iterable[tuple[int, list[int]]]:
        """Yield the width and the numbers of the rows of each batch, the longest first."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        while order:
            width = min(self.max_seq_len, _power_of_two(lengths[order[0]]))
            count = self._shards * max(1, TOKENS_PER_DEVICE // width)
            yield width, order[:count]
            order = order[count:]

    def _score_batch(self, batch: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.zeros((self._shards * max(1, TOKENS_PER_DEVICE // width), width), np.int32)
        for row, ids in zip(tokens, batch, strict=False):
            row[: len(ids)] = ids
        logprobs, greedy = self._score(self._params, runtime.shard_batch(tokens, self._mesh))
        found = np.asarray(logprobs.addressable_data(0)), np.asarray(greedy.addressable_data(0))
        self._between()
        return found

    def _scores(self, params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = decoder.forward(params, self._cfg, tokens, positions)
        return token_logprobs.target_scores(hidden, params, jnp.roll(tokens, -1, axis=1), self._cfg)

    def _generate_batch(
        self, batch: list[list[int]], first: int, width: int, max_new_tokens: int, stop: list[str], temperature: float
    ) -> list[list[int]]:
        if self._cfg.implementation is not None:
            raise RunFileError("model.implementation: a model of your own has no sampler, so it cannot generate")
        key = (width, max_new_tokens, *stop)
        if key not in self._samplers:
            settings = SamplerSettings(width, max_new_tokens, SLOTS_PER_DEVICE * self._shards, CHUNK)
            stops = StopCriteria.of(self._ends, stop, self._tokenizer)
            self._samplers = {key: Sampler(self._cfg, settings, self._mesh, stops)}
        sampler, seed = self._samplers[key], jax.random.fold_in(jax.random.key(self.step), first)
        copy = sampler.load_params(self._params)
        drawn = sampler.generate(copy, batch, 1, seed, temperature, self._between)
        return [found.tokens.tolist() for found in sorted(drawn, key=lambda found: found.row)]


class PuzzleModel(LoadedModel):
    """A recursive model, see `conf.extension.EvaluatedSolver`. `load` it before each use."""

    def __init__(self, cfg: Trm, loop: PuzzleLoop, mesh: Mesh, dataset: PuzzleDataset) -> None:
        super().__init__(solve=self._solve_batch)
        self.dataset, self._rows, self._mesh = dataset, loop.batch_size, mesh
        self._solve = jax.jit(
            lambda params, batch: puzzle.build_eval(cfg, loop, loop.batch_size)(params, batch)["boards"][-1],
            out_shardings=meshes.named_sharding(mesh),
        )

    def solve(self, puzzles: Any) -> np.ndarray:
        given = np.asarray(puzzles, np.int32)
        starts = range(0, len(given), self._rows)
        parts = [self._calls.call("solve", batch=given[i : i + self._rows].tolist()) for i in starts]
        return np.concatenate(parts) if parts else given

    def _solve_batch(self, batch: list[list[int]]) -> np.ndarray:
        inputs = np.pad(np.array(batch, np.int32), ((0, self._rows - len(batch)), (0, 0)))
        given = {"inputs": inputs, "labels": inputs, "ids": np.zeros(self._rows, np.int32)}
        found = self._solve(self._params, runtime.shard_batch(given, self._mesh))
        self._between()
        return np.asarray(found.addressable_data(0))[: len(batch)]


def _power_of_two(length: int) -> int:
    return max(MIN_WIDTH, 1 << (length - 1).bit_length())
