"""Settings of a sampler, and what ends a response."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from conf.schema.training.loop_parts import Sampling
from conf.schema.training.settings import Mesh
from trainer.tokenizer.loading import Tokenizer

MIN_BUCKET = 128
MIN_CACHE_LENGTH = 256
"""Places below which a shorter cache saves less than its programs take to compile."""
LANES = 128
"""TPUs pad the places of a cache to a multiple of this."""


@dataclass(frozen=True)
class Distribution:
    """What a token is drawn from: logits with biases and penalties, over the temperature, then some of the tokens.

    The order is that of vLLM; see `conf.schema.training.loop_parts.Sampling`.
    """

    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, sampling: Sampling) -> "Distribution":
        """Return the distribution that a loop draws from."""
        given: dict[str, Any] = {part.name: getattr(sampling, part.name) for part in fields(cls)}
        given["logit_bias"] = tuple(sorted(sampling.logit_bias.items()))
        return cls(**given)

    @property
    def has_penalties(self) -> bool:
        """Whether it depends on the tokens that the row has."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


PLAIN = Distribution()


@dataclass(frozen=True)
class SamplerSettings:
    """Sizes and distribution; see `conf.schema.training.loop_parts.Sampling`.

    Attributes:
        max_prompt_length: tokens of the longest prompt.
        max_new_tokens: maximum length of a response, in tokens.
        slots: rows in flight; rounded up to a multiple of the devices that share them.
        returns_routes: whether responses tell the experts of their tokens.
    """

    max_prompt_length: int
    max_new_tokens: int
    slots: int
    chunk: int
    drawn_from: Distribution = PLAIN
    dtype: str | None = None
    mesh: Mesh | None = None
    returns_routes: bool = False

    @classmethod
    def from_config(
        cls, sampling: Sampling, max_prompt_length: int, max_new_tokens: int, rows: int, *, returns_routes: bool
    ) -> "SamplerSettings":
        """Return the settings of a loop that draws `rows` responses with one policy."""
        slots, drawn_from = min(rows, sampling.slots or rows), Distribution.of(sampling)
        sizes = (max_prompt_length, max_new_tokens, slots, sampling.chunk)
        return cls(*sizes, drawn_from, sampling.dtype, sampling.mesh, returns_routes)

    @property
    def buckets(self) -> list[int]:
        """Return the padded prompt lengths, each with its own programs: the longest, its half, its quarter, ..."""
        found = [self.max_prompt_length]
        while found[-1] >= 2 * MIN_BUCKET:
            found.append(-(-found[-1] // 2))
        return sorted(found)

    def cache_lengths(self, bucket: int) -> list[int]:
        """Return the places of the cache for prompts of a bucket, each with its own programs, the fewest first.

        All buckets share the lengths of the longest possible row, its half, its quarter, ... The most hold any row of
        this bucket. The fewest hold more than the prompts of a shorter bucket and a chunk, since only a few last rows
        could have less.
        """
        shorter = max((size for size in self.buckets if size < bucket), default=0)
        fewest = shorter + min(self.chunk, self.max_new_tokens)
        lengths = [self.max_prompt_length + self.max_new_tokens]
        while (half := -(-lengths[-1] // (2 * LANES)) * LANES) >= MIN_CACHE_LENGTH:
            lengths.append(half)
        most = min(length for length in lengths if length >= bucket + self.max_new_tokens)
        return sorted(length for length in lengths if fewest <= length <= most)


@dataclass(frozen=True)
class StopCriteria:
    """Stop criteria; `decode` maps tokens to text.

    Tokens are checked on the devices, texts by the host between chunks.

    token_ids: they end a response as its last token. strings: the token that completes any of them ends the response.
    """

    token_ids: tuple[int, ...]
    strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None

    @classmethod
    def of(cls, token_ids: Sequence[int], texts: Sequence[str], tokenizer: Tokenizer) -> "StopCriteria":
        """Return the criteria of these tokens and texts; a text that names a special token is that token."""
        special = tokenizer.special_tokens
        named = [special[text] for text in texts if text in special]
        others = tuple(text for text in texts if text not in special)
        return cls(tuple(dict.fromkeys([*token_ids, *named])), others, tokenizer.decode)

    def find_end(self, tokens: Sequence[int], seen: int) -> int | None:
        """Return how many tokens to keep, including the first stop text, or None if there is none.

        seen: this many tokens are known to contain no stop text.
        """
        if not self.strings or not self._contains_stop(tokens):
            return None
        least, most = seen, len(tokens)  # bisect for the shortest prefix that contains a text
        while least + 1 < most:
            middle = (least + most) // 2
            least, most = (least, middle) if self._contains_stop(tokens[:middle]) else (middle, most)
        return most

    def _contains_stop(self, tokens: Sequence[int]) -> bool:
        assert self.decode is not None, "texts cannot be looked for without a tokenizer"
        said = self.decode(tokens)
        return any(text in said for text in self.strings)
