"""What the bench of time to accuracy sets other libraries is what our trainer has: rates, reward, prompts."""

import itertools
import json
import sys

import pytest

from conf.schema.training.schedule import DecaySchedule
from tests.bench import learning
from tests.bench.peers import accuracy, arithmetic_task
from trainer.data.arithmetic import ArithmeticProblems, Problem
from trainer.data.problem import Draw
from trainer.optimizer.schedules import schedule_factor
from trainer.rewards.functions import answer_match


@pytest.fixture
def run(tmp_path):
    return learning.run_file(["+experiment=arithmetic"], tmp_path)


def task(folder, **settings):
    folder.mkdir(exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(settings))
    accuracy.write_rows(folder / "train.jsonl", [])
    accuracy.write_rows(folder / "test.jsonl", [Problem("1+1", "2", ""), Problem("1+2", "3", "")])
    return arithmetic_task.Task(folder)


def test_the_learning_rate_is_ours(tmp_path, run):
    given, peak = run["optimizer"]["schedule"], run["optimizer"]["lr"]
    factor = schedule_factor(DecaySchedule(**given))
    theirs = task(tmp_path / "task", lr=peak, **given)
    for update in range(run["loop"]["steps"] + 10):
        assert theirs.learning_rate(update) == pytest.approx(peak * float(factor(update)), rel=1e-5), update


def test_the_reward_is_ours(run):
    problems = ArithmeticProblems(accuracy.ArithmeticData(**accuracy.data_of(run)), 0).train(Draw("rollout", 0), 200)
    for one, other in itertools.pairwise(problems):
        for response in (one.solution, other.solution, one.solution[:-1], "", "+1:"):
            assert arithmetic_task.is_right(response, one.answer) == (answer_match(response, one.answer) == 1.0), (
                response
            )


def test_the_clock_stands_still_in_an_evaluation(tmp_path, monkeypatch, capsys):
    now = iter([0.0, 10.0, 14.0, 20.0, 21.0])
    monkeypatch.setattr(arithmetic_task.time, "perf_counter", lambda: next(now))
    answers = [["2", "4"], ["=2", "=3"]]
    progress = arithmetic_task.Progress(task(tmp_path, level=0.95, eval_interval=40), lambda rows: answers.pop(0))
    assert not progress.evaluate(40)
    assert progress.evaluate(80)
    assert [progress.is_due(update) for update in (39, 40)] == [False, True]
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(point["seconds"], point["accuracy"]) for point in found] == [(10.0, 0.5), (16.0, 1.0)]


def test_a_program_that_fails_leaves_no_result(tmp_path, monkeypatch):
    options = accuracy.argparse.Namespace(cores="0,1", loaded=True)
    monkeypatch.setitem(accuracy.PEERS, "trl", "no_such_script.py")
    for _ in range(2):
        with pytest.raises(accuracy.subprocess.CalledProcessError):
            accuracy.theirs("trl", sys.executable, tmp_path, tmp_path, options)


def test_the_line_of_a_program_says_when_it_reached_the_level():
    points = [{"update": u, "seconds": u / 4, "accuracy": a} for u, a in ((0, 0.5), (40, 0.9), (80, 0.96), (120, 0.94))]
    assert (
        accuracy.told("slipway", 3, points) == "slipway, seed 3: 0.500 0.900 0.960 0.940; 0.95 after 80 updates, 20 s"
    )
    assert accuracy.told("trl", 3, points[:2]).endswith("0.500 0.900; not 0.95 after 40 updates, 10 s")
