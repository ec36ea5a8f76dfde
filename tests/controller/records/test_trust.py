"""Which records this machine may execute: any change of one asks again, and every part that executes is shown."""

import json
from pathlib import Path
from typing import Any

import pytest

from controller.core.errors import ConfigError
from controller.inputs.code import CodeSnapshot
from controller.records import trust
from tests.composed import config_of

DOCUMENT: dict[str, Any] = {
    "run": "r-1", "code_sha256": "a" * 64, "requirements": "a==1\nb==2\n", "config": {"x": [1, {"y": float("nan")}]},
}  # fmt: skip
GIT_LINE = f"lab @ git+https://h/lab@{'b' * 40}"
WORDS = ("cloud=local", "program=command", "program.command=[python, train.py, 'a b']", "program.setup=[[make, it]]")


def test_any_change_of_a_record_asks_again(tmp_path: Path) -> None:
    document = DOCUMENT
    assert not trust.is_trusted(tmp_path, document)
    trust.remember(tmp_path, document)
    assert trust.is_trusted(tmp_path, json.loads(json.dumps(document)))
    for key in document:
        assert not trust.is_trusted(tmp_path, document | {key: "other"})
    assert not trust.is_trusted(tmp_path, document | {"more": None})
    (tmp_path / "file").write_text("")
    trust.remember(tmp_path / "file", document)
    assert not trust.is_trusted(tmp_path / "file", document), "a folder that cannot be written asks again"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((), ("command", "python train.py 'a b'")),
        ((), ("setup", "make it")),
        (("code.resources=[a:B]",), ("own code", "code.resources: a:B, on this machine")),
        (("notify.notifier=a:tell",), ("own code", "notify.notifier: a:tell, on this machine")),
        (("cloud=here", "cloud.backend=cpu", "code.checks=[a:B]"), ("own code", "code.checks: a:B, on this machine")),
        (
            ("env.secrets={KEY: 'file:~/.ssh/id_rsa'}",),
            ("secret", "KEY, which this machine reads from file:~/.ssh/id_rsa"),
        ),
        (("env.packages=none",), ("packages", "none, 2 lines of requirements")),
        (("env.packages=requirements", "env.requirements=own.txt"), ("build", f"{GIT_LINE}, on this machine")),
        (
            (f"code.repository={{url: 'https://h/r', commit: {'a' * 40}}}",),
            ("from", f"https://h/r at {'a' * 40}"),
        ),
    ],
)
def test_all_that_would_be_executed_is_named(tmp_path: Path, words: tuple[str, ...], shown: tuple[str, str]) -> None:
    (tmp_path / "own.txt").write_text(f"numpy==2.0.0\n{GIT_LINE}\n")
    code = CodeSnapshot(tmp_path, ("lib.py", "own.txt", "train.py"))
    found = list(trust.what_it_executes(DOCUMENT, config_of(*WORDS, *words), code))
    assert shown in found
    assert ("files", f"3 files in {tmp_path}") in found
    assert ("commit", "unknown, as the record says") in found


def test_the_user_is_asked_once_and_no_means_that_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, code, answers = config_of(*WORDS), CodeSnapshot(tmp_path, ()), [False, True]
    monkeypatch.setattr(trust, "confirm", lambda question: answers.pop(0))
    with pytest.raises(ConfigError, match="nothing was executed"):
        trust.require_trust(DOCUMENT, config, code, tmp_path, trust=False, asks=True)
    for _ in range(3):
        trust.require_trust(DOCUMENT, config, code, tmp_path, trust=False, asks=True)
    assert answers == []


def test_nobody_to_ask_is_a_no_and_a_long_value_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, code = config_of(*WORDS[:2], f"program.command=[{'x' * 9000}]"), CodeSnapshot(tmp_path, ())
    for asks in (True, False):
        with pytest.raises(ConfigError, match=r"--run r-1: nothing was executed: .* pass --trust"):
            trust.require_trust(DOCUMENT, config, code, tmp_path, trust=False, asks=asks)
    assert "(9000 characters)" in capsys.readouterr().err
    trust.require_trust(DOCUMENT, config, code, tmp_path, trust=True, asks=False)
    trust.require_trust(DOCUMENT, config, code, tmp_path, trust=False, asks=False)
