"""What a loop trains on: the section `data` of `run.yaml`. Values live in YAML only, so no field has a default."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from conf.schema.base import Strict
from conf.schema.training.prompts import ArithmeticData, Gsm8kData, template_columns

PATH_HELP = (
    "a local path, gs://…, or assets://NAME/FILE; * and ** stand for many files, which are taken in sorted order"
)


class Corpus(Strict):
    """What every kind of text to learn by heart has in common; it is read as documents."""

    path: str = Field(min_length=1, description=PATH_HELP)
    eval_path: str | None = Field(min_length=1, description="the same for validation; null: eval_fraction")
    eval_fraction: float = Field(ge=0, lt=1, description="share of `path` kept for validation; 0: eval_path")
    tokenizer: str = Field(min_length=1, description="bytes, characters (of a small text), or a tokenizer.json")
    bos: str | None = Field(min_length=1, description="special token before each document, e.g. <bos>; null: none")
    eos: str | None = Field(min_length=1, description="special token after each document; null: none")
    long_documents: Literal["split", "skip", "error"] = Field(
        description="what becomes of a document longer than loop.seq_len where packing is documents"
    )
    streams: int = Field(
        ge=1, le=65536, description="parts of the data, each read in an order of its own; divides the rows of a batch"
    )
    shuffle: bool = Field(description="another order in each epoch, by run.seed; false: as in the files")
    prefetch_batches: int = Field(ge=0, le=1024, description="batches made ahead by a thread; 0: none")

    @model_validator(mode="after")
    def _one_validation(self) -> Self:
        if (self.eval_path is None) == (self.eval_fraction == 0):
            raise ValueError("give either eval_path, or an eval_fraction above 0")
        return self


class TextData(Corpus):
    """Plain text, UTF-8."""

    kind: Literal["text"]
    packing: Literal["windows", "stream", "documents"] = Field(
        description="windows: random windows of all text, held in memory, without bos and eos; else as for jsonl"
    )
    separator: str | None = Field(min_length=1, description="what stands between documents; null: a file is one")


class Template(Strict):
    """A prompt and its answer, from the columns of a row: `{name}` stands for a column, `{{` for a brace."""

    prompt: str = Field(description="not learnt")
    answer: str = Field(min_length=1, description="learnt, and data.eos after it")
    remove: str | None = Field(
        description="regular expression of what is left out of both, e.g. <<.*?>>; null: nothing"
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
            raise ValueError(f"is no regular expression: {error}") from None
        return pattern


class TableData(Corpus):
    """Rows with named columns: one of them is the text, or a template makes a prompt and an answer of several."""

    packing: Literal["stream", "documents"] = Field(
        description="stream: documents follow each other without a gap, rows are cut anywhere; documents: whole ones "
        "share a row, and none sees another"
    )
    text_column: str | None = Field(min_length=1, description="the text; null: template")
    template: Template | None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        if self.template is None:
            return (self.text_column or "",)
        return tuple(dict.fromkeys(template_columns(self.template.prompt) + template_columns(self.template.answer)))

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if (self.text_column is None) == (self.template is None):
            raise ValueError("give either text_column or template (a prompt and its answer)")
        if self.template is not None and self.eos is None:
            raise ValueError("eos: an answer must end in a special token, or the model never learns to stop")
        return self


class JsonlData(TableData):
    """A JSON object a line."""

    kind: Literal["jsonl"]


class ParquetData(TableData):
    """Parquet files, read a row group at a time."""

    kind: Literal["parquet"]


Data = Annotated[TextData | JsonlData | ParquetData | ArithmeticData | Gsm8kData, Field(discriminator="kind")]
