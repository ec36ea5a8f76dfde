"""Conversations that keep their cache: the tokens of full recomputation, and how many are computed as prompts."""

from functools import cache
from itertools import chain
from typing import Any

import jax
import numpy as np
import pytest

from conf.schema.training.settings import Mesh
from tests.conftest import wide
from tests.trainer.conftest import make_mesh
from tests.trainer.models.reference_models import described, params_of
from trainer.models import weights
from trainer.sampler import Completion, Conversations, Distribution, Sampler, SamplerSettings, StopCriteria
from trainer.sampler import settings as settings_module

ROWS, TURNS = 5, 8
FAMILIES = ("gemma2", "gemma4_e2b", "gpt_oss", "qwen3_5", "nanochat")
"""Windows, keys that layers share, sinks and experts, recurrent layers, other windows."""


@cache
def sampler_of(cfg: Any, sizes: tuple[int, int, int] = (1, 1, 1), texts: tuple[str, ...] = (), **changes: Any) -> Any:
    mesh, room = make_mesh(*sizes), cfg.max_sampled_len
    options = {"max_prompt_length": room - 4, "max_new_tokens": 4, "slots": ROWS, "chunk": 3, "keeps_turns": True}
    ends = tuple(range(0, cfg.vocab_size, 3))
    with jax.set_mesh(mesh):
        stops = StopCriteria(ends, texts, lambda tokens: "".join(map(chr, tokens)))
        return Sampler(cfg, SamplerSettings(**options | changes), mesh, stops)


def played(
    sampler: Sampler, copy: Any, kept: Conversations | None, *, turns: int = TURNS, heat: float = 0.0, said: int = 2
) -> tuple[list[list[Completion]], list[list[int]]]:
    """The completions of each turn, and the whole conversations. Rows hear texts of unlike length, and some leave."""
    chance = np.random.default_rng(0)
    vocabulary = sampler.programs.cfg.vocab_size
    whole = [chance.integers(0, vocabulary, n + 1).tolist() for n in range(ROWS)]
    live, every = [*range(ROWS)], []
    for turn in range(turns):
        prompts = [whole[row] for row in live]
        key = jax.random.fold_in(jax.random.key(3), turn)
        found = sampler.generate(copy, prompts, 1, key, heat, numbers=live, conversations=kept)
        every.append(sorted(found, key=lambda completion: completion.row))
        for completion in every[-1]:
            whole[live[completion.row]] += completion.tokens.tolist()
        if turn % 3 == 1 and len(live) > 2:
            live.pop(0)
        longest = sampler.settings.max_prompt_length
        for row in live:
            whole[row] += chance.integers(0, vocabulary, 1 + (row + turn) % said).tolist()
        live = [row for row in live if len(whole[row]) <= longest]
        if not live:
            break
    return every, whole


def assert_same(some: list[list[Completion]], others: list[list[Completion]]) -> None:
    assert len(some) == len(others)
    for one, other in zip(chain(*some), chain(*others), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=2e-4)
        assert one.finished == other.finished
        assert (one.routes is None) == (other.routes is None)
        if one.routes is not None:
            np.testing.assert_array_equal(one.routes, other.routes)


def compared(sampler: Sampler, copy: Any, **how: Any) -> tuple[int, int, int]:
    """Tokens that were computed as prompts with and without reuse, and those that were new."""
    kept, _ = played(sampler, copy, Conversations(), **how)
    whole, conversations = played(sampler, copy, None, **how)
    assert_same(kept, whole)
    drawn = sum(len(completion.tokens) for turn in kept for completion in turn)
    counted, recomputed = (sum(c.prefilled for turn in t for c in turn) for t in (kept, whole))
    return counted, recomputed, sum(map(len, conversations)) - drawn


@pytest.mark.parametrize("family", ["gemma2", "qwen3_5", *wide(*FAMILIES)])
def test_a_turn_computes_what_is_new(family: str) -> None:
    sampler = sampler_of(described(family, remat="none"))
    counted, recomputed, new = compared(sampler, sampler.load_params(params_of(family)))
    assert counted <= 1.02 * new
    assert recomputed > 2 * new


TEXTS = tuple(map(chr, range(1, 50, 3)))
"""Texts that end a turn in the middle of a chunk, which the devices go on with."""


@pytest.mark.parametrize(
    ("family", "options", "bound"),
    [
        ("gemma2", {"texts": TEXTS}, 1.02),  # windows take back what was decoded after the end
        ("gemma4_e2b", {"texts": TEXTS}, 1.02),
        ("gemma2", {"slots": 3}, None),  # slots are taken: these rows are computed whole
        ("gemma2", {"slots": 3, "texts": TEXTS}, None),
        ("qwen3_5", {"texts": TEXTS}, None),  # a memory takes nothing back
        ("gemma2", {"drawn_from": Distribution(repetition_penalty=1.3, frequency_penalty=0.2)}, 1.02),
        ("gemma2", {"drawn_from": Distribution(presence_penalty=0.5), "texts": TEXTS}, None),
        ("qwen3_moe", {"returns_routes": True}, 1.02),
        ("qwen3_5", {"sizes": (4, 1, 1)}, 1.02),
    ],
    ids=str,
)
@pytest.mark.parametrize("heat", [0.0, 0.7])
def test_the_tokens_are_those_of_full_recomputation(
    family: str, options: dict[str, Any], bound: float | None, heat: float
) -> None:
    sampler = sampler_of(described(family, remat="none"), **options)
    counted, recomputed, new = compared(sampler, sampler.load_params(params_of(family)), heat=heat)
    assert counted < recomputed
    assert (counted <= 1.02 * new) == (bound is not None)


@pytest.mark.parametrize(
    "mesh", [{}, {"sizes": (1, 8, 1), "mesh": Mesh(data=-1, fsdp=1, tensor=2)}], ids=["one", "many"]
)
def test_long_texts_are_computed_in_parts_in_caches_of_several_lengths(
    tiny, mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings_module, "EXTENSION_WIDTHS", (2, 4))
    monkeypatch.setattr(settings_module, "MIN_CACHE_LENGTH", 4)
    monkeypatch.setattr(settings_module, "LANES", 1)
    monkeypatch.setattr(settings_module, "MIN_BUCKET", 4)
    cfg = tiny.model_copy(update={"sliding_window": 7})
    sampler = sampler_of(cfg, max_prompt_length=90, chunk=2, texts=TEXTS, **mesh)
    params = jax.jit(weights.init_params, static_argnums=0)(cfg, jax.random.key(0))
    copy = sampler.load_params(
        jax.device_put(params, weights.param_shardings(cfg, make_mesh(*mesh.get("sizes", (1, 1, 1)))))
    )
    counted, _, new = compared(sampler, copy, said=11)
    assert counted <= 1.02 * new


def test_other_weights_find_nothing_kept(tiny) -> None:
    sampler = sampler_of(tiny, max_prompt_length=60)
    params = jax.jit(weights.init_params, static_argnums=0)(tiny, jax.random.key(0))
    first, other = sampler.load_params(params), sampler.load_params(params)
    kept, prompt, key = Conversations(), [1, 2, 3], jax.random.key(0)

    def drawn(copy: Any, prompt: list[int], **how: Any) -> Completion:
        [found] = sampler.generate(copy, [prompt], 1, key, 0.0, conversations=kept, **how)
        return found

    said = [*prompt, *drawn(first, prompt).tokens.tolist()]
    again = drawn(other, [*said, 5])
    assert again.prefilled == len(said) + 1
    said = [*said, 5, *again.tokens.tolist()]
    once_more = drawn(other, [*said, 6, 7])
    assert once_more.prefilled == 2
    said = [*said, 6, 7, *once_more.tokens.tolist()]
    silent = drawn(other, said)  # nothing new: the last token is computed again
    assert silent.prefilled == 1
    assert drawn(other, [*said[:-1], said[-1] + 1, 8]).prefilled == len(said) + 1  # another conversation
    assert drawn(other, [9], weights=lambda: (other, 1)).prefilled == 1
    assert drawn(other, [*said, 5], numbers=[3]).prefilled == len(said) + 1
