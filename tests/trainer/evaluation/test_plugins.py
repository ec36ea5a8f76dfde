"""Evaluations of one's own: their schedule and results; whatever goes wrong is an alert, and the run goes on."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from conf.formats import RunFileError
from conf.schema.training.loop import LmLoop
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from tests.trainer.lives import SharedPrograms, lines_of, train
from trainer.distributed import runtime
from trainer.distributed.preemption import PreemptedError
from trainer.evaluation.model import TextModel
from trainer.evaluation.plugins import Calls, EvaluationPlugins, metric_values
from trainer.telemetry.metrics import MetricsLogger
from trainer.tokenizer.loading import BOS_ID, EOS_ID, ByteTokenizer


class FakeModel:
    """A model that every process computes by adding up."""

    def load(self, step: int, params: Any, between: Callable[[], None]) -> Calls:
        self.step, self._between, self.num_truncated = step, between, 0
        self._calls = Calls({"add": self._add})
        return self._calls

    def unload(self) -> None:
        pass

    def add(self, numbers: list[int]) -> int:
        return self._calls.call("add", numbers=numbers)

    def _add(self, numbers: list[int]) -> int:
        self._between()
        return sum(numbers)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module `mine`, which tests fill."""
    module = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


@pytest.fixture
def log(tmp_path: Path) -> Iterator[MetricsLogger]:
    made = MetricsLogger(tmp_path / "run", str(tmp_path / "bucket"), writes=True)
    yield made
    made.close()


def plugins(log: MetricsLogger, **evaluations: Any) -> EvaluationPlugins:
    raw = load_group("loop/lm") | {"steps": 10, "eval_interval": 2, "evaluations": evaluations}
    return EvaluationPlugins(LmLoop(**raw), log, FakeModel)  # pyright: ignore[reportArgumentType]


def lines(log: MetricsLogger) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "time"} for line in lines_of(log.local)]


def test_each_has_its_schedule_and_options(mine: ModuleType, log: MetricsLogger) -> None:
    seen: list[tuple[str, int]] = []

    def probe(model: FakeModel, *, name: str = "often") -> dict[str, float]:
        seen.append((name, model.step))
        return {"sum": model.add([model.step, 1]), "/part": 0.5}

    mine.probe = probe
    own = plugins(
        log,
        often="mine:probe",
        seldom={"run": "mine:probe", "interval": 4, "options": {"name": "seldom"}},
        last={"run": "mine:probe", "interval": "end", "options": {"name": "last"}},
    )
    for step in (2, 4, 6, 8, 10):
        found = own.run(step, step, {})
    assert found == {
        f"eval_{n}{x}": v for n in ("often", "seldom", "last") for x, v in (("_sum", 11.0), ("/part", 0.5))
    }
    asked = {name: [step for other, step in seen if other == name] for name, _ in seen}
    assert asked == {"often": [2, 4, 6, 8, 10], "seldom": [4, 8, 10], "last": [10]}
    assert lines(log)[0] == {
        "step": 2, "phase": "eval", "evaluation": "often", "eval_often_sum": 3, "eval_often/part": 0.5,
    }  # fmt: skip


def test_lists_have_an_interval_and_what_is_no_number_is_a_problem() -> None:
    values, problems = metric_values("e", {"right": [True, False, True, True], "length": [1.0, 2.0, 6.0], "loss": 3})
    assert problems == []
    assert values["eval_e_right"] == 0.75
    assert values["eval_e_right_stderr"] == pytest.approx(0.25)
    assert (values["eval_e_right_low"], values["eval_e_right_high"]) == pytest.approx((0.3006, 0.9544), abs=1e-4)
    assert values["eval_e_length"] == 3.0
    error = (14 / 2 / 3) ** 0.5
    assert values["eval_e_length_high"] - 3 == pytest.approx(1.96 * error, rel=1e-4) == 3 - values["eval_e_length_low"]
    alike = ([1.0] * 20, 1 - 0.1611, 1.0), ([0.0] * 20, 0.0, 0.1611), ([0.5] * 20, 0.2993, 0.7007)
    rounded = [0.1] * 3, 0.0068, 0.6424  # their mean is not quite 0.1
    for same, low, high in (*alike, rounded, ([7.0] * 20, 7.0, 7.0)):
        values, _ = metric_values("e", {"a": same})
        assert (values["eval_e_a_low"], values["eval_e_a_high"]) == pytest.approx((low, high), abs=1e-4)
    values, problems = metric_values("e", {"a": float("nan"), "b": [1.0, float("inf")], "c": "x", "d": [], "e": 1})
    assert values == {"eval_e_e": 1.0}
    assert problems == [
        "a is not finite",
        "b is not finite",
        "c is neither a number nor a list of numbers: 'x'",
        "d is neither a number nor a list of numbers: []",
    ]
    assert metric_values("e", None) == ({}, ["must return numbers by name, not None"])
    assert metric_values("e", {}) == ({}, ["returned no numbers"])


def test_texts_of_which_the_model_has_read_only_the_end_are_counted(mine: ModuleType, log: MetricsLogger) -> None:
    def reads(model: FakeModel) -> dict[str, float]:
        model.num_truncated += model.step - 2
        return {"loss": 1.0}

    mine.reads = reads
    own = plugins(log, x={"run": "mine:reads"})
    found = [own.run(step, step, {}) for step in (2, 4)]
    assert found == [{"eval_x_loss": 1.0}, {"eval_x_loss": 1.0, "eval_x_texts_truncated": 2.0}]


def test_a_model_counts_the_texts_of_which_it_reads_the_end(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = tiny.model_copy(update={"max_seq_len": 8})
    model = TextModel(cfg, make_mesh(1, 1, 1), ByteTokenizer(), [BOS_ID], [EOS_ID])
    calls = model.load(0, {}, lambda: None)

    def call(name: str, *, batch: list[list[int]], **_: Any) -> Any:
        zeros = np.zeros((len(batch), 8), np.float32)
        return [[ord("x")] for _ in batch] if name == "generate" else (zeros, zeros > 0)

    monkeypatch.setattr(calls, "call", call)
    scored = model.score([[1] * 8, [1] * 9, [1] * 12])
    assert [int(np.isnan(logprobs).sum()) for logprobs, _ in scored] == [0, 1, 4]
    assert model.num_truncated == 2
    assert model.generate([[1] * 5, [1] * 6, []], 3) == ["x"] * 3
    assert model.num_truncated == 3
    model.load(1, {}, lambda: None)
    assert model.num_truncated == 0


def test_a_failure_is_an_alert_until_it_works_again(mine: ModuleType, log: MetricsLogger, capfd: Any) -> None:
    forever = threading.Event()

    def fails(model: FakeModel) -> dict[str, float]:
        if model.step == 2:
            raise KeyError("no such task")
        if model.step == 4:
            sys.exit(3)
        if model.step == 6:
            return {"loss": float("nan"), "kept": 1.0}
        if model.step == 8:
            while True:
                try:
                    forever.wait()
                except Exception:  # what it must not catch
                    continue
                except BaseException as error:
                    raise ValueError("wrapped") from error
        return {"loss": 1.0}

    mine.fails = fails
    own = plugins(log, x={"run": "mine:fails", "timeout_seconds": 0.2})
    found = [own.run(step, step, {}) for step in (2, 4, 6, 8, 10)]
    assert found == [{}, {}, {"eval_x_kept": 1.0}, {}, {"eval_x_loss": 1.0}]
    said = [line.get("message") for line in lines(log) if line["phase"] == "alert"]
    begin = "loop.evaluations.x failed after update"
    assert said == [
        f"{begin} 2: KeyError: 'no such task'",
        f"{begin} 4: SystemExit: 3",
        f"{begin} 6: loss is not finite",
        f"{begin} 8: it took more than timeout_seconds, 0.2 s",
        None,
    ]
    assert lines(log)[-1] == {"step": 10, "phase": "alert", "alert": "evaluation x", "over": True}
    assert "in fails\n" in capfd.readouterr().err  # the traceback of one's own function


def test_a_preemption_ends_the_run_even_if_the_function_catches_it(mine: ModuleType, log: MetricsLogger) -> None:
    def deaf(model: FakeModel) -> dict[str, float]:
        for _ in range(3):
            try:
                model.add([1])
            except Exception:
                continue
        return {"a": 1.0}

    def notice() -> None:
        raise PreemptedError

    mine.deaf = deaf
    with pytest.raises(PreemptedError):
        plugins(log, x="mine:deaf").run(2, 2, {}, notice)
    assert lines(log) == []


def test_processes_help_the_first_one_and_get_its_results(
    mine: ModuleType, log: MetricsLogger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes as two threads. The function runs on process 0 only, also when a call or the function fails."""
    import jax

    this, meeting, told = threading.local(), threading.Barrier(2), {}
    calls: list[tuple[int, list[Any]]] = []

    def gather(text: str) -> list[str]:
        told[this.process] = text
        meeting.wait(240)
        both = [told[0], told[1]]
        meeting.wait(240)
        return both

    def probe(model: FakeModel) -> dict[str, float]:
        assert this.process == 0
        with suppress(TypeError):
            model.add(["no number"])  # pyright: ignore[reportArgumentType]
        if model.step == 4:
            raise ValueError("only on the first process")
        return {"sum": model.add([1, 2]) + model.add([3])}

    def record(self: FakeModel, numbers: list[Any]) -> int:
        calls.append((this.process, numbers))
        return sum(numbers)

    monkeypatch.setattr(FakeModel, "_add", record)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: this.process)
    monkeypatch.setattr(runtime, "gather_texts", gather)
    mine.probe = probe
    results: dict[int, list[dict[str, float]]] = {}

    def process(number: int) -> None:
        this.process = number
        there = log if number == 0 else MetricsLogger(tmp_path / "other", str(tmp_path), writes=False)
        own = plugins(there, x="mine:probe")
        results[number] = [own.run(step, step, {}) for step in (2, 4, 6)]

    threads = [threading.Thread(target=process, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1] == [{"eval_x_sum": 6.0}, {}, {"eval_x_sum": 6.0}]
    assert sorted(calls, key=str) == sorted(
        [(p, c) for p in (0, 1) for c in 3 * [["no number"]] + 2 * [[1, 2], [3]]], key=str
    )
    assert [line["step"] for line in lines(log) if line["phase"] == "eval"] == [2, 6]


def test_a_function_that_wants_answers_is_refused_without_any(mine: ModuleType, log: MetricsLogger) -> None:
    mine.style = lambda answers: {}
    with pytest.raises(RunFileError, match=r"loop\.evaluations\.x: mine:style: only the grpo loop has answers"):
        plugins(log, x="mine:style")
    with pytest.raises(RunFileError, match=r"loop\.evaluations\.x: evaluation trainer.evaluation.core:core takes"):
        plugins(log, x="core")  # without a path


@pytest.mark.deep
def test_a_language_model_is_evaluated_and_a_resumed_run_keeps_the_numbers(
    lm_run: Any, mine: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a mesh with sharded weights; a function of chance is not asked twice about the same weights."""
    seen: list[int] = []

    def probe(model: Any) -> dict[str, Any]:
        seen.append(model.step)
        (logprobs, greedy), (short, _) = model.score([model.encode(["1 and 2 make 3. "])[0], [49, 32]])
        assert logprobs.shape == greedy.shape == (15,)
        assert abs(logprobs[0] - short[0]) < 1e-5  # of the same tokens in another row
        said = model.generate([model.encode(["1 and"])[0]] * 3, 6, ["zzz"])
        found = {"nats": [-float(x) for x in logprobs], "alike": len({*said}), "n": len(said)}
        return found | {"chance": time.time_ns() % 1e6}

    def fails(model: Any) -> dict[str, float]:
        raise ValueError("no such file")

    mine.probe, mine.fails = probe, fails
    changes = {"evaluations": {"mine": "mine:probe", "bad": {"run": "mine:fails", "interval": "end"}}}
    raw = lm_run | {"loop": lm_run["loop"] | changes, "mesh": lm_run["mesh"] | {"data": 4, "fsdp": 2}}
    SharedPrograms().install(monkeypatch)
    train(raw, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 < summary["eval_mine_nats_low"] < summary["eval_mine_nats"] < 6
    assert (summary["eval_mine_alike"], summary["eval_mine_n"]) == (1, 3)
    assert seen == [4, 6]
    written = train(raw, tmp_path / "run")  # it begins at its end
    assert seen == [4, 6]
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert [line["step"] for line in written if line.get("evaluation") == "mine"] == [4, 6]
    alert = next(line for line in written if "alert" in line)
    assert alert["message"] == "loop.evaluations.bad failed after update 6: ValueError: no such file"
