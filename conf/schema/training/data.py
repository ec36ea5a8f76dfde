"""Training data: the section `data` of `run.yaml`, and the questions of the GRPO loop with the prompt around them.

Fields have no defaults: values live only in YAML.
"""

import itertools
import random
import re
from string import Formatter
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from conf.reference import Reference
from conf.schema.base import LATER, Separator, Strict, check_breaks

TEX_COMMAND = re.compile(r"\\[A-Za-z]+(?:(?:\[[^\]{}]*\]|\{\{[^{}]*\}\})+|\s*)\{(\w+)\}")
"""A command of TeX whose braces are taken for those of a placeholder."""
ESCAPES = dict(zip("\0\a\b\t\v\f\r\x1b\x85\u2028\u2029", "0abtvfreNLP", strict=True))
"""Characters that YAML makes of a backslash and this letter in double quotes, where a command of TeX may be meant."""
ESCAPED = re.compile(r"[\0-\x08\v\f\x0e-\x1f\x7f\x85\u2028\u2029]|\r(?!\n)|\t(?=ext|imes|frac|heta)")


def template_columns(template: str, key: str = "") -> list[str]:
    """Return the column names in a template, in order. Raises ValueError for an invalid `{…}`, which names the key."""
    names, where = list[str](), f"{key}: " if key else ""
    try:
        parts = [*Formatter().parse(template)]
    except ValueError as error:  # a brace without the other
        raise ValueError(f"{where}{error}; write {{{{ or }}}} for a literal brace") from None
    for _, name, form, conversion in parts:
        if name is None:
            continue
        if not name or form or conversion or set(name) & set(".[]"):
            raise ValueError(f"{where}{{…}} must contain only a column name; write {{{{ for a literal brace")
        names.append(name)
    if found := TEX_COMMAND.search(template):
        before = found[0].removesuffix(f"{{{found[1]}}}")
        right = f"{before}{{{{{{{found[1]}}}}}}} for a command of TeX, double quotes in YAML for a line break"
        raise ValueError(f"{where}{found[0]} would become {before}18; write {right}")
    return names


def _as_written(text: str) -> str:
    """Reject what YAML makes of a single backslash in double quotes."""
    if found := ESCAPED.search(text):
        written = ESCAPES.get(found[0], f"x{ord(found[0]):02x}")
        message = f"YAML has made a control character of \\{written}, before {text[found.end() :][:9]!r}"
        raise ValueError(f"{message}; write \\\\{written} in double quotes, or use single ones")
    return text


Text = Annotated[str, AfterValidator(_as_written)]
"""Text for a model or a pattern of it, as it was written."""
ANSWER_MARK = "#### "
"""Before the answer in a worked response, in the form of GSM8K."""
CALCULATOR_ANNOTATION = re.compile(r"<<.*?>>")


Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""Name of a variable of a chat template."""


class Shot(Strict):
    """A worked example before the question."""

    question: Text = Field(min_length=1, description="Question in the form of the data's questions.")
    answer: Text = Field(min_length=1, description="Worked answer in the form that the policy should use.")


class Prompt(Strict):
    """The prompt around a question, from a file of the group `prompt`."""

    system: Text | None = Field(min_length=1, description="Text before everything else. null: none.")
    question: Text = Field(description="Question text, with {question} as the placeholder.")
    formatter: Reference | None = Field(
        description="module:name of a function from a question to its text, in place of `question`."
    )
    answer: Text = Field(description="Worked answer of a shot or of the warm start, with {answer} as the placeholder.")
    between: Annotated[Text, AfterValidator(check_breaks)] = Field(
        description="Separator of the parts with chat_template=none."
    )
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
    chat_template: Literal["none", "own", "gemma", "llama3", "qwen"] = Field(
        description="Chat format that the model was tuned on. own: the template in the files beside data.tokenizer. "
        "none: plain text, for pretrained weights."
    )
    chat_template_kwargs: Annotated[dict[Variable, bool | int | float | str] | None, LATER] = Field(
        default=None, description="Variables that the model's own template reads, such as {enable_thinking: false}."
    )
    bos: str | None = Field(
        min_length=1, description="Special token before the prompt. null: the template's; none with chat_template=none."
    )
    eos: Annotated[str, Field(min_length=1)] | tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        description="Special token, or a list of them, that ends a response, besides the template's end of turn and "
        "those in the model's generation_config.json and config.json beside the tokenizer. null: none."
    )
    prompt: Prompt

    @property
    def ends(self) -> tuple[str, ...]:
        """The special tokens of `eos`."""
        return (self.eos,) if isinstance(self.eos, str) else self.eos or ()

    @model_validator(mode="after")
    def _can_end(self) -> Self:
        if self.chat_template == "none" and not self.ends:
            raise ValueError(
                "eos: needed with chat_template=none to end a response; set the tokenizer's end token, e.g. <eos>"
            )
        if self.chat_template == "own" and self.bos is not None:
            raise ValueError("bos: the model's own template writes it; set bos to null")
        return self


NAMES = ("Ann", "Bob", "Eve", "Ian", "Joe", "Kim", "Lea", "Max", "Sam", "Tom")
OBJECTS = ("pens", "nuts", "figs", "caps", "eggs", "toys")
HELD_OUT_FRACTION = 0.2


class ArithmeticData(QuestionData):
    """Synthetic word problems with sums and differences."""

    kind: Literal["arithmetic"]
    largest_first: int = Field(ge=2, le=90, description="Largest first number. The smallest is 1.")
    largest_second: int = Field(ge=2, le=9, description="Largest number to add or subtract. The smallest is 1.")

    def question(self, first: int, second: int) -> str:
        """Return a question with these numbers, or the largest that there are: all have names of the same length."""
        return f"Kim has figs: {min(first, self.largest_first)}, gets {min(second, self.largest_second)}. "

    def held_out_pairs(self, seed: int) -> frozenset[tuple[int, int]]:
        """Return the unordered pairs, the smaller number first, that training never combines: every fifth one."""
        ranges = range(1, self.largest_first + 1), range(1, self.largest_second + 1)
        pairs = sorted({(min(p), max(p)) for p in itertools.product(*ranges)})
        chance = random.Random(f"{seed} pairs")  # noqa: S311 - nothing here is secret
        return frozenset(chance.sample(pairs, round(HELD_OUT_FRACTION * len(pairs))))

    def sums(self, seed: int, *, held_out: bool) -> list[tuple[str, int, int]]:
        """Return the sums and differences of pairs that are held out, or of the others."""
        pairs, ranges = self.held_out_pairs(seed), (range(1, self.largest_first + 1), range(1, self.largest_second + 1))
        every = ((x, y) for x, y in itertools.product(*ranges) if ((min(x, y), max(x, y)) in pairs) == held_out)
        found = list(every)
        return [*(("+", x, y) for x, y in found), *(("-", x, y) for x, y in found if x >= y)]

    def num_held_out(self, seed: int) -> int:
        """Return how many held-out questions there are."""
        return len(self.sums(seed, held_out=True)) * len(NAMES) * len(OBJECTS)


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
    question_template: Text | None = Field(
        min_length=1,
        description="Question built from a row's columns: `{name}` inserts a column, `{{` a brace. null: use "
        "question_column.",
    )
    answer_column: str = Field(min_length=1, description="Column with the correct answer, text or a number.")
    answer_mark: Text | None = Field(
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

    def split_answer(self, text: str) -> tuple[str, str]:
        """Return the worked response and the answer in a text of `answer_column`; both empty if it lacks the mark."""
        if self.answer_mark is None:
            return f"{ANSWER_MARK}{text.strip()}", text.strip()
        worked, mark, answer = CALCULATOR_ANNOTATION.sub("", text).rpartition(self.answer_mark)
        return (f"{worked}{ANSWER_MARK}{answer.strip()}", answer.strip()) if mark else ("", "")


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


PATH_HELP = "Local path, gs://… or assets://NAME/FILE. * and ** match many files, which are read in sorted order."


class Corpus(Strict):
    """Keys shared by all kinds of text for language modeling, which is read as documents."""

    path: str = Field(min_length=1, description=PATH_HELP)
    eval_path: str | None = Field(min_length=1, description="Validation files, as in `path`. null: use eval_fraction.")
    eval_fraction: float = Field(ge=0, lt=1, description="Share of `path` held out for validation. 0: use eval_path.")
    tokenizer: str = Field(min_length=1, description="bytes, characters (of a small text), or a tokenizer.json.")
    bos: str | None = Field(min_length=1, description="Special token before each document, e.g. <bos>. null: none.")
    eos: str | None = Field(min_length=1, description="Special token after each document. null: none.")
    long_documents: Literal["split", "skip", "error"] = Field(
        description="What to do with documents longer than loop.seq_len, with packing: documents."
    )
    streams: int = Field(
        ge=1, le=65536, description="Parts of the data that are read independently. Must divide the rows of a batch."
    )
    shuffle: bool = Field(description="Shuffle each epoch, seeded by run.seed. false: keep the order of the files.")
    on_bad_line: Literal["error", "skip"] = Field(
        description="error: a line, row or document that cannot be read ends the run. skip: it is left out and counted."
    )
    prefetch_batches: int = Field(ge=0, le=1024, description="Batches that a thread prepares ahead. 0: none.")

    @model_validator(mode="after")
    def _one_validation(self) -> Self:
        if self.eval_path is None and self.eval_fraction == 0:
            raise ValueError("nothing is held out; set eval_path, or an eval_fraction above 0")
        if self.eval_path is not None and self.eval_fraction > 0:
            both = f"eval_path and eval_fraction={self.eval_fraction} are both set"
            raise ValueError(f"{both}; add data.eval_fraction=0 for the files, or data.eval_path=null")
        return self


class TextData(Corpus):
    """Plain text, UTF-8."""

    kind: Literal["text"]
    packing: Literal["windows", "stream", "documents"] = Field(
        description="windows: random windows of the whole text, in memory, without bos and eos. Others: as for jsonl."
    )
    separator: Separator | None = Field(
        min_length=1, description="Text between documents. null: each file is one document."
    )


class Template(Strict):
    """A prompt and its answer, built from a row's columns: `{name}` inserts a column, `{{` a brace."""

    prompt: Text = Field(description="Prompt text. It is not trained on.")
    answer: Text = Field(min_length=1, description="Answer text. It is trained on, with data.eos after it.")
    remove: Text | None = Field(
        description="Regular expression of text to remove from both, e.g. <<.*?>>. null: nothing."
    )

    @field_validator("prompt", "answer")
    @classmethod
    def _names_only(cls, template: str) -> str:
        template_columns(template)
        return template

    @field_validator("remove")
    @classmethod
    def _valid_regex(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"not a valid regular expression: {error}") from None
        return pattern


class TableData(Corpus):
    """Rows with named columns: one holds the text, or a template builds a prompt and an answer from several."""

    packing: Literal["stream", "documents"] = Field(
        description="stream: documents follow each other and rows may cut them. documents: rows hold whole documents, "
        "which do not attend to each other."
    )
    text_column: str | None = Field(min_length=1, description="Column with the text. null: use template.")
    template: Template | None

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns to read."""
        if self.template is None:
            return (self.text_column or "",)
        return tuple(dict.fromkeys(template_columns(self.template.prompt) + template_columns(self.template.answer)))

    @property
    def columns_of_prompt(self) -> tuple[str, ...]:
        """Columns of which a prompt is built; none without a template."""
        return () if self.template is None else tuple(dict.fromkeys(template_columns(self.template.prompt)))

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if (self.text_column is None) == (self.template is None):
            raise ValueError("set either text_column or template (a prompt and its answer)")
        if self.template is not None and self.eos is None:
            raise ValueError("eos: needed with template; without an end token the model never learns to stop")
        return self


class JsonlData(TableData):
    """JSON Lines: one JSON object per line."""

    kind: Literal["jsonl"]


class ParquetData(TableData):
    """Parquet files, read one row group at a time."""

    kind: Literal["parquet"]


class CustomDocuments(Corpus):
    """Texts from a function of the user's own (docs/extend.md)."""

    kind: Literal["documents"]
    source: Reference = Field(description="module:name of a function from a path to a sequence of texts.")
    options: dict[str, Any] = Field(description="Keyword arguments of the function.")
    packing: Literal["stream", "documents"] = Field(description="As for jsonl.")


class PuzzleData(Strict):
    """Puzzles, as `python -m trainer.puzzles` writes them."""

    kind: Literal["puzzles"]
    path: str = Field(min_length=1, description="Folder with puzzles.json: local, gs://… or assets://NAME.")


Data = Annotated[
    TextData | JsonlData | ParquetData | CustomDocuments | PuzzleData | ArithmeticData | Gsm8kData | CustomQuestions,
    Field(discriminator="kind"),
]
