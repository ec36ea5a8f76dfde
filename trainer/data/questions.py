"""The questions of an experiment, by `data.kind`, as tokens."""

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.prompts import ArithmeticData, CustomQuestions, Gsm8kData, QuestionData
from conf.schema.training.run_yaml import RunFile, RunFileError
from trainer.data.arithmetic import ArithmeticProblems
from trainer.data.gsm8k import RowProblems
from trainer.data.problem import Problem, ProblemSource, Question
from trainer.data.prompting import PromptEncoder


class QuestionSet:
    """A source of problems with the encoder for their prompts.

    too_long: number of problems left out because their prompts exceed `loop.max_prompt_length`.
    """

    def __init__(self, data: QuestionData, loop: GrpoLoop, seed: int) -> None:
        """Raise RunFileError if the tokenizer or the files cannot be used."""
        self.prompt_encoder = PromptEncoder(data)
        self._max_prompt_length, self.num_too_long = loop.max_prompt_length, 0
        if isinstance(data, Gsm8kData | CustomQuestions):
            rows = RowProblems(data, seed, self._fitting_problems)
            self._problems, self.num_too_long = rows, rows.num_too_long
        else:
            assert isinstance(data, ArithmeticData)
            self._problems: ProblemSource = ArithmeticProblems(data, seed)

    def train(self, step: int, count: int) -> list[Question]:
        """Return a training step's questions, see `ProblemSource.train`."""
        return self._drop_too_long(self.prompt_encoder.encode(self._problems.train(step, count)))

    def held_out(self, count: int | None) -> list[Question]:
        """Return the evaluation questions, see `ProblemSource.held_out`."""
        return self._drop_too_long(self.prompt_encoder.encode(self._problems.held_out(count)))

    def _fitting_problems(self, problems: list[Problem]) -> list[Problem]:
        asked = self.prompt_encoder.encode(problems)
        return [
            p
            for p, question in zip(problems, asked, strict=True)
            if len(question.prompt_tokens) <= self._max_prompt_length
        ]

    def _drop_too_long(self, questions: list[Question]) -> list[Question]:
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
