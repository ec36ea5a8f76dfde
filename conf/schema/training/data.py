"""Training data: the section `data` of `run.yaml`. Fields have no defaults: values live only in YAML."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from conf.extension import Reference
from conf.schema.base import Strict
from conf.schema.training.prompts import ArithmeticData, CustomQuestions, Gsm8kData, template_columns

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
        if (self.eval_path is None) == (self.eval_fraction == 0):
            raise ValueError("set either eval_path or an eval_fraction above 0")
        return self


class TextData(Corpus):
    """Plain text, UTF-8."""

    kind: Literal["text"]
    packing: Literal["windows", "stream", "documents"] = Field(
        description="windows: random windows of the whole text, in memory, without bos and eos. Others: as for jsonl."
    )
    separator: str | None = Field(min_length=1, description="Text between documents. null: each file is one document.")


class Template(Strict):
    """A prompt and its answer, built from a row's columns: `{name}` inserts a column, `{{` a brace."""

    prompt: str = Field(description="Prompt text. It is not trained on.")
    answer: str = Field(min_length=1, description="Answer text. It is trained on, with data.eos after it.")
    remove: str | None = Field(
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
