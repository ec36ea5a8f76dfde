"""From question to update: what is drawn, what each sample counts for, and what a checkpoint keeps of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import jax
import numpy as np
import pytest

from conf.schema.training.data import ArithmeticData
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.run_yaml import RunFile
from tests.conftest import wide
from tests.golden import golden
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from trainer.data.prompting import Draw, Problem, PromptEncoder, Question
from trainer.distributed.runtime import shard_batch
from trainer.fit import memory
from trainer.losses import grpo
from trainer.losses.grpo import ROW_FIELDS, TOKEN_FIELDS
from trainer.rewards.pool import RewardPool
from trainer.rl import programs
from trainer.rl.programs import build_logprobs, build_update
from trainer.rl.rollouts import Rollout, RolloutGenerator, staleness
from trainer.rl.telemetry import MetricAverages, Progress
from trainer.sampler import Completion
from trainer.step import train_step
from trainer.telemetry.throughput import Stopwatch
from trainer.tokenizer.loading import BOS_ID, EOS_ID

LENGTH = 6
LOOP = GrpoLoop(
    **load_group("loop/grpo")
    | {"max_prompt_length": 8, "max_new_tokens": LENGTH, "group_size": 2, "prompts_per_step": 2}
)
PROMPTING = PromptEncoder(ArithmeticData(**load_group("data/arithmetic")))
QUESTIONS = PROMPTING.encode([Problem("1+1=", "2", ""), Problem("2+3=", "5", "")])


@pytest.fixture(scope="module")
def checks() -> Iterator[RewardPool]:
    with RewardPool(1, 5.0) as pool:
        yield pool


class Asked:
    """Always the same two questions; keeps what was asked for."""

    def __init__(self) -> None:
        self.prompt_encoder = PROMPTING
        self.draws: list[Draw] = []

    def train(self, draw: Draw, count: int) -> list[Question]:
        self.draws.append(draw)
        return [QUESTIONS[i % 2] for i in range(count)]


class Scripted:
    """A sampler that says the given texts, draw after draw, the last row first. A text of LENGTH tokens has no end."""

    def __init__(self, *draws: list[str]) -> None:
        self.draws, self.keys = list(draws), list[list[int]]()

    def load_params(self, params: None) -> None:
        """No weights are needed."""

    def generate(
        self, copy: None, prompts: Sequence[Sequence[int]], samples: int, key: jax.Array, heat: float, between: Callable
    ) -> Iterator[Completion]:
        self.keys.append(jax.random.key_data(key).tolist())
        texts = self.draws.pop(0)
        assert len(texts) == len(prompts) * samples
        for row, text in reversed([*enumerate(texts)]):
            between()
            tokens = np.array([*text.encode(), EOS_ID][:LENGTH], np.int32)
            logprobs = -(10.0 * row + np.arange(1, len(tokens) + 1, dtype=np.float32))
            yield Completion(row, tokens, logprobs, finished=bool(tokens[-1] == EOS_ID))


class Scores:
    """Stands for the compiled program: log-probabilities that tell policies apart."""

    def score(self, params: None, reference: None, batch: dict) -> tuple[jax.Array, jax.Array]:
        return -1.5 * batch["mask"], -2.5 * batch["mask"]


def drawn(
    checks: RewardPool, *draws: list[str], finish: bool = True, between: Callable = lambda: None, **changes
) -> tuple[Rollout, Asked, Scripted]:
    asked, sampler, loop = Asked(), Scripted(*draws), GrpoLoop(**LOOP.model_dump() | changes)
    watch = Stopwatch("rollout_time", "reward_time", "score_time")
    rollouts = RolloutGenerator(loop, make_mesh(1, 1, 1), 7, asked, sampler, Scores(), checks, watch)  # pyright: ignore[reportArgumentType]
    rollout = rollouts.generate(None, None, 3, between)  # pyright: ignore[reportArgumentType]
    if finish:
        rollout.finish()
    return rollout, asked, sampler


def by_text(rollout: Rollout, name: str) -> dict[tuple[str, str], float]:
    """A field of every sample of all updates, by the texts of prompt and response."""
    found = {}
    for batch in rollout.batches:
        for tokens, mask, value in zip(batch["tokens"], batch["mask"], batch[name], strict=True):
            text = bytes(t for t in tokens[1:] if 0 < t < 256)
            cut = int(mask.argmax())
            found[text[:cut].decode(), text[cut:].decode()] = float(value)
    return found


def test_scores_are_by_group(checks) -> None:
    rollout, _, _ = drawn(checks, ["2", "3", "5", "     5"])
    facts = rollout.metrics
    assert (facts["accuracy"], facts["pass_at_k"], facts["reward_mean"]) == (0.75, 1, 0.75)
    assert (facts["zero_variance_groups"], facts["truncated"], facts["reward_std"]) == (0.5, 0.25, 0.25)
    assert (facts["response_length"], facts["response_length_max"], facts["samples_drawn"]) == (3, 6, 4)
    advantages = by_text(rollout, "advantage")
    assert advantages["1+1=", "2"] == pytest.approx(1, abs=1e-4)
    assert advantages["1+1=", "3"] == pytest.approx(-1, abs=1e-4)
    assert advantages["2+3=", "5"] == advantages["2+3=", "     5"] == 0
    assert set(by_text(rollout, "weight").values()) == {1}


def test_the_samplers_log_probabilities_stand_where_the_mask_does(checks) -> None:
    rollout, _, _ = drawn(checks, ["2", "", "55", "     5"])
    (batch,) = rollout.batches
    assert batch["sampler"].shape == batch["mask"].shape == (4, 13)
    for tokens, mask, logprobs in zip(batch["tokens"], batch["mask"], batch["sampler"], strict=True):
        places = mask.nonzero()[0]
        row = int(-logprobs[places[0]] // 10)
        assert places[0] == len(QUESTIONS[0].prompt_tokens) - 1
        assert len(places) == [2, 1, 3, 6][row]
        assert logprobs[places].tolist() == [-(10 * row + i + 1) for i in range(len(places))]
        assert logprobs.nonzero()[0].tolist() == places.tolist()
        assert tokens[places + 1].tolist() == [*["2", "", "55", "     5"][row].encode(), EOS_ID][:LENGTH]
    rows = zip(batch["tokens"], batch["mask"], strict=True)  # groups stand together: a prompt is computed once
    prompts = [tokens[: int(mask.argmax()) + 1].tolist() for tokens, mask in rows]
    assert prompts == [question.prompt_tokens for question in QUESTIONS for _ in range(2)]


def test_what_does_not_count_is_counted(checks) -> None:
    """A group of equal rewards, and a response that was cut off in another."""
    rollout, _, _ = drawn(checks, ["2", "2", "     4", "5"], filter_zero_variance_groups=True, overlong="drop")
    assert (rollout.metrics["filtered_equal"], rollout.metrics["filtered_overlong"]) == (0.5, 0.25)
    weights, advantages = by_text(rollout, "weight"), by_text(rollout, "advantage")
    assert [weight for _, weight in sorted(weights.items())] == [0, 0, 1]  # the two equal ones have the same texts
    assert advantages["2+3=", "5"] == pytest.approx(1, abs=1e-4)  # the baseline is that of all samples


def test_long_responses_lose_reward_but_make_no_group_unequal(checks) -> None:
    changes = {"filter_zero_variance_groups": True, "overlong": "penalize", "overlong_buffer_fraction": 0.5}
    rollout, _, _ = drawn(checks, ["2", "     2", "5", "   5"], **changes)
    assert rollout.metrics["reward_mean"] == pytest.approx((1 + 0 + 1 + 1 - 2 / 3) / 4)
    assert rollout.metrics["filtered_equal"] == 1
    assert rollout.metrics["zero_variance_groups"] == 0


def test_rewards_are_weighed_and_what_fails_is_counted(checks) -> None:
    rewards = {"format": 0.5, "no_such_module_here:f": 1.0, "boxed": 2.0}
    rollout, _, _ = drawn(checks, ["#### 2", "3", "####5", "5"], rewards=rewards)
    assert rollout.metrics["reward_mean"] == 0.25
    assert rollout.metrics["accuracy"] == 0.75
    assert (rollout.metrics["checks_failed"], rollout.metrics["checks_timed_out"]) == (1, 0)


def test_each_sample_goes_to_one_update(checks) -> None:
    texts = [str(i) for i in range(8)]
    rollout, _, _ = drawn(checks, texts, updates_per_rollout=2, steps=2)
    assert [len(batch["tokens"]) for batch in rollout.batches] == [4, 4]
    answers = [answer for _, answer in by_text(rollout, "weight")]
    assert sorted(answers) == texts
    assert answers != texts


def test_batches_are_as_wide_as_the_smallest_bucket_that_holds_them(checks) -> None:
    for texts, width in ((["2"] * 4, 7), (["2", "2", "55", "2"], 9), (["     5"] * 4, 14)):
        rollout, _, _ = drawn(checks, texts, length_buckets=[9, 7, 2000])
        assert rollout.batches[0]["tokens"].shape == (4, width)
        assert rollout.placed[0]["old"].shape == (4, width - 1)


def test_groups_that_teach_nothing_are_drawn_anew(checks) -> None:
    """DAPO's dynamic sampling: of three draws the first and third bring one group each."""
    draws = [["2", "3", "5", "5"], ["1", "1", "5", "5"], ["2", "2", "5", "4"]]
    rollout, asked, sampler = drawn(checks, *draws, filter_zero_variance_groups=True, max_resample_rounds=5)
    assert not sampler.draws
    assert len({*map(tuple, sampler.keys)}) == len({*asked.draws}) == 3
    assert by_text(rollout, "weight") == dict.fromkeys([("1+1=", "2"), ("1+1=", "3"), ("2+3=", "5"), ("2+3=", "4")], 1)
    assert (rollout.metrics["samples_drawn"], rollout.metrics["filtered_equal"]) == (12, pytest.approx(8 / 12))
    assert rollout.metrics["accuracy"] == pytest.approx(8 / 12)  # of all that were drawn
    again, _, _ = drawn(checks, *draws, filter_zero_variance_groups=True, max_resample_rounds=5)
    for a, b in zip(again.batches, rollout.batches, strict=True):
        assert all((a[name] == b[name]).all() for name in b)


@pytest.mark.parametrize(
    ("second", "weights", "equal", "unused"),
    [(["1", "1", "5", "5"], [0, 0, 1, 1], 6 / 8, 0), (["1", "2", "4", "5"], [1, 1, 1, 1], 2 / 8, 2 / 8)],
)
def test_after_so_many_draws_the_rest_is_left_out_and_what_is_too_much_is_counted(
    checks, second, weights, equal, unused
) -> None:
    draws = [["2", "3", "5", "5"], second]
    rollout, _, _ = drawn(checks, *draws, filter_zero_variance_groups=True, max_resample_rounds=1)
    assert sorted(rollout.batches[0]["weight"].tolist()) == weights
    assert (rollout.metrics["filtered_equal"], rollout.metrics["unused"]) == (equal, unused)


@pytest.mark.parametrize("taken", [0, 1])
def test_a_checkpoint_keeps_what_is_to_come_bit_for_bit(checks, taken) -> None:
    """On another mesh, too; where rewards are still computed, it waits for them."""
    rollout, _, _ = drawn(checks, [str(i) for i in range(8)], finish=taken > 0, updates_per_rollout=2, steps=2)
    if taken:
        rollout.pop_batch()
    found = Rollout.from_json(rollout.to_json(), make_mesh(2, 1, 1))
    assert found.metrics == rollout.metrics
    assert len(found.batches) == len(rollout.batches) == 2 - taken
    for a, b in zip(found.placed, rollout.placed, strict=True):
        assert a.keys() == b.keys()
        for name in b:
            np.testing.assert_array_equal(a[name], b[name])
            assert a[name].dtype == b[name].dtype


def test_routes_are_on_the_devices_for_one_program_and_kept_bit_for_bit(checks, monkeypatch) -> None:
    """Those of a row are its number, and 0 behind its end."""
    plain, scored = Scripted.generate, list[dict[str, jax.Array]]()

    def routed(self, copy, prompts, samples, *others) -> Iterator[Completion]:
        for one in plain(self, copy, prompts, samples, *others):
            length = len(prompts[one.row // samples]) + len(one.tokens)
            yield one._replace(routes=np.full((length, 3, 2), 301 + one.row, np.uint16))

    def score(_, __, ___, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        scored.append(batch)
        return batch["mask"], batch["mask"]

    monkeypatch.setattr(Scripted, "generate", routed)
    monkeypatch.setattr(Scores, "score", score)
    rollout, _, _ = drawn(checks, ["2", "3", "5", "     5"])
    restored = Rollout.from_json(rollout.to_json(), make_mesh(2, 1, 1))
    assert "routes" not in rollout.placed[0].keys() | restored.placed[0].keys()
    for found in (rollout, restored):
        batch, placed = found.pop_batch()
        routes = batch["routes"]
        assert (routes.shape, routes.dtype) == ((4, 14, 6), np.uint16)
        np.testing.assert_array_equal(placed["routes"], routes)
        np.testing.assert_array_equal(scored[0]["routes"], routes)
        for row, length in enumerate((2, 2, 2, 6)):
            ids = [301 + row] * (len(QUESTIONS[0].prompt_tokens) + length)
            assert routes[row].tolist() == [[number] * 6 for number in ids + [0] * (14 - len(ids))]


def test_staleness_counts_the_updates_since_the_policy_that_drew_a_token(checks) -> None:
    rollout, _, _ = drawn(checks, [str(i) for i in range(8)], updates_per_rollout=2, steps=2)
    found = Rollout.from_json(rollout.to_json(), make_mesh(1, 1, 1))
    for batch, restored in zip(rollout.batches, found.batches, strict=True):
        assert staleness(restored, 9) == staleness(batch, 9) == {"staleness_mean": 9.0, "staleness_max": 9.0}
        batch["version"][:, : len(QUESTIONS[0].prompt_tokens)] = 4  # a switch of weights after the first token
        tokens = int(batch["mask"].sum())
        assert staleness(batch, 9) == {"staleness_mean": 9 - 4 * len(batch["mask"]) / tokens, "staleness_max": 9.0}
        assert "version" not in rollout.placed[0]
    assert staleness({name: batch[name] for name in ("tokens", "mask")}, 9) == {}


def test_a_draw_can_be_ended(checks) -> None:
    def end() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        drawn(checks, ["2", "2", "5", "5"], between=end)


def test_worked_responses_are_trained_on_to_their_end() -> None:
    questions = PROMPTING.encode([Problem("1+1=", "2", "2"), Problem("2+3=", "5", "it: 5")])
    batch = programs.supervised_batch(questions, LOOP)
    assert batch["mask"].sum(axis=1).tolist() == [2, 6]
    assert batch["tokens"][1, : len("?2+3=it: 5?")].tolist() == [BOS_ID, *b"2+3=it: 5", EOS_ID]
    assert batch["tokens"][0].tolist() == [BOS_ID, *b"1+1=2", EOS_ID, *[programs.PAD_ID] * 7]
    assert batch["mask"][0].nonzero()[0].tolist() == [4, 5]  # the positions before the response's tokens


def test_the_position_is_what_its_golden_file_says() -> None:
    body = golden("grpo_position")
    progress = Progress("grpo", 3, 2, 5, 0.1, 0.2, {"test_pass_at_1": 0.25})
    assert asdict(progress) == body["position"]
    assert Progress(**body["position"]) == progress
    assert MetricAverages(2, {"loss": 3.0}).to_json() == body["window"]
    assert MetricAverages.from_json(body["window"]).to_json() == body["window"]


def in_groups(raw: dict[str, Any], micro_batch_size: int | None, **loop: Any) -> RunFile:
    """Eight prompts with two responses each; their samples stay together."""
    own = {"updates_per_rollout": 1, "micro_batch_size": micro_batch_size, "kl_coef": 0.1} | loop
    return RunFile.model_validate(raw | {"loop": raw["loop"] | own})


def rollout() -> dict[str, np.ndarray]:
    """Prompts of different lengths, and responses that begin after them."""
    random = np.random.default_rng(0)
    tokens = np.repeat(random.integers(0, 256, (8, 40)), 2, axis=0)
    mask = np.zeros((16, 39), np.float32)
    for row, length in enumerate(random.integers(4, 28, 8).repeat(2)):
        tokens[row, length:] = random.integers(0, 256, 40 - length)
        mask[row, length - 1 : length + random.integers(1, 11)] = 1
    batch = {"tokens": tokens.astype(np.int32), "mask": mask}
    batch |= {name: -np.abs(random.normal(size=(16, 39))).astype(np.float32) for name in TOKEN_FIELDS}
    return batch | {name: random.random(16, np.float32) for name in ROW_FIELDS}


@pytest.mark.parametrize("sizes", [(2, 1, 1), *wide((1, 2, 1))])
def test_groups_computed_in_parts_give_the_update_and_the_scores_of_the_whole(grpo_run, sizes):
    """Eight rows for each device: four groups, or two at a time."""
    mesh, batch, found = make_mesh(*sizes), rollout(), []
    for micro_batch_size in (None, 4):
        experiment = in_groups(grpo_run, micro_batch_size)
        cfg, loop, opt = experiment.decoder, experiment.loop, experiment.optimizer
        assert loop.keeps_groups_together
        with jax.set_mesh(mesh):
            state = train_step.init_state(cfg, opt, mesh, jax.random.key(0))
            placed = shard_batch(batch, mesh)
            given = {name: placed[name] for name in ("tokens", "mask")}
            reference = jax.tree.map(lambda x: x + 0.01, state.params)
            scores = build_logprobs(experiment, loop, mesh)(state.params, reference, given)
            update = build_update(grpo.loss(cfg, loop, grouped=True), experiment, opt, mesh)
            state, metrics = update(state, placed)
        found.append(jax.device_get((scores, state.optimizer, metrics)))
    assert np.abs(found[0][0][1]).sum() > 0, "the reference is scored"
    for whole, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(other, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.deep
def test_a_prompt_is_computed_once_for_its_group_in_each_part(grpo_run):
    def operations(micro_batch_size: int | None) -> float:
        raw = grpo_run | {"model": grpo_run["model"] | {"attention": "plain"}}
        experiment = in_groups(raw, micro_batch_size, group_size=4, prompts_per_step=4)
        return memory.count_flops("update", experiment, make_mesh(1, 1, 1))

    assert operations(4) == pytest.approx(operations(None), rel=0.02)
    assert not in_groups(grpo_run, 1).loop.keeps_groups_together
    assert not in_groups(grpo_run, 4, updates_per_rollout=2).loop.keeps_groups_together
    assert operations(2) > 1.3 * operations(4), "two of four samples are no whole group"
