"""Texts around questions: what YAML or a template would make of a command of TeX is refused with what to write."""

from functools import reduce

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from conf.schema.training.data import Gsm8kData, JsonlData
from tests.groups import load_group

GSM8K, JSONL = load_group("data/gsm8k"), load_group("data/sft_gsm8k")


def made(key: str, written: str) -> BaseModel:
    """The data with a value for a key as it stands in YAML."""
    outer, _, inner = key.rpartition(".")
    base, kind = (JSONL, JsonlData) if outer == "template" else (GSM8K, Gsm8kData)
    value = {inner: yaml.safe_load(written)}
    if key == "question_template":
        value |= {"question_column": None}
    return kind(**base | ({outer: base[outer] | value} if outer else value))


@pytest.mark.parametrize(
    ("key", "written", "message"),
    [
        ("prompt.answer", r'" \\boxed{answer}"', r" \boxed{answer}"),
        ("prompt.answer", r"' \boxed{answer}'", r" \boxed{answer}"),
        ("prompt.answer", r'" \boxed{{{answer}}}"', r"control character of \b, before 'oxed{{{an'; write \\b"),
        ("prompt.answer", r"so \text{answer}.", r"\text{answer} would become \text18; write \text{{{answer}}}"),
        ("prompt.answer", r"\frac{{1}}{answer}", r"write \frac{{1}}{{{answer}}}"),
        ("prompt.answer", r"\sqrt[3]{answer}", r"write \sqrt[3]{{{answer}}}"),
        ("prompt.answer", r'"\text{{{answer}}}"', r"control character of \t, before 'ext{{{ans'"),
        ("prompt.question", r'"{question} in \frac{{a}}{{b}}"', r"control character of \f, before 'rac{{a}}{'"),
        ("prompt.question", r'"\right {question}"', r"control character of \r, before 'ight"),
        ("prompt.question", r"'Q:\n{question}'", r"double quotes in YAML for a line break"),
        ("prompt.system", r'"Answer in \boxed{}"', r"control character of \b"),
        ("prompt.between", r'"\e"', r"control character of \e"),
        ("prompt.shots", r'[{question: "1?", answer: "\alpha"}]', r"control character of \a, before 'lpha'"),
        ("question_template", '"{question"', "question_template: expected '}' before end of string; write {{ or }}"),
        ("template.prompt", '"a } {question}"', "write {{ or }} for a literal brace"),
        ("question_template", r"\textbf{question}", r"write \textbf{{{question}}}"),
        ("question_template", r'"\Nabla {question}"', r"control character of \N"),
        ("answer_mark", r'"\boxed"', r"control character of \b"),
        ("template.answer", r"\boxed{answer}", r"write \boxed{{{answer}}}"),
        ("template.prompt", r'"\v {question}"', r"control character of \v"),
        ("template.remove", r'"\b<<.*?>>"', r"control character of \b"),
    ],
)
def test_text_that_would_not_be_what_was_written_is_refused(key: str, written: str, message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        made(key, written)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("key", "written", "read"),
    [
        ("prompt.answer", r"' \boxed{{{answer}}}'", r" \boxed{18}"),
        ("prompt.answer", r'" \\boxed{{{answer}}}\n"', " \\boxed{18}\n"),
        ("prompt.question", r'"{question}\n\tin \\boxed{{}}\r\n"', "1+1?\n\tin \\boxed{}\r\n"),
        ("prompt.question", r"'{question} \(x\) {{answer}}'", r"1+1? \(x\) {answer}"),
        ("question_template", r'"{context}\n{question}"', "Count.\n1+1?"),
        ("template.answer", r"\textbf{{answer}} {answer}", r"\textbf{answer} 18"),
    ],
)
def test_braces_and_backslashes_as_they_should_be_written(key: str, written: str, read: str) -> None:
    template = reduce(getattr, key.split("."), made(key, written))
    assert str(template).format(answer=18, question="1+1?", context="Count.") == read
