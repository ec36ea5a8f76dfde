"""Questions of the GRPO loop, whose answers can be checked, and the prompt around them."""

from string import Formatter
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from conf.extension import Reference
from conf.schema.base import Strict


def template_columns(template: str, key: str = "") -> list[str]:
    """Return the column names in a template, in order. Raises ValueError for an invalid `{…}`, which names the key."""
    names: list[str] = []
    for _, name, form, conversion in Formatter().parse(template):
        if name is None:
            continue
        if not name or form or conversion or set(name) & set(".[]"):
            where = f"{key}: " if key else ""
            raise ValueError(f"{where}{{…}} must contain only a column name; write {{{{ for a literal brace")
        names.append(name)
    return names


class Shot(Strict):
    """A worked example before the question."""

    question: str = Field(min_length=1, description="Question in the form of the data's questions.")
    answer: str = Field(min_length=1, description="Worked answer in the form that the policy should use.")


class Prompt(Strict):
    """The prompt around a question, from a file of the group `prompt`."""

    system: str | None = Field(min_length=1, description="Text before everything else. null: none.")
    question: str = Field(description="Question text, with {question} as the placeholder.")
    formatter: Reference | None = Field(
        description="module:name of a function from a question to its text, in place of `question`."
    )
    answer: str = Field(description="Worked answer of a shot or of the warm start, with {answer} as the placeholder.")
    between: str = Field(description="Separator of the parts with chat_template=none.")
    shots: tuple[Shot, ...] = Field(max_length=64, description="Worked examples before the question, in order.")

    @model_validator(mode="after")
    def _each_names_its_own(self) -> Self:
        for name in ("question", "answer"):
            if template_columns(getattr(self, name), name) != [name]:
                raise ValueError(
                    f"{name} must contain {{{name}}} once and no other placeholder; write {{{{ for a literal brace"
                )
        return self


class QuestionData(Strict):
    """Keys shared by all kinds of questions: how text becomes tokens."""

    tokenizer: str = Field(min_length=1, description="bytes, or a tokenizer.json: gs://…, assets://NAME/FILE, a path.")
    chat_template: Literal["none", "gemma", "llama3", "qwen"] = Field(
        description="Chat format that the model was tuned on. none: plain text, for pretrained weights."
    )
    bos: str | None = Field(
        min_length=1, description="Special token before the prompt. null: the template's; none with chat_template=none."
    )
    eos: str | None = Field(
        min_length=1, description="Special token that ends a response, besides the template's end of turn. null: none."
    )
    prompt: Prompt

    @model_validator(mode="after")
    def _can_end(self) -> Self:
        if self.chat_template == "none" and self.eos is None:
            raise ValueError(
                "eos: needed with chat_template=none to end a response; set the tokenizer's end token, e.g. <eos>"
            )
        return self


class ArithmeticData(QuestionData):
    """Synthetic word problems with sums and differences."""

    kind: Literal["arithmetic"]
    largest_first: int = Field(ge=2, le=90, description="Largest first number. The smallest is 1.")
    largest_second: int = Field(ge=2, le=9, description="Largest number to add or subtract. The smallest is 1.")


class RowData(QuestionData):
    """Keys shared by questions in rows."""

    path: str = Field(min_length=1, description="Training rows: a local path or pattern, gs://… or assets://NAME/FILE.")
    eval_path: str = Field(min_length=1, description="Rows of the test set, for the tests before and after training.")
    validation_path: str | None = Field(
        min_length=1,
        description="Rows for the evaluations during training, which choose the best checkpoint. null: "
        "loop.eval_prompts rows of `path`, the same for every seed, which training leaves out.",
    )
    on_bad_line: Literal["error", "skip"] = Field(
        description="error: a row that cannot be used ends the run. skip: it is left out and counted."
    )


class Gsm8kData(RowData):
    """JSON Lines or Parquet (*.parquet) with a question and an answer, by default in the columns of GSM8K."""

    kind: Literal["gsm8k"]
    question_column: str | None = Field(
        min_length=1, description="Column with the question. null: use question_template."
    )
    question_template: str | None = Field(
        min_length=1,
        description="Question built from a row's columns: `{name}` inserts a column, `{{` a brace. null: use "
        "question_column.",
    )
    answer_column: str = Field(min_length=1, description="Column with the correct answer, text or a number.")
    answer_mark: str | None = Field(
        min_length=1,
        description="The correct answer follows this text, and the worked solution is before it, as "
        "`#### ` in GSM8K. null: the whole column is the answer.",
    )
    solution_column: str | None = Field(
        min_length=1,
        description="Column with a worked solution, for the warm start. null: that of answer_column, or `#### ANSWER`.",
    )

    @model_validator(mode="after")
    def _one_question(self) -> Self:
        if (self.question_column is None) == (self.question_template is None):
            raise ValueError("set either question_column or question_template")
        if not self.question_columns:
            raise ValueError("question_template: must contain a column, such as {question}")
        return self

    @property
    def question_columns(self) -> tuple[str, ...]:
        """Columns that the question is made from."""
        if self.question_template is None:
            return (self.question_column or "",)
        return tuple(dict.fromkeys(template_columns(self.question_template, "question_template")))

    @property
    def columns(self) -> dict[str, str]:
        """Columns that every row must have, with the config key that names each."""
        key = "data.question_column" if self.question_template is None else "data.question_template"
        named = {**dict.fromkeys(self.question_columns, key), self.answer_column: "data.answer_column"}
        return named if self.solution_column is None else {**named, self.solution_column: "data.solution_column"}


class CustomQuestions(RowData):
    """Questions from a function of the user's own (docs/extend.md)."""

    kind: Literal["questions"]
    source: Reference = Field(description="module:name of a function from a path to rows of question and answer.")
    options: dict[str, Any] = Field(description="Keyword arguments of the function.")
    path: str = Field(min_length=1, description="Given to the function for the training questions.")
    eval_path: str = Field(min_length=1, description="Given to the function for the test's questions.")
    validation_path: str | None = Field(
        min_length=1,
        description="Given to the function for the questions of evaluations during training. null: loop.eval_prompts "
        "of the training questions, which training leaves out.",
    )
