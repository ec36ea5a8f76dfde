"""The questions of an experiment, by `data.kind`, as tokens."""

from collections.abc import Callable

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.prompts import ArithmeticData, CustomQuestions, Gsm8kData, QuestionData, RowData
from conf.schema.training.run_yaml import RunFile, RunFileError
from trainer.data.arithmetic import ArithmeticProblems
from trainer.data.gsm8k import RowProblems
from trainer.data.problem import Draw, Problem, ProblemSource, Question
from trainer.data.prompting import PromptEncoder


class QuestionSet:
    """A source of problems with the encoder for their prompts.

    open: prepares problems for a draw, which the second argument tells from others; an environment replaces it.
    num_too_long: problems left out because their prompts exceed `loop.max_prompt_length`; bad_lines: why each row that
    cannot be used was skipped.
    """

    def __init__(self, data: QuestionData, loop: GrpoLoop, seed: int) -> None:
        """Raise RunFileError if the tokenizer or the files cannot be used."""
        self.prompt_encoder = PromptEncoder(data)
        self.open: Callable[[list[Problem], str], list[Problem]] = lambda problems, seed: problems
        self._seed = seed
        self._max_prompt_length, self.num_too_long, self.bad_lines = loop.max_prompt_length, 0, list[str]()
        if isinstance(data, RowData):
            rows = RowProblems(data, seed, loop.eval_prompts, self._fitting_problems)
            self._problems, self.num_too_long, self.bad_lines = rows, rows.num_too_long, rows.bad_lines
        else:
            assert isinstance(data, ArithmeticData)
            self._problems: ProblemSource = ArithmeticProblems(data, seed)

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
        """Return the questions with the response of their column `rejected`. Raises RunFileError if one has none."""
        responses = [(question.row or {}).get("rejected") for question in questions]
        if not all(isinstance(response, str) for response in responses):
            columns = ", ".join(map(repr, questions[0].row or ())) or "none"
            raise RunFileError(f"loop.loss_type: dpo reads a text from the column 'rejected'; columns: {columns}")
        tokens = self.prompt_encoder.encode([Problem("", "", str(response)) for response in responses])
        return [
            question._replace(solution_tokens=other.solution_tokens)
            for question, other in zip(questions, tokens, strict=True)
        ]

    def _fitting_problems(self, problems: list[Problem]) -> list[Problem]:
        lengths = [len(question.prompt_tokens) for question in self.prompt_encoder.encode(problems)]
        return [p for p, length in zip(problems, lengths, strict=True) if length <= self._max_prompt_length]

    def _encode(self, problems: list[Problem], draw: str) -> list[Question]:
        questions = self.prompt_encoder.encode(self.open(problems, f"{self._seed} {draw}"))
        longest = max(len(question.prompt_tokens) for question in questions)
        if longest > self._max_prompt_length:
            raise RunFileError(
                f"loop.max_prompt_length: a prompt has {longest} tokens, more than {self._max_prompt_length}"
            )
        return questions


def load_questions(experiment: RunFile, loop: GrpoLoop) -> QuestionSet:
    """Return the experiment's questions. Raises RunFileError if it has none, or its files are invalid."""
    data = experiment.data
    if not isinstance(data, ArithmeticData | Gsm8kData | CustomQuestions):
        choices = "arithmetic, gsm8k or questions"
        raise RunFileError(f"data.kind: the grpo loop requires questions, not {data.kind}; set {choices}")
    return QuestionSet(data, loop, experiment.seed)
