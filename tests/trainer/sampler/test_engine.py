"""Responses against decoding without a cache, against the trainer's log-probabilities, and drawn in other ways."""

from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest

from conf.formats import RunFileError
from conf.schema.training.settings import Mesh
from tests.conftest import wide
from tests.trainer.conftest import make_mesh
from tests.trainer.models.reference_models import DERIVED, described, expected_of, params_of
from trainer.losses import token_logprobs
from trainer.models import decoder, weights
from trainer.sampler import Completion, Distribution, LogitsError, Sampler, SamplerSettings, StopCriteria
from trainer.sampler.programs import SamplerPrograms
from trainer.tokenizer.loading import EOS_ID, PAD, ByteTokenizer

RESPONSE, SAMPLES = 10, 2
LENGTHS = (3, 7, 5, 8, 1, 8, 2, 6)
PROMPTS = [np.random.default_rng(n).integers(0, 256, length).tolist() for n, length in enumerate(LENGTHS)]
ROWS = len(PROMPTS) * SAMPLES
OFTEN = tuple(range(0, 512, 6))
"""Tokens that end a response, so many that its length is as good as geometric."""

initial = jax.jit(weights.init_params, static_argnums=0)
forward = jax.jit(decoder.forward, static_argnums=1)
scored = jax.jit(token_logprobs.token_logprobs, static_argnums=(3, 4))


def first_params(cfg):
    return initial(cfg, jax.random.key(0))


@cache
def programs_of(cfg, settings, mesh, ends):
    """Compiled once, whatever is drawn with them."""
    return SamplerPrograms(cfg, settings, mesh, ends)


def drawn(cfg, *, sizes=(1, 1, 1), temperature=1.0, seed=0, ends=(EOS_ID,), texts=(), prompts=PROMPTS, **changes):
    """By row."""
    mesh = make_mesh(*sizes)
    settings = SamplerSettings(
        **{"max_prompt_length": 8, "max_new_tokens": RESPONSE, "slots": ROWS, "chunk": 64} | changes
    )
    with jax.set_mesh(mesh):
        sampler = Sampler(cfg, settings, mesh, StopCriteria(ends, texts, ByteTokenizer().decode))
        sampler.programs = programs_of(cfg, settings, mesh, tuple(ends))
        copy = sampler.load_params(jax.device_put(first_params(cfg), weights.param_shardings(cfg, mesh)))
        found = list(sampler.generate(copy, prompts, SAMPLES, jax.random.key(seed), temperature))
    assert sorted(response.row for response in found) == list(range(len(prompts) * SAMPLES))
    return sorted(found, key=lambda response: response.row)


@cache
def drawn_once(cfg, ends=(EOS_ID,)) -> list[Completion]:
    """What several tests compare with."""
    return drawn(cfg, ends=ends)


def assert_same(some: list[Completion], others: list[Completion], atol: float = 1e-5) -> None:
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens, err_msg=f"row {one.row}")
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=atol)
        assert one.finished == other.finished


def trainers(cfg, params, found: list[Completion], temperature=1.0) -> list[np.ndarray]:
    """The trainer's log-probabilities of the tokens of each response; no cache anywhere."""
    rows = np.full((ROWS, 8 + RESPONSE), PAD, np.int32)
    for response in found:
        whole = [*PROMPTS[response.row // SAMPLES], *response.tokens]
        rows[response.row, : len(whole)] = whole
    hidden = forward(params, cfg, rows, np.broadcast_to(np.arange(rows.shape[1]), rows.shape))
    logprob, _ = scored(hidden, params, np.roll(rows, -1, axis=1), cfg, temperature)
    starts = [len(PROMPTS[r.row // SAMPLES]) - 1 for r in found]
    return [np.asarray(logprob)[r.row, start:][: len(r.tokens)] for r, start in zip(found, starts, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_trainer(tiny, temperature):
    found = drawn(tiny, temperature=temperature)
    for response, logprobs in zip(found, trainers(tiny, first_params(tiny), found, temperature), strict=True):
        np.testing.assert_allclose(response.logprobs, logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"sizes": (1, 8, 1), "mesh": Mesh(data=-1, fsdp=1, tensor=2), "slots": 8, "chunk": 4},
        *wide(
            {"slots": 5, "chunk": 2},
            {"slots": 1, "chunk": 7},
            {"sizes": (4, 1, 1), "slots": 8, "chunk": 3},
            {"sizes": (2, 2, 2)},
        ),
    ],
    ids=str,
)
def test_the_same_tokens_however_they_are_drawn(tiny, changes):
    """Rows of unlike length: some end early, and others take their slots."""
    assert_same(drawn_once(tiny, OFTEN), drawn(tiny, ends=OFTEN, **changes))


def test_rows_have_randomness_of_their_own_and_end_at_a_token_or_are_cut_off(tiny):
    free, found = drawn_once(tiny), drawn_once(tiny, OFTEN)
    assert_same(free[:SAMPLES], drawn(tiny, prompts=PROMPTS[:1]))
    for other in (free[1], drawn(tiny, seed=1)[0]):
        assert not np.array_equal(free[0].tokens, other.tokens)
    assert len({len(response.tokens) for response in found}) > 3
    assert {response.finished for response in found} == {True, False}
    for response in found:
        assert not set(response.tokens[:-1]) & set(OFTEN)
        assert (response.tokens[-1] in OFTEN) == response.finished
        assert response.finished or len(response.tokens) == RESPONSE


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": 5, "chunk": 3},  # rows take the slots of others, whose tokens are forgotten
        {"sizes": (1, 8, 1), "mesh": Mesh(data=-1, fsdp=1, tensor=2), "slots": 8, "chunk": 4},
    ],
    ids=str,
)
def test_penalties_count_the_tokens_of_a_row_wherever_it_is_decoded(tiny, changes):
    """Each greedy token is the likeliest after the penalties, computed from the whole row without a cache."""
    penalties = Distribution(
        repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3, logit_bias=((9, 1.0),)
    )
    params, length = first_params(tiny), 8 + RESPONSE
    found = drawn(tiny, temperature=0.0, drawn_from=penalties, **changes)
    free = drawn(tiny, temperature=0.0)
    assert any(not np.array_equal(one.tokens, other.tokens) for one, other in zip(found, free, strict=True))
    for response in found:
        prompt = PROMPTS[response.row // SAMPLES]
        row = np.full((1, length), PAD, np.int32)
        row[0, : len(prompt) + len(response.tokens)] = [*prompt, *response.tokens]
        logits = decoder.unembed(params, tiny, forward(params, tiny, row, np.arange(length)[None]))[0]
        for i, token in enumerate(response.tokens.tolist()):
            said = np.bincount(response.tokens[:i], minlength=logits.shape[1])
            now = np.array(logits[len(prompt) + i - 1])
            now[9] += 1
            known = (said > 0) | np.isin(np.arange(len(now)), prompt)
            now = np.where(known, np.where(now > 0, now / 1.5, now * 1.5), now) - 0.4 * (said > 0) - 0.3 * said
            assert now[token] >= now.max() - 1e-4


def test_a_row_ends_at_a_text_wherever_the_chunks_do(tiny):
    free = drawn_once(tiny)
    said = [ByteTokenizer().decode(response.tokens) for response in free]
    stop = next(text[2] for text in said if text[2:3].isprintable() and text[2:3] not in ("", "�"))
    expected = {n: text.index(stop) for n, text in enumerate(said) if stop in text}
    for changes in ({}, {"slots": 4, "chunk": 3}):
        found = drawn(tiny, texts=(stop,), **changes)
        for response, before in zip(found, free, strict=True):
            length = len(response.tokens)
            np.testing.assert_array_equal(response.tokens, before.tokens[:length])
            assert response.finished == (before.finished or response.row in expected)
            assert ByteTokenizer().decode(response.tokens).endswith(stop) == (response.row in expected)
            assert stop not in ByteTokenizer().decode(response.tokens[:-1])


def test_a_special_token_among_the_texts_ends_a_row_although_no_text_shows_it():
    """Decoded texts leave special tokens out, so as a text it would end nothing."""
    bytes_ = ByteTokenizer()
    stops = StopCriteria.of([EOS_ID], ["x", "<bos>", "<eos>"], bytes_)
    assert (stops.token_ids, stops.strings) == ((EOS_ID, bytes_.special_tokens["<bos>"]), ("x",))
    assert stops.find_end(list(b"ax"), 0) == 2
    assert StopCriteria.of([], ["<|im_end|>"], bytes_).strings == ("<|im_end|>",)  # a text to this tokenizer


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (Mesh(data=1, fsdp=1, tensor=4), r"loop\.sampler\.mesh: data 1 x fsdp 1 x tensor 4 does not make 8 devices"),
        (Mesh(data=-1, fsdp=1, tensor=4), r"loop\.sampler\.mesh\.tensor: 4 devices cannot split the 2 kv_heads"),
    ],
)
def test_a_mesh_or_a_prompt_that_does_not_suit_is_refused(tiny, mesh, words):
    with pytest.raises(RunFileError, match=words):
        drawn(tiny, sizes=(8, 1, 1), mesh=mesh)
    with pytest.raises(RunFileError, match=r"loop\.max_prompt_length: a prompt has 9 tokens, more than 8"):
        drawn(tiny, prompts=[[1] * 9])


@pytest.mark.deep
def test_logprobs_in_bfloat16_stay_near_the_trainers(tiny):
    """Those of the trainer in bfloat16: docs/grpo.md states the bound."""
    low = tiny.model_copy(update={"activation_dtype": "bfloat16"})
    found = drawn(low)
    theirs = trainers(low, first_params(low), found)
    apart = np.abs(np.concatenate([r.logprobs - logprobs for r, logprobs in zip(found, theirs, strict=True)]))
    assert apart.max() < 0.03
    assert apart.mean() < 0.005


def test_what_is_asked_between_chunks_may_end_the_draw(tiny):
    """A notice of preemption, say: it is heard after at most a chunk."""
    asked = []

    def between():
        asked.append(None)
        if len(asked) == 3:
            raise InterruptedError

    settings, mesh = SamplerSettings(8, RESPONSE, slots=5, chunk=2), make_mesh(1, 1, 1)
    sampler = Sampler(tiny, settings, mesh, StopCriteria(OFTEN))
    sampler.programs = programs_of(tiny, settings, mesh, OFTEN)
    with pytest.raises(InterruptedError):
        list(
            sampler.generate(sampler.load_params(first_params(tiny)), PROMPTS, SAMPLES, jax.random.key(0), 1.0, between)
        )
    assert len(asked) == 3


def test_every_token_has_the_version_that_drew_it_whenever_newer_weights_arrive():
    chance, newest = np.random.default_rng(0), [0]

    def arrive() -> None:
        newest[0] += int(chance.integers(0, 2))

    def latest() -> tuple[Any, int]:
        arrive()
        return newest[0], newest[0]

    settings = SamplerSettings(max_prompt_length=8, max_new_tokens=6, slots=3, chunk=2)
    echo = MagicMock()  # its weights are a number, which every token repeats
    echo.decode = lambda copy, slots, *_: (slots, np.full((2, 3, 2), copy, np.int32))
    echo.shard_by_row = echo.replicate = lambda rows: rows
    echo.prefill_batch_size.return_value = 1
    sampler: Any = SimpleNamespace(stops=StopCriteria(()), settings=settings, programs=echo, slots=3)
    generate: Any = Sampler.generate
    drawing = generate(sampler, 0, PROMPTS, 2, jax.random.key(0), 1.0, arrive, weights=latest)
    found = []
    for response in drawing:
        arrive()
        found.append(response)
    assert sorted(response.row for response in found) == list(range(ROWS))
    for response in found:
        assert response.versions is not None
        assert response.tokens.tolist() == response.versions.tolist()
        assert len(response.tokens) == 6
    assert any(len(set(response.tokens.tolist())) > 1 for response in found)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 3, 5])
def test_a_token_of_logits_that_are_not_finite_ends_the_draw(bad, at):
    settings = SamplerSettings(max_prompt_length=8, max_new_tokens=6, slots=3, chunk=2)
    programs, turn = MagicMock(), [0]

    def decode(copy: Any, slots: Any, *_: Any) -> tuple[Any, np.ndarray]:
        logprobs = np.full((3, 2), -1.0, np.float32)
        if turn[0] == at // 2:
            logprobs[1, at % 2] = bad
        turn[0] += 1
        return slots, np.stack([np.ones((3, 2), np.int32), logprobs.view(np.int32)])

    programs.decode, programs.prefill_batch_size.return_value = decode, 1
    programs.shard_by_row = programs.replicate = lambda rows: rows
    sampler: Any = SimpleNamespace(stops=StopCriteria(()), settings=settings, programs=programs, slots=3)
    generate: Any = Sampler.generate
    with pytest.raises(LogitsError, match=f"the model's logits are not finite at token {at + 1} of a"):
        list(generate(sampler, 0, PROMPTS, 2, jax.random.key(0), 1.0))


STOPS = StopCriteria((7,), ("\n\n\n", "Question:"), ByteTokenizer().decode)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("4\n\n\n\n\n", "4\n\n\n"),
        ("so 4. Question: 5?\n\n\n", "so 4. Question:"),
        ("é\n\n\nx", "é\n\n\n"),
    ],
)
@pytest.mark.parametrize("seen", [0, 1])
def test_a_response_ends_with_the_token_that_completes_the_first_text(text, kept, seen):
    assert STOPS.find_end(list(text.encode()), seen) == len(list(kept.encode()))


def test_texts_that_are_not_there_end_nothing():
    assert STOPS.find_end(list(b"4\n\nmore"), 0) is None
    assert StopCriteria((7,)).find_end([1, 7], 0) is None  # tokens are seen by the devices


def test_tokens_of_many_characters_are_kept_whole():
    words = {1: "a\n", 2: "\n\nb"}
    stops = StopCriteria((), ("\n\n\n",), lambda ids: "".join(words[i] for i in ids))
    assert stops.find_end([1, 2, 1], 0) == 2


# gpt2 has the biases of qwen2; llama3 has nothing that qwen3 has not; phi3_long is refused below
OTHERS = ("gemma3", "gpt2", "nanochat", "qwen3", "qwen2_window", *sorted({*DERIVED} - {"olmo3", "phi3_long"}))


@pytest.mark.parametrize("family", ["gemma2", "llama_biases", "olmo3", *wide(*OTHERS)])
def test_greedy_replies_equal_the_reference(family):
    """Prompts of eight lengths, some longer than the window of local layers; the reference answered each alone."""
    expected, cfg = expected_of(family), described(family, scan_layers=family != "llama_biases", remat="none")
    lengths, count = expected["prompt_lengths"], expected["generated"].shape[1]
    prompts = [row[:length].tolist() for row, length in zip(expected["prompts"], lengths, strict=True)]
    settings = SamplerSettings(max(lengths), count, slots=3, chunk=4)  # so that rows follow each other
    sampler = Sampler(cfg, settings, make_mesh(1, 1, 1), StopCriteria(()))
    copy = sampler.load_params(params_of(family))
    found = {drawn.row: drawn.tokens for drawn in sampler.generate(copy, prompts, 1, jax.random.key(0), 0.0)}
    assert len(np.unique(expected["generated"])) > 4  # replies that change on the way
    np.testing.assert_array_equal([found[row] for row in range(len(prompts))], expected["generated"])


def test_a_row_beyond_the_original_context_of_longrope_is_refused():
    """Its keys would change with its length. Of 16 tokens, a prompt of 6 leaves 10."""
    cfg, mesh = described("phi3_long"), make_mesh(1, 1, 1)
    assert Sampler(cfg, SamplerSettings(6, 10, slots=3, chunk=4), mesh, StopCriteria(())).slots == 3
    with pytest.raises(RunFileError, match=r"model\.rope_scaling: a row of 17 tokens needs other keys than one of 16"):
        Sampler(cfg, SamplerSettings(7, 10, slots=3, chunk=4), mesh, StopCriteria(()))
