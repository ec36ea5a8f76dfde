"""`slipway localcloud wipe` deletes results: it asks, and says what it did."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from controller.cli import main
from controller.cli.verbs.setup import localcloud
from controller.cloud import emulator
from controller.core.ui import confirm
from controller.records import index
from tests.terminal import Tty


def test_wipe_asks_and_says_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    called: list[list[str]] = []
    monkeypatch.setattr(sys, "stdin", Tty())
    monkeypatch.setattr(emulator, "run_emulator_verb", lambda words, *_, **__: (called.append(words), (0, ""))[1])
    index.append_rows(tmp_path, [{"run": "q-1", "cloud": "local"}, {"run": "q-2", "cloud": "gcp"}])

    def answer(text: str) -> None:
        def read(question: str, *, yes: bool) -> bool:
            return confirm(question, yes=yes, read=lambda prompt: (asked.append(prompt), text)[1])

        monkeypatch.setattr(localcloud, "confirm", read)

    answer("n")
    assert main.run(["localcloud", "wipe"]) == 2
    assert "nothing was deleted; pass --yes to skip the prompt" in capsys.readouterr().err
    assert called == []
    answer("y")
    assert main.run(["localcloud", "wipe"]) == 0
    assert asked[-1] == "Delete the emulated cloud, and in its buckets the results of 1 run? [y/N] "
    assert "deleted: the emulated cloud with its buckets and pods" in capsys.readouterr().out
    assert main.run(["localcloud", "wipe", "--yes"]) == 0
    assert (len(asked), called) == (2, [["wipe"], ["wipe"]])
