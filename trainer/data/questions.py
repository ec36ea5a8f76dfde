"""The questions of an experiment, by `data.kind`, as tokens; arithmetic ones are made here."""

import random
from collections.abc import Callable

from conf.formats import RunFileError
from conf.schema.training.data import NAMES, OBJECTS, ArithmeticData, CustomQuestions, Gsm8kData, QuestionData, RowData
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.refusals import NO_PAIRS
from conf.schema.training.run_yaml import RunFile
from trainer.data.gsm8k import PHASES, RowProblems, encode_rejected, fitting_solutions
from trainer.data.prompting import Draw, Problem, ProblemSource, PromptEncoder, Question

VERBS = {"+": "gets", "-": "uses"}
ROLLOUTS_FROM = 1_000_000_000
"""Rollouts have other problems than updates of the warm start with the same number."""


class ArithmeticProblems:
    """Problems of one seed, with operands up to those in `data`; see `data.prompting.ProblemSource`.

    They are sums and differences; the worked response counts its way to the answer.

        Kim has figs: 7, gets 2.  ->  +2:07+1:08+0:09

    Every fifth operand pair is held out: training never combines its two numbers, in any order, under any operator.
    asked: the sums and differences of each phase.
    """

    def __init__(self, data: ArithmeticData, seed: int) -> None:
        self._seed, self._held_out = seed, data.sums(seed, held_out=True)
        self.held_out_pairs = data.held_out_pairs(seed)
        self.asked: dict[str, list[tuple[str, int, int]]] = dict.fromkeys(PHASES, data.sums(seed, held_out=False))

    def train(self, draw: Draw, count: int) -> list[Problem]:
        if draw.phase == "warm_start":
            step = -draw.attempt * ROLLOUTS_FROM - draw.number if draw.attempt else draw.number
        else:
            step = (draw.attempt + 1) * ROLLOUTS_FROM + draw.number
        chance = random.Random(f"{self._seed} train {step}")  # noqa: S311 - nothing here is secret
        return [
            _problem(*chance.choice(self.asked[draw.phase]), chance.choice(NAMES), chance.choice(OBJECTS))
            for _ in range(count)
        ]

    def validation(self, count: int) -> list[Problem]:
        """Return problems of `test`, some of which it may repeat."""
        return self.test(count)

    def test(self, count: int | None) -> list[Problem]:
        """Return distinct held-out problems. Raises RunFileError if there are too few."""
        every = [_problem(*sum_, n, t) for sum_ in self._held_out for n in NAMES for t in OBJECTS]
        count = len(every) if count is None else count
        if count > len(every):
            raise RunFileError(f"loop.eval_prompts: only {len(every)} held-out prompts exist, not {count}")
        return random.Random(f"{self._seed} held out").sample(every, count)  # noqa: S311


def _problem(operator: str, first: int, second: int, name: str, thing: str) -> Problem:
    sign = 1 if operator == "+" else -1
    steps = [f"{operator}{second - i}:{first + sign * i:02}" for i in range(second + 1)]
    question = f"{name} has {thing}: {first}, {VERBS[operator]} {second}. "
    return Problem(question, str(first + sign * second), "".join(steps))


class QuestionSet:
    """A source of problems with the encoder for their prompts.

    open: prepares problems for a draw, which the second argument tells from others; an environment replaces it.
    left_out: how many rows are not used, by the reason's name in `summary.json`; bad_lines: why each row that cannot be
    used was skipped.
    """

    def __init__(self, data: QuestionData, loop: GrpoLoop, seed: int) -> None:
        """Raise RunFileError if the tokenizer or the files cannot be used."""
        self.prompt_encoder = PromptEncoder(data)
        self.open: Callable[[list[Problem], str], list[Problem]] = lambda problems, seed: problems
        self._seed, self._max_prompt_length, self.bad_lines = seed, loop.max_prompt_length, list[str]()
        if isinstance(data, RowData):
            rows = RowProblems(data, loop, seed, self.prompt_encoder)
            self._problems, self.bad_lines = rows, rows.bad_lines
            too_long, overlong = rows.num_too_long, rows.num_overlong_solutions
        else:
            assert isinstance(data, ArithmeticData)
            if loop.loss_type == "dpo":
                raise RunFileError(f"loop.loss_type: {NO_PAIRS}")
            self._problems: ProblemSource = ArithmeticProblems(data, seed)
            too_long, overlong = 0, self._limit_solutions(self._problems, loop)
        counts = {"questions_left_out": too_long, "solutions_left_out": overlong, "bad_lines": len(self.bad_lines)}
        self.left_out = {name: count for name, count in counts.items() if count}

    def train(self, draw: Draw, count: int) -> list[Question]:
        """Return training questions, see `ProblemSource.train`."""
        return self._encode(self._problems.train(draw, count), f"{draw.phase} {draw.number} {draw.attempt}")

    def validation(self, count: int) -> list[Question]:
        """Return the questions of evaluations during training, see `ProblemSource.validation`."""
        return self._encode(self._problems.validation(count), "validation")

    def test(self, count: int | None) -> list[Question]:
        """Return the test's questions, see `ProblemSource.test`."""
        return self._encode(self._problems.test(count), "test")

    def rejected(self, questions: list[Question]) -> list[Question]:
        """Return the questions with the response of their column `rejected`."""
        others = encode_rejected(self.prompt_encoder, [question.row for question in questions])
        return [
            question._replace(solution_tokens=other.solution_tokens)
            for question, other in zip(questions, others, strict=True)
        ]

    def _limit_solutions(self, made: ArithmeticProblems, loop: GrpoLoop) -> int:
        """Leave out problems whose worked responses do not fit where these are trained on; return their number."""
        every = made.asked["rollout"]
        if not loop.solution_phases:
            return 0
        encoded = self.prompt_encoder.encode([_problem(*each, NAMES[0], OBJECTS[0]) for each in every])
        lengths = [len(question.solution_tokens) for question in encoded]
        fitting = fitting_solutions(loop, lengths, lambda i: f"of {every[i][1]} {every[i][0]} {every[i][2]}")
        for phase in loop.solution_phases:
            made.asked[phase] = [every[i] for i in fitting]
        return len(every) - len(fitting)

    def _encode(self, problems: list[Problem], draw: str) -> list[Question]:
        questions = self.prompt_encoder.encode(self.open(problems, f"{self._seed} {draw}"))
        longest = max(len(question.prompt_tokens) for question in questions)
        if longest > self._max_prompt_length:
            raise RunFileError(
                f"loop.max_prompt_length: a prompt has {longest} tokens, more than {self._max_prompt_length}; raise it"
            )
        return questions


def load_questions(experiment: RunFile, loop: GrpoLoop) -> QuestionSet:
    """Return the experiment's questions. Raises RunFileError if it has none, or its files are invalid."""
    data = experiment.data
    if not isinstance(data, ArithmeticData | Gsm8kData | CustomQuestions):
        choices = "arithmetic, gsm8k or questions"
        raise RunFileError(f"data.kind: the grpo loop requires questions, not {data.kind}; set {choices}")
    return QuestionSet(data, loop, experiment.seed)
