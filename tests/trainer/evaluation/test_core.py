"""CORE on fixed logits is what nanochat's own evaluator says: fixtures/core_nanochat.json, made by make_core.py."""

import json
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.evaluation.test_harness import ByteModel
from tests.trainer.fixtures import make_core
from trainer.evaluation import core


class FixedModel(ByteModel):
    """A model with the logits of the fixture."""

    max_seq_len, bos, eos, prefix = 4096, (make_core.BOS,), None, make_core.BOS

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [make_core.encode(text) for text in texts]

    def score(self, rows: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [self._score(np.array(row)) for row in rows]

    def _score(self, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits = make_core.logits(row.tolist())[:-1]
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logprobs[np.arange(len(logits)), row[1:]], logits.argmax(axis=1) == row[1:]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("core") / "eval_bundle"
    make_core.write_bundle(folder)
    return folder


def test_every_example_and_the_metric_are_nanochats(bundle: Path) -> None:
    theirs = json.loads(make_core.FIXTURE.read_text())
    ours = core.core(FixedModel(), path=str(bundle), max_per_task=make_core.MAX_PER_TASK)
    for label, correct in theirs["correct"].items():
        assert ours[f"/{label}"] == correct, label
        assert 0 < sum(correct) < len(correct)  # a fixture of all or nothing would show little
        assert sum(correct) / len(correct) == pytest.approx(theirs["results"][label], abs=1e-6)
        assert ours[f"/{label}_centered"] == pytest.approx(theirs["centered_results"][label], abs=1e-6)
    assert ours["metric"] == pytest.approx(theirs["core_metric"], abs=1e-6)
    assert ours["metric_low"] < ours["metric"] < ours["metric_high"]
    # six tasks of 30: the standard error is the accuracies', each divided by what is left above chance
    parts = [np.std(theirs["correct"][t[0]]) / np.sqrt(30) / (1 - 0.01 * t[4]) for t in make_core.TASKS]
    assert ours["metric_stderr"] == pytest.approx(np.linalg.norm(parts) / 6)


def test_the_bundle_may_be_an_archive_or_its_parent(bundle: Path) -> None:
    archive = bundle.parent / "eval_bundle.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(bundle.rglob("*.*")):
            file.write(path, path.relative_to(bundle.parent))
    of_archive, of_parent = (
        core.core(FixedModel(), path=str(path), max_per_task=4) for path in (archive, bundle.parent)
    )
    assert of_archive == of_parent
    assert len(of_archive["/plain"]) == 4


def test_a_line_that_is_no_json_is_named_and_a_blank_one_is_no_example(bundle: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bundle, tmp_path / "eval_bundle")
    file = sorted((folder / "eval_data").rglob("*.jsonl"))[0]
    file.write_text(f"\n{file.read_text()}\n \noops\n")
    line = len(file.read_text().split("\n")) - 1
    with pytest.raises(ValueError, match=rf"^eval_data/.*{file.name}, line {line} is not JSON"):
        core.core(FixedModel(), path=str(folder), max_per_task=1)


class Unreadable(ByteModel):
    """A model that could not read the options whose numbers it is told."""

    def __init__(self, *options: int) -> None:
        self.options, self.bos = options, ()

    def score(self, rows: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        assert all(row[0] == self.prefix for row in rows)  # nanochat puts eos before a text if there is no bos
        scored = super().score(rows)
        return [(costs * np.nan if i in self.options else costs, greedy) for i, (costs, greedy) in enumerate(scored)]


@pytest.mark.parametrize(
    ("options", "right"), [((), [True, False]), ((0,), [False, True]), ((1,), [True, False]), ((0, 1), [False, False])]
)
def test_an_option_that_is_not_a_number_is_never_the_best(options: tuple[int, ...], right: list[bool]) -> None:
    """Of `r` and `b`, the first of which the model prefers; either may be the right one."""
    task = {"icl_task_type": "multiple_choice", "num_fewshot": [0]}
    for gold in (0, 1):
        example = {"query": "q", "choices": ["r", "b"], "gold": gold}
        assert core.grade(Unreadable(*options), task, [example]) == [right[gold]]
