"""What a loop trains on: the section `data` of `run.yaml`. Values live in YAML only, so no field has a default."""

from typing import Annotated, Literal

from pydantic import Field

from conf.strict import Strict


class TextData(Strict):
    """A plain text file; the LM loop trains on random windows of its bytes."""

    kind: Literal["text"]
    path: str = Field(min_length=1, description="UTF-8 text file: a local path or gs://bucket/object")
    validation_fraction: float = Field(gt=0, lt=1, description="share at the end of the file kept for validation")


class ArithmeticData(Strict):
    """Synthetic one-digit word problems, made on the spot."""

    kind: Literal["arithmetic"]


class Gsm8kData(Strict):
    """GSM8K rows, {"question", "answer"} as JSON lines."""

    kind: Literal["gsm8k"]
    path: str = Field(min_length=1, description="training rows: a local path, gs://…, or assets://NAME/FILE")
    eval_path: str = Field(min_length=1, description="rows of the evaluations")


Data = Annotated[TextData | ArithmeticData | Gsm8kData, Field(discriminator="kind")]
