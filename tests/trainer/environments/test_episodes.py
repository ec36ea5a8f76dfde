"""Episodes: whose tokens are whose, what ends an episode, and what an update learns from it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from conf.formats import RunFileError
from conf.schema.training.data import ArithmeticData
from conf.schema.training.loop import GrpoLoop
from tests.groups import load_group
from trainer.data.prompting import Problem, PromptEncoder, Question
from trainer.environments.episodes import Episodes, NothingFitsError, episode_metrics
from trainer.environments.pool import EnvironmentPool
from trainer.rl.programs import sampler_settings, supervised_batch
from trainer.rl.rollouts import Sample, build_batch
from trainer.sampler import Completion
from trainer.tokenizer.loading import EOS_ID

PROMPTING = PromptEncoder(ArithmeticData(**load_group("data/arithmetic")))
KEY = jax.random.key(0)


class Counting:
    """Counts what it hears; `bye` ends the episode, `fail` fails it."""

    def __init__(self) -> None:
        self.heard = list[str]()

    def reset(self, row: Any) -> str:
        return row.get("opening", "") + str(row.get("seed", "")) * row.get("seeded", 0)

    def step(self, response: str) -> tuple[str, bool]:
        self.heard.append(response)
        if response == "fail":
            raise ValueError(response)
        return f"<{len(self.heard)}>", response == "bye"

    def reward(self) -> float:
        return float("bye" in self.heard)

    def metrics(self) -> dict[str, float]:
        return {"heard": len(self.heard)}


class Chatting:
    """Says messages: the prompt, and an echo between turns. It writes a line to a file when it is closed."""

    def __init__(self, *, file: str) -> None:
        self.file, self.heard = file, list[str]()

    def reset(self, row: Any) -> list[tuple[str, str]]:
        self.prompt = row.get("prompt_messages")
        return [("system", "S"), ("user", row["question"])]

    def step(self, response: str) -> tuple[list[Any], bool]:
        self.heard.append(response)
        return ([("user", response)] if response != "odd" else [("user",)]), response == "bye"

    def reward(self) -> float:
        return float(self.prompt == [["system", "S"], ["user", "p"]])

    def close(self) -> None:
        with Path(self.file).open("a") as stream:
            stream.write(f"{len(self.heard)}\n")


class Scripted:
    """A sampler whose episodes say the given texts, turn after turn, the last row first. A text with `…` has no end."""

    def __init__(self, scripts: Sequence[Sequence[str]], samples: int) -> None:
        self.scripts, self.samples = scripts, samples
        self.prompts, self.numbers, self.keys = list[Any](), list[Any](), list[Any]()

    def generate(
        self, copy: Any, prompts: Any, samples: int, key: jax.Array, heat: float, between: Any, numbers: Any = None
    ) -> Iterator[Completion]:
        self.keys.append(tuple(jax.random.key_data(key).tolist()))
        self.prompts.append([bytes(t for t in prompt if t < 256).decode() for prompt in prompts])
        self.numbers.append(numbers)
        assert samples == (1 if numbers else self.samples)
        for row in reversed(range(len(prompts) * samples)):
            number = numbers[row] if numbers else row
            text = self.scripts[number][len(self.prompts) - 1]
            ended = not text.endswith("…")
            tokens = np.array([*text.removesuffix("…").encode(), *([EOS_ID] if ended else [])], np.int32)
            routes = np.full((len(prompts[row // samples]) + len(tokens), 2, 1), len(self.prompts), np.uint8)
            yield Completion(row, tokens, -1 - np.arange(len(tokens), dtype=np.float32), ended, routes=routes)


def loop(**changes: Any) -> GrpoLoop:
    group = load_group("loop/grpo")
    own = {"name": f"{__name__}:Counting", "max_turns": 3, "workers": 1, "timeout_seconds": 60.0}
    environment = group["environment"] | own | changes.pop("environment", {})
    sizes = {"max_prompt_length": 8, "max_new_tokens": 20, "group_size": 2, "prompts_per_step": 1}
    return GrpoLoop(**group | sizes | {"environment": environment} | changes)


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with EnvironmentPool(loop().environment) as opened:
        yield opened


def questions(*texts: str) -> list[Question]:
    return PROMPTING.encode([Problem(text, "", "") for text in texts])


def play(pool: EnvironmentPool, scripts: Sequence[Sequence[str]], *asked: str, **changes: Any):
    samples = len(scripts) // len(asked)
    sampler = Scripted(scripts, samples)
    episodes = Episodes(loop(**changes), pool, PROMPTING)
    given: Any = sampler
    return episodes.play(given, {}, questions(*asked), samples, KEY, 1.0, lambda: None), sampler


def test_turns_alternate_and_only_the_policys_tokens_are_its_own(pool: EnvironmentPool) -> None:
    played, sampler = play(pool, [["a", "bye"], ["bye"], ["b", "cc", "bye"], ["d", "bye"]], "p", "q")
    assert sampler.prompts == [["p", "q"], ["pa<1>", "qb<1>", "qd<1>"], ["qb<1>cc<2>"]]
    assert sampler.numbers == [None, [0, 2, 3], [2]]
    assert len({*sampler.keys}) == 3
    assert [(e.reward, e.finished, e.failure) for e in played] == [(1, True, "")] * 4
    long = played[2]
    assert long.turns == [
        *(("policy", "b"), ("environment", "<1>"), ("policy", "cc"), ("environment", "<2>"), ("policy", "bye"))
    ]
    assert long.by_model == [1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    assert long.logprobs == [-1, -2, 0, 0, 0, -1, -2, -3, 0, 0, 0, -1, -2, -3, -4]
    found = episode_metrics(played)
    assert (found["turns"], found["environment_tokens"], found["environment_heard"]) == (2, 3, 2)
    assert found["environment_failed"] == 0


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (["a", "b", "c"], "a<1>b<2>c"),  # max_turns
        (["abc…"], "abc"),  # the turn was cut off
        (["a", "bcdefghijklmnop"], "a<1>bcdefghijklmno"),  # the second turn exceeds the budget
        (["abcdefghijklmnopq"], "abcdefghijklmnopq"),  # what it hears would leave no room
    ],
)
def test_a_limit_ends_an_episode_which_is_rewarded_all_the_same(pool, script, text) -> None:
    (episode, other), _ = play(pool, [script, ["bye"]], "p")
    assert (episode.text[:18], episode.finished, episode.reward) == (text[:18], False, 0)
    assert len(episode.tokens) <= 20
    assert episode.metrics == {"heard": len(episode.responses)}
    assert other.finished


def test_messages_are_the_prompt_and_what_the_policy_reads(tmp_path: Path) -> None:
    own = {"name": f"{__name__}:Chatting", "options": {"file": str(tmp_path / "closed")}, "workers": 1}
    with EnvironmentPool(loop(environment=own).environment) as opened:
        episodes = Episodes(loop(), opened, PROMPTING)
        problems = episodes.open([Problem("p", "1", "")], "0")
        assert (tmp_path / "closed").read_text() == "0\n"
        asked = PROMPTING.encode(problems)
        joined = load_group("data/arithmetic")["prompt"]["between"].join(["S", "p"])
        assert asked[0].prompt == joined
        sampler: Any = Scripted([["a", "bye"], ["odd"]], 2)
        played = episodes.play(sampler, {}, asked, 2, KEY, 1.0, lambda: None)
    assert sampler.prompts == [[joined], [f"{joined}aa"]]
    assert played[0].turns == [("policy", "a"), ("environment", "a"), ("policy", "bye")]
    assert (played[0].by_model, played[0].reward) == ([1, 1, 0, 1, 1, 1, 1], 1)
    assert played[1].failure == "error"
    assert played[1].reason == "messages must be pairs of role and text, not [('user',)]"
    assert sorted((tmp_path / "closed").read_text().split()) == ["0", "1", "2"]


def test_a_failure_is_counted_and_where_every_episode_fails_the_run_ends(pool: EnvironmentPool) -> None:
    played, _ = play(pool, [["fail"], ["a", "bye"]], "p")
    assert [(e.reward, e.failure) for e in played] == [(0, "error"), (1, "")]
    found = episode_metrics(played)
    assert (found["environment_failed"], found["environment_error"], found["environment_timeout"]) == (0.5, 0.5, 0)
    message = r"loop\.environment\.name: all 2 episodes failed; the first \(error\): ValueError: fail"
    with pytest.raises(RunFileError, match=message):
        play(pool, [["fail"], ["a", "fail"]], "p")


def test_an_update_learns_from_the_policys_tokens_alone(pool: EnvironmentPool) -> None:
    played, _ = play(pool, [["a", "bye"], ["bye"]], "p")
    batch = build_batch([Sample(e.question, e.completion(i), e.text, e) for i, e in enumerate(played)], loop())
    completion = played[0].completion(4)
    assert (completion.row, completion.tokens.tolist(), completion.finished) == (4, played[0].tokens, True)
    assert completion.logprobs.tolist() == played[0].logprobs
    whole = [*played[0].question.prompt_tokens, *played[0].tokens]
    assert batch["tokens"][0, : len(whole)].tolist() == whole
    assert batch["mask"][0].nonzero()[0].tolist() == [1, 2, 6, 7, 8, 9]
    assert batch["sampler"][0].nonzero()[0].tolist() == [1, 2, 6, 7, 8, 9]
    assert batch["mask"][1].nonzero()[0].tolist() == [1, 2, 3, 4]


def test_each_token_keeps_the_routes_of_the_turn_that_computed_it_first(pool: EnvironmentPool) -> None:
    """The second turn's are of what the environment said and of the reply to it; what was cut off has none."""
    played, _ = play(pool, [["a", "bcdefghijklmnop"], ["bye"]], "p")
    batch = build_batch([Sample(e.question, e.completion(i), e.text, e) for i, e in enumerate(played)], loop())
    prompt = len(played[0].question.prompt_tokens)
    assert batch["routes"].shape == (2, 28, 2)
    for row, turns in enumerate(([1] * (prompt + 2) + [2] * 18, [1] * (prompt + 4))):
        assert len(turns) == prompt + len(played[row].tokens)
        assert batch["routes"][row].tolist() == [[turn] * 2 for turn in turns + [0] * (28 - len(turns))]


def test_a_worked_response_takes_turns_at_the_stop_texts(pool: EnvironmentPool) -> None:
    asked = PROMPTING.encode([Problem("p", "", "a=bye=bye"), Problem("q", "", "bye")])
    own = loop(sampler=load_group("loop/grpo")["sampler"] | {"stop": ["="]})
    worked = Episodes(own, pool, PROMPTING).worked(asked)
    assert [e.text for e in worked] == ["a=<1>bye=<2>bye", "bye"]
    assert worked[0].tokens == [*b"a=<1>bye=<2>bye", EOS_ID]
    assert worked[0].by_model == [1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    batch = supervised_batch(asked, own, worked)
    assert batch["mask"].sum(axis=1).tolist() == [10, 4]
    assert batch["mask"][0].nonzero()[0].tolist() == [i + 1 for i, own in enumerate(worked[0].by_model) if own]


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"max_new_tokens": 16}, True),
        ({"max_new_tokens": 15}, False),  # its end would be cut
        ({"max_new_tokens": 9}, False),  # what the environment says the second time has no room
        ({"environment": {"max_turns": 2}}, False),
    ],
)
def test_a_worked_episode_that_does_not_fit_is_refused_or_counts_for_nothing(
    pool: EnvironmentPool, changes: dict[str, Any], fits: bool
) -> None:
    asked = PROMPTING.encode([Problem("p", "", "a=bye=bye"), Problem("q", "", "bye")])
    changes = changes | {"sampler": load_group("loop/grpo")["sampler"] | {"stop": ["="]}}
    own = loop(**changes)
    if not fits:
        message = r"^loop\.max_new_tokens: 1 of 2 worked responses, .*, as does '.*p'; raise .*max_turns, or set"
        with pytest.raises(RunFileError, match=message):
            Episodes(own, pool, PROMPTING).worked(asked)
        with pytest.raises(NothingFitsError, match=r"2 of 2 worked responses.*max_turns$"):
            Episodes(own.model_copy(update={"filter_overlong_solutions": True}), pool, PROMPTING).worked(asked[:1] * 2)
    own = own.model_copy(update={"filter_overlong_solutions": True})
    worked = Episodes(own, pool, PROMPTING).worked(asked)
    assert [len(episode.tokens) for episode in worked] == [16 if fits else 0, 4]
    assert supervised_batch(asked, own, worked)["mask"].sum(axis=1).tolist() == [10 if fits else 0, 4]


def test_what_reset_says_follows_the_question_and_is_one_for_a_draw(pool: EnvironmentPool) -> None:
    episodes = Episodes(loop(), pool, PROMPTING)
    problems = [Problem("p", "1", "", {"opening": "?", "seeded": 1}), Problem("q", "2", "")]
    first, again, other = (episodes.open(problems, seed) for seed in ("0 rollout 1", "0 rollout 1", "0 rollout 2"))
    assert first == again != other
    row = first[0].row
    assert row is not None
    assert first[0].question == f"p?{row['seed']}"
    assert (row["question"], row["answer"]) == ("p", "1")
    assert first[1].question == "q"


def test_the_sampler_has_room_for_what_was_said_before() -> None:
    settings = sampler_settings(loop(environment={"max_turn_tokens": 5}))
    assert (settings.max_prompt_length, settings.max_new_tokens) == (28, 5)
    assert sampler_settings(loop(environment={"name": None})).max_prompt_length == 8
