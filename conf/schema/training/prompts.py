"""What the GRPO loop asks: questions with an answer that can be checked, and the words around them."""

from string import Formatter
from typing import Literal, Self

from pydantic import Field, model_validator

from conf.schema.base import Strict


def template_columns(template: str) -> list[str]:
    """The columns that a template names, in its order. Raises ValueError for what `{name}` cannot hold."""
    names: list[str] = []
    for _, name, form, conversion in Formatter().parse(template):
        if name is None:
            continue
        if not name or form or conversion or set(name) & set(".[]"):
            raise ValueError("{…} must hold the name of a column and nothing else; write {{ for a brace")
        names.append(name)
    return names


class Shot(Strict):
    """A worked example that stands before the question."""

    question: str = Field(min_length=1, description="as a question of the data would be")
    answer: str = Field(min_length=1, description="worked, as the policy is to answer")


class Prompt(Strict):
    """The words around a question; a file of the group `prompt`."""

    system: str | None = Field(min_length=1, description="what comes before everything; null: nothing")
    question: str = Field(description="with {question} where it stands")
    answer: str = Field(description="a worked answer, of a shot or in the warm start, with {answer} where it stands")
    between: str = Field(description="what stands between the parts where chat_template is none")
    shots: tuple[Shot, ...] = Field(max_length=64, description="worked examples before the question, in their order")

    @model_validator(mode="after")
    def _each_names_its_own(self) -> Self:
        for name in ("question", "answer"):
            if template_columns(getattr(self, name)) != [name]:
                raise ValueError(f"{name} must hold {{{name}}}, once, and no other name; write {{{{ for a brace")
        return self


class QuestionData(Strict):
    """What every kind of questions has in common: how they are written down as tokens."""

    tokenizer: str = Field(min_length=1, description="bytes, or a tokenizer.json: gs://…, assets://NAME/FILE, a path")
    chat_template: Literal["none", "gemma", "llama3", "qwen"] = Field(
        description="the turns of a chat, as the model was tuned for them; none: plain text, for pretrained weights"
    )
    bos: str | None = Field(
        min_length=1, description="special token before the prompt; null: the template's own, with none no token"
    )
    eos: str | None = Field(
        min_length=1, description="special token that ends a response, beside the template's end of a turn; null: none"
    )
    prompt: Prompt

    @model_validator(mode="after")
    def _can_end(self) -> Self:
        if self.chat_template == "none" and self.eos is None:
            raise ValueError(
                "eos: with chat_template none it is what ends a response; name the tokenizer's, e.g. <eos>"
            )
        return self


class ArithmeticData(QuestionData):
    """Synthetic word problems of sums and differences, made on the spot."""

    kind: Literal["arithmetic"]
    largest_first: int = Field(ge=2, le=90, description="what someone has at first: 1 to this")
    largest_second: int = Field(ge=2, le=9, description="what is added or taken away: 1 to this")


class Gsm8kData(QuestionData):
    """GSM8K rows, {"question", "answer"} as JSON lines."""

    kind: Literal["gsm8k"]
    path: str = Field(min_length=1, description="training rows: a local path, gs://…, or assets://NAME/FILE")
    eval_path: str = Field(min_length=1, description="rows of the evaluations")
