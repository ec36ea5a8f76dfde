"""The sampler: its programs, and the host side of a rollout."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from conf.formats import RunFileError
from conf.schema.training.model import Model
from trainer.models.weights import Params
from trainer.sampler import decode
from trainer.sampler.programs import SamplerPrograms
from trainer.sampler.settings import SamplerSettings, StopCriteria


class LogitsError(RuntimeError):
    """The model's logits are not finite, so no token can be drawn; all processes get it."""


class Completion(NamedTuple):
    """One response.

    row: prompt * samples + sample; tokens: int32 [n], including the token that ended it; logprobs: float32
    [n], in the distribution each token was drawn from; finished: True if a stop ended it, False if truncated; versions:
    int32 [n], of the weights that drew each token, if they may change meanwhile; routes: the experts that each
    token took, [prompt + n, layers, per_token], if they are wanted.
    """

    row: int
    tokens: np.ndarray
    logprobs: np.ndarray
    finished: bool
    versions: np.ndarray | None = None
    routes: np.ndarray | None = None


@dataclass
class _ActiveRow:
    number: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)  # of the prompt, then of each chunk; empty if not wanted


class Sampler:
    """Draws responses with copies of a model's weights.

    Raises RunFileError if `loop.sampler.mesh` does not suit the model or the devices.
    """

    def __init__(self, cfg: Model, settings: SamplerSettings, mesh: Mesh, stops: StopCriteria) -> None:
        if cfg.attention_form == "maha":
            raise RunFileError("model.attention_form: maha has no cache, so it cannot generate; only causal can")
        longest, room = settings.max_prompt_length + settings.max_new_tokens, cfg.max_sampled_len
        if longest > room < cfg.max_seq_len:
            raise RunFileError(
                f"model.rope_scaling: a row of {longest} tokens needs other keys than one of {room} (longrope), which "
                "a cache cannot hold; lower max_prompt_length or max_new_tokens"
            )
        self.settings, self.stops = settings, stops
        self.programs = SamplerPrograms(cfg, settings, mesh, stops.token_ids)
        self.slots = self.programs.slots

    def load_params(self, params: Params) -> Params:
        """Return the copy of the weights that `generate` takes."""
        return self.programs.reshard(params)

    def generate(
        self,
        copy: Params,
        prompts: Sequence[Sequence[int]],
        samples: int,
        key: jax.Array,
        temperature: float,
        between: Callable[[], None] = lambda: None,
        partial_response: Callable[[int, Sequence[int]], object] | None = None,
        numbers: Sequence[int] | None = None,
        weights: Callable[[], tuple[Params, int]] | None = None,
    ) -> Iterator[Completion]:
        """Yield `samples` responses to each prompt as they end, in the same order on every process.

        The devices decode the next chunk meanwhile. between: called before each chunk; an exception from it ends the
        draw. partial_response: called after each chunk with the row and the tokens so far of each response. numbers:
        of each row, for its randomness; by default its place. weights: returns the copy for the next chunk and its
        version; the cache of earlier tokens stays. Raises RunFileError if a prompt is longer than
        `max_prompt_length`, LogitsError if the logits of a row are not finite.
        """
        longest = max(len(prompt) for prompt in prompts)
        if longest > self.settings.max_prompt_length:
            raise RunFileError(
                f"loop.max_prompt_length: a prompt has {longest} tokens, more than {self.settings.max_prompt_length}"
            )
        generation = _Generation(self, copy, prompts, samples, key, temperature, partial_response, numbers, weights)
        return generation.run(between)


class _Generation:
    """State of one call of `Sampler.generate`."""

    def __init__(
        self,
        sampler: Sampler,
        copy: Params,
        prompts: Sequence[Sequence[int]],
        samples: int,
        key: jax.Array,
        temperature: float,
        partial_response: Callable[[int, Sequence[int]], object] | None,
        numbers: Sequence[int] | None,
        weights: Callable[[], tuple[Params, int]] | None,
    ) -> None:
        self.partial_response = partial_response
        self.numbers = numbers or range(len(prompts) * samples)
        self.weights, self.version = weights, 0
        self.copy, self.prompts, self.samples, self.stops = copy, prompts, samples, sampler.stops
        self.settings, self.programs = sampler.settings, sampler.programs
        longest = max(len(prompt) for prompt in prompts)
        self.bucket = next(size for size in self.settings.buckets if size >= longest)
        self.prefill_batch = self.programs.prefill_batch_size(samples, self.bucket)
        self.key_and_temperature = self.programs.replicate(
            (jax.device_get(jax.random.key_data(key)), np.array(temperature, np.float32))
        )
        self.rows_by_slot: list[_ActiveRow | None] = [None] * sampler.slots
        self.next_row = 0  # row
        self.cache_lengths = self.settings.cache_lengths(self.bucket)
        self.cache_length = 0
        self.slots: decode.Slots | None = None
        """None before the first rows. Nothing else may refer to it: a resize would keep a cache that is not needed."""
        self.prefilled_group, self.prefilled = -1, None
        self.prompt_routes: np.ndarray | None = None  # of the group, on the host

    def run(self, between: Callable[[], None]) -> Iterator[Completion]:
        ended: list[Completion] = []
        while True:
            self._fill_slots()
            if not any(self.rows_by_slot):
                break
            between()
            if self.weights is not None:
                self.copy, self.version = self.weights()
            self._fit_cache()
            wanted = self.programs.replicate(np.array([row is not None for row in self.rows_by_slot]))
            self.slots, *told = self.programs.decode(self.copy, self.slots, wanted, *self.key_and_temperature)
            yield from ended  # while the devices decode
            ended = self._collect_chunk(*jax.device_get(told))
        yield from ended

    def _fill_slots(self) -> None:
        """Fill the free slots with waiting rows."""
        free = [slot for slot, row in enumerate(self.rows_by_slot) if row is None]
        while free and self.next_row < len(self.prompts) * self.samples:
            first = self._prefill_group(self.next_row)
            last = min(first + self.prefill_batch, len(self.prompts)) * self.samples
            sources = np.full((3, len(self.rows_by_slot)), -1, np.int32)
            for slot in free[: last - self.next_row]:
                prompt = self.next_row // self.samples
                sources[:, slot] = prompt - first, len(self.prompts[prompt]), self.numbers[self.next_row]
                row = self.rows_by_slot[slot] = _ActiveRow(self.next_row)
                if self.prompt_routes is not None:
                    row.routes.append(self.prompt_routes[prompt - first, : len(self.prompts[prompt])])
                self.next_row += 1
            free = [slot for slot in free if self.rows_by_slot[slot] is None]
            self._fit_cache()
            self.slots = self.programs.insert_prompts(self.slots, self.prefilled, self.programs.replicate(sources))
        if self.next_row >= len(self.prompts) * self.samples:
            self.prefilled = None

    def _fit_cache(self) -> None:
        """Give the cache the length that the rows in flight need until the end of the next chunk."""
        settings = self.settings
        lengths = [
            len(self.prompts[row.number // self.samples])
            + min(len(row.tokens) + settings.chunk, settings.max_new_tokens)
            for row in self.rows_by_slot
            if row is not None
        ]
        needed = next(length for length in self.cache_lengths if length >= max(lengths))
        if self.slots is None:
            self.cache_length, self.slots = needed, self.programs.init_slots(needed)
        while self.cache_length != needed:
            step = 1 if needed > self.cache_length else -1
            self.cache_length = self.cache_lengths[self.cache_lengths.index(self.cache_length) + step]
            self.slots = self.programs.resize_cache(self.slots, self.cache_length)
            jax.block_until_ready(self.slots)  # else the next step could allocate a third cache before this one has run

    def _prefill_group(self, row: int) -> int:
        """Return the index of the first prompt in the row's prefill group, after computing the group if necessary."""
        first = row // self.samples // self.prefill_batch * self.prefill_batch
        if first != self.prefilled_group:
            lengths = np.ones(self.prefill_batch, np.int32)
            tokens = np.zeros((self.prefill_batch, self.bucket), np.int32)
            for i, prompt in enumerate(self.prompts[first : first + self.prefill_batch]):
                lengths[i], tokens[i, : len(prompt)] = len(prompt), prompt
            self.prefilled = None  # only one group at a time is kept on the devices
            self.prefilled_group = first
            self.prefilled = self.programs.prefill(self.copy, *self.programs.shard_by_row((tokens, lengths)))
            if self.settings.returns_routes:
                self.prompt_routes = jax.device_get(self.prefilled.routes)
        return first

    def _collect_chunk(self, told: np.ndarray, routes: np.ndarray | None = None) -> list[Completion]:
        """Return the responses that ended in a chunk [2, slots, chunk], and free their slots; routes: of its tokens."""
        tokens, logprobs = told[0], told[1].view(np.float32)
        counts = (tokens != decode.NO_TOKEN).sum(axis=1)
        ended = []
        for slot, row in enumerate(self.rows_by_slot):
            if row is None:
                continue
            seen, count = len(row.tokens), int(counts[slot])
            row.tokens += tokens[slot, :count].tolist()
            row.logprobs += logprobs[slot, :count].tolist()
            row.versions += [self.version] * count
            if routes is not None:
                row.routes.append(routes[slot, :count].copy())
            if not (known := np.isfinite(logprobs[slot, :count])).all():
                raise LogitsError(
                    f"the model's logits are not finite at token {seen + int(known.argmin()) + 1} of a response: its "
                    "weights or activations are NaN, or beyond the range of model.activation_dtype"
                )
            stop = self.stops.find_end(row.tokens, seen)
            length = len(row.tokens) if stop is None else stop
            if self.partial_response is not None:
                self.partial_response(row.number, row.tokens[:length])
            by_token = stop is None and row.tokens[-1] in self.stops.token_ids
            if stop is not None or by_token or length >= self.settings.max_new_tokens:
                ended.append(
                    Completion(
                        row.number,
                        tokens=np.array(row.tokens[:length], np.int32),
                        logprobs=np.array(row.logprobs[:length], np.float32),
                        finished=stop is not None or by_token,
                        versions=None if self.weights is None else np.array(row.versions[:length], np.int32),
                        routes=self._routes_of(row, length) if row.routes else None,
                    )
                )
                self.rows_by_slot[slot] = None
        return ended

    def _routes_of(self, row: _ActiveRow, length: int) -> np.ndarray:
        """Return the routes of a prompt and the first tokens of its response, see `Completion`."""
        whole = np.concatenate(row.routes)[: len(self.prompts[row.number // self.samples]) + length]
        return whole.reshape(len(whole), self.programs.cfg.num_layers, -1)
