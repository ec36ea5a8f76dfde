"""Episodes: the policy and the environment take turns, all episodes of a draw at the same time.

An episode is a function of (seed, number of the draw, row, policy): the tokens of a turn are drawn with the number of
the episode and of the turn, whichever other episodes still go on. All processes make the same calls; each asks the
environment for its share of the episodes, and they exchange the answers after every turn.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from conf.formats import RunFileError
from conf.schema.training.loop import GrpoLoop
from trainer.data.prompting import Problem, PromptEncoder, Question
from trainer.environments.pool import CAUSES, EnvironmentPool, Step
from trainer.models.weights import Params
from trainer.sampler import Completion, Sampler


class NothingFitsError(RunFileError):
    """None of a draw's worked responses may be trained on; those of another draw may."""


@dataclass
class Episode:
    """One episode.

    tokens: all after the prompt; by_model: 1 for those that the policy wrote; logprobs: of these, 0 for others; turns:
    (who, text); finished: False if a limit ended it; failure: see `pool.CAUSES`; routes: as of `Completion`, of each
    token's first computation.
    """

    question: Question
    tokens: list[int] = field(default_factory=list)
    by_model: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[tuple[str, str]] = field(default_factory=list)
    finished: bool = False
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    reason: str = ""
    routes: np.ndarray | None = None

    @property
    def responses(self) -> list[str]:
        """What the policy wrote, a text per turn."""
        return [text for who, text in self.turns if who == "policy"]

    @property
    def text(self) -> str:
        """Everything after the prompt."""
        return "".join(text for _, text in self.turns)

    def append(self, who: str, text: str, tokens: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        """Add a turn. logprobs: of the policy's tokens."""
        self.turns.append((who, text))
        self.tokens += tokens
        self.by_model += [int(who == "policy")] * len(tokens)
        self.logprobs += logprobs or [0.0] * len(tokens)

    def completion(self, row: int) -> Completion:
        """Return it as a response of the sampler's."""
        arrays = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
        return Completion(row, *arrays, self.finished, routes=self.routes)


class Episodes:
    """Plays episodes in the environments of a pool."""

    def __init__(self, loop: GrpoLoop, pool: EnvironmentPool, prompting: PromptEncoder) -> None:
        self._pool, self._encoder = pool, prompting
        self._max_turns, self._max_tokens = loop.environment.max_turns, loop.max_new_tokens
        self._leaves_out = loop.filter_overlong_solutions
        self._stops = re.compile("|".join(f"(?<={re.escape(stop)})" for stop in loop.sampler.stop) or "(?!)")

    def play(
        self,
        sampler: Sampler,
        copy: Params,
        questions: Sequence[Question],
        samples: int,
        key: jax.Array,
        temperature: float,
        between: Callable[[], None],
    ) -> list[Episode]:
        """Return `samples` episodes for each question; arguments as of `Sampler.generate`.

        Raises RunFileError if every episode failed.
        """
        episodes = [Episode(question) for question in questions for _ in range(samples)]
        live, draw = [*range(len(episodes))], self._pool.new_draw()
        for turn in range(self._max_turns):
            if not live:
                break
            prompts = [[*episodes[i].question.prompt_tokens, *episodes[i].tokens] for i in live]
            if turn == 0:  # the samples of a question share its prompt
                drawn = sampler.generate(copy, prompts[::samples], samples, key, temperature, between)
            else:
                keys = jax.random.fold_in(key, turn)
                drawn = sampler.generate(copy, prompts, 1, keys, temperature, between, numbers=live)
            waiting = dict[int, Future[Step]]()
            for completion in drawn:
                number = live[completion.row]
                goes_on = self._add_response(episodes[number], completion) and turn + 1 < self._max_turns
                if number % jax.process_count() == jax.process_index():
                    waiting[number] = self._submit(draw, number, episodes[number], final=not goes_on)
            live = self._take_steps(draw, episodes, waiting)
        if all(episode.failure for episode in episodes):
            first = episodes[0]
            told = f"all {len(episodes)} episodes failed; the first ({first.failure}): {first.reason}"
            raise RunFileError(f"loop.environment.name: {told}")
        return episodes

    def worked(self, questions: Sequence[Question]) -> list[Episode]:
        """Return episodes with the worked responses, whose turns end at the texts of `loop.sampler.stop`.

        One that the limits of turns and tokens would cut is empty. Raises RunFileError if it may not be left out, and
        NothingFitsError if it may, and all are.
        """
        episodes, draw = [Episode(question) for question in questions], self._pool.new_draw()
        end = self._encoder.stop_tokens[0]
        texts = [self._stops.split(self._encoder.decode(question.solution_tokens)) for question in questions]
        turns = [[text for text in parts if text] or [""] for parts in texts]
        live = [*range(len(episodes))]
        for turn in range(self._max_turns):
            waiting, live = dict[int, Future[Step]](), [i for i in live if turn < len(turns[i])]
            for number in live:
                text, is_last = turns[number][turn], turn + 1 == len(turns[number])
                tokens = [*self._encoder.encode_text(text), *([end] if is_last else [])]
                episodes[number].append("policy", text, tokens)
                if number % jax.process_count() == jax.process_index():
                    waiting[number] = self._submit(draw, number, episodes[number], final=is_last)
            live = self._take_steps(draw, episodes, waiting)
        cut = [
            number
            for number, (episode, parts) in enumerate(zip(episodes, turns, strict=True))
            if len(episode.tokens) > self._max_tokens or (not episode.finished and len(episode.responses) < len(parts))
        ]
        if cut and not (self._leaves_out and len(cut) < len(episodes)):
            told = f"{len(cut)} of {len(episodes)} worked responses, with what the environment says, take more than "
            told += f"{self._max_tokens} tokens or {self._max_turns} turns, as does {questions[cut[0]].prompt!r:.80}"
            told = f"loop.max_new_tokens: {told}; raise it or loop.environment.max_turns"
            if self._leaves_out:
                raise NothingFitsError(told)
            raise RunFileError(f"{told}, or set loop.filter_overlong_solutions=true")
        for number in cut:
            episodes[number] = Episode(questions[number])
        return episodes

    def open(self, problems: Sequence[Problem], seed: str) -> list[Problem]:
        """Return the problems with what `reset` says after the question, and the rows that environments see.

        seed: tells draws apart. An environment that fails here fails again in each episode, where it is counted.
        """
        draw, waiting, rows = self._pool.new_draw(), dict[int, Future[Step]](), list[dict[str, Any]]()
        for number, problem in enumerate(problems):
            own = int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4])
            rows.append({"question": problem.question, "answer": problem.answer, **(problem.row or {}), "seed": own})
            if number % jax.process_count() == jax.process_index():
                waiting[number] = self._pool.submit(draw, number, rows[-1], [], final=False)
        steps = self._pool.gather(waiting)
        opened = list[Problem]()
        for number, problem in enumerate(problems):
            text, messages, row = steps[number].text, steps[number].messages, rows[number]
            if messages is None:
                opened.append(problem._replace(question=problem.question + text, row=row))
            else:
                opened.append(problem._replace(messages=messages, row=row | {"prompt_messages": messages}))
        return opened

    def _add_response(self, episode: Episode, drawn: Completion) -> bool:
        """Append a response within the token budget; return whether the policy ended it."""
        room = self._max_tokens - len(episode.tokens)
        tokens, logprobs = drawn.tokens[:room].tolist(), drawn.logprobs[:room].tolist()
        episode.append("policy", self._encoder.decode(tokens), tokens, logprobs)
        if (routes := drawn.routes) is not None:
            earlier = routes[:0] if episode.routes is None else episode.routes
            length = len(episode.question.prompt_tokens) + len(episode.tokens)
            episode.routes = np.concatenate([earlier, routes[len(earlier) : length]])
        return drawn.finished and len(drawn.tokens) <= room

    def _submit(self, draw: str, number: int, episode: Episode, *, final: bool) -> Future[Step]:
        return self._pool.submit(draw, number, episode.question.row or {}, episode.responses, final=final)

    def _take_steps(self, draw: str, episodes: Sequence[Episode], waiting: Mapping[int, Future[Step]]) -> list[int]:
        """Apply what the environment says; return the episodes that go on, in order."""
        going, unfinished = list[int](), list[int]()
        for number, step in sorted(self._pool.gather(waiting).items()):
            episode = episodes[number]
            if step.failure or step.reward is not None:
                _end(episode, step)
                continue
            tokens = self._encoder.encode_observation(step.text, episode.tokens[-1], step.messages)
            if len(episode.tokens) + len(tokens) < self._max_tokens:
                episode.append("environment", step.text, tokens)
                going.append(number)
            else:
                unfinished.append(number)
        mine = {n: self._submit(draw, n, episodes[n], final=True) for n in unfinished if n in waiting}
        for number, step in self._pool.gather(mine).items():
            _end(episodes[number], step)
        return going


def _end(episode: Episode, step: Step) -> None:
    episode.finished, episode.reward = step.done or bool(step.failure), step.reward or 0.0
    episode.metrics, episode.failure, episode.reason = step.metrics, step.failure, step.reason


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return means over episodes: turns, tokens of the environment, shares of failures, and the environment's own."""
    if not episodes:
        return {}
    count = len(episodes)
    found = {
        "turns": sum(len(episode.responses) for episode in episodes) / count,
        "environment_tokens": sum(len(e.tokens) - sum(e.by_model) for e in episodes) / count,
        "environment_failed": sum(bool(episode.failure) for episode in episodes) / count,
    }
    found |= {f"environment_{cause}": sum(e.failure == cause for e in episodes) / count for cause in CAUSES}
    for name in sorted({name for episode in episodes for name in episode.metrics}):
        values = [episode.metrics[name] for episode in episodes if name in episode.metrics]
        found[f"environment_{name}"] = sum(values) / len(values)
    return found
