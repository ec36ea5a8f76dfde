"""Names of the user's own functions: their form, and what is said of one that does not fit."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import TypeAdapter, ValidationError

from conf import extension
from conf.extension import ExtensionError
from conf.reference import OrReference, Reference


def test_a_reference_names_a_module_and_a_name_in_it_and_may_be_a_choice() -> None:
    for text in ("a:b", "a.b_c:D", "_a:_b"):
        assert TypeAdapter(Reference).validate_python(text) == text
    for text in ("", "a", "a:", ":b", "a/b:c", "a:b.c:d", "a..b:c", "1a:b", "a:b "):
        with pytest.raises(ValidationError, match="must be module:name"):
            TypeAdapter(Reference).validate_python(text)
    adapter = TypeAdapter(Annotated[str, OrReference(("one", "two"))])
    assert [adapter.validate_python(text) for text in ("two", "a:b")] == ["two", "a:b"]
    with pytest.raises(ValidationError, match="must be one of one, two, or module:name"):
        adapter.validate_python("three")
    for text, meant in {"my-rewards:brief": "my_rewards:brief", "lab.mine.brief": "lab.mine:brief"}.items():
        for checks in (adapter, TypeAdapter(Reference)):
            with pytest.raises(ValidationError, match=f"module:name, such as {meant}"):
                checks.validate_python(text)


def test_every_kind_says_how_it_is_called() -> None:
    assert extension.positional("reward") == ("response", "answer")
    assert extension.positional("optimizer rule") == ()
    for kind, protocol in extension.PROTOCOLS.items():
        assert inspect.getdoc(protocol), kind


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugged.py").write_text(
        "def reward(response, answer, bonus=0): return bonus\n"
        "def one(response): return 0\n"
        "def keyword(response, answer, *, scale): return scale\n"
        "def columns(response, answer, prompt, level=1, *, row, **others): return level\n"
        "class Scorer:\n    def __call__(self, response, answer): return 1\n"
        "scorer, number = Scorer(), 3\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("module")
def test_what_fits_is_loaded() -> None:
    def load(name: str, options: dict[str, int] | None = None) -> Callable[..., int]:
        return extension.load("reward", f"plugged:{name}", "loop.rewards", options or {})

    assert (load("reward")("", ""), load("scorer")("", ""), load("columns")("", "", "", row={})) == (0, 1, 1)
    assert load("keyword", {"scale": 2})("", "", scale=2) == 2
    del sys.modules["plugged"]


def test_a_reward_names_what_it_wants_besides_response_and_answer() -> None:
    def columns(response, answer, prompt, level=1, *, row, **others): ...

    wanted = extension.wanted_by_name(inspect.signature(columns))
    assert wanted == (("prompt", "level", "row"), ("prompt", "row"), True)
    assert extension.wanted_by_name(inspect.signature(lambda response, answer, /: 0)) == ((), (), False)


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("reference", "options", "message"),
    [
        ("nowhere:f", {}, "cannot import nowhere: ModuleNotFoundError"),
        ("broken:f", {}, "cannot import broken: ZeroDivisionError"),
        ("plugged:rewrad", {}, "the module has no rewrad; it has reward, one, keyword, columns, Scorer, scorer"),
        ("plugged:number", {}, "is not callable"),
        ("plugged:one", {}, r"takes \(response\), but is called as \(response, answer\): too many positional"),
        ("plugged:reward", {"scale": 1}, r"is called as \(response, answer, scale=…\): got an unexpected keyword"),
    ],
)
def test_what_does_not_fit_is_named(reference: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ExtensionError, match=f"loop.rewards: reward {reference}:? .*{message}"):
        extension.load("reward", reference, "loop.rewards", options)
    sys.modules.pop("plugged", None)
