"""The program as a whole: exit codes and messages, with real processes where several must agree."""

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.groups import load_group
from tests.trainer.lives import changed, lines_of
from tests.trainer.processes import (
    CODE,
    ROOT,
    ProcessResult,
    start_trainer,
    wait_processes,
)
from trainer import main


@pytest.fixture
def run_here(tmp_path, monkeypatch, capsys):
    """Run the program of the only worker in this process: a function from run.yaml, as data, to how it ended."""

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(main.faulthandler, "register", lambda _: None)
    monkeypatch.setattr(main.logging, "basicConfig", lambda **_: None)  # pytest keeps its handlers
    monkeypatch.setattr(main.files, "use_buckets", lambda _: None)
    monkeypatch.setattr(main, "find_credentials", lambda _: None)
    monkeypatch.setattr(main.runtime, "_exit", end)
    monkeypatch.setenv("SLIPWAY_RUN_DIR", str(tmp_path / "run"))

    def run(raw: dict[str, Any]) -> ProcessResult:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
        monkeypatch.setattr(sys, "argv", ["trainer", str(tmp_path / "run.yaml")])
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert isinstance(ended.value.code, int)
        return ProcessResult(ended.value.code, capsys.readouterr().err)

    return run


@pytest.fixture
def pair(lm_run):
    """The run on two workers of two devices."""
    return changed(lm_run, pod={"workers": 2, "devices": 4})


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--xla_nope=2", "XLA_FLAGS: Unknown flag in XLA_FLAGS: --xla_nope=2"),
        ("xla_nope=2", "XLA_FLAGS: flags begin with --, and jaxlib ignores xla_nope=2"),
    ],
)
def test_a_flag_that_jaxlib_does_not_know_is_named(lm_run, tmp_path, compile_cache, flag, said):
    """jaxlib itself would abort the process, whose last words would be taken for those of a crash."""
    flags = {"XLA_FLAGS": f"--xla_cpu_parallel_codegen_split_count=1 {flag}"}
    [ended] = wait_processes(start_trainer(lm_run, tmp_path, compile_cache, flags))
    assert ended.exit_code == 2
    assert said in ended.stderr
    assert "Check failure" not in ended.stderr


EVALUATIONS = """
def probe(model):
    rows = model.encode(["1 and 2 make 3. ", "7 "])
    texts = model.generate(rows, 4)
    return {"texts": len(texts), "nats": -sum(float(logprobs.sum()) for logprobs, _ in model.score(rows))}


def fails(model):
    model.score([[1, 2]])
    raise ValueError("only worker 0 knows")
"""


def test_two_workers_train_and_leave_results(pair, tmp_path, compile_cache):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.py").write_text(EVALUATIONS)
    own = {name: {"run": f"mine:{name}", "interval": "end"} for name in ("fails", "probe")}
    pair = changed(pair, loop={"evaluations": own})
    first, second = wait_processes(start_trainer(pair, tmp_path / "run", compile_cache, {}, {}))
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    steps = [line for line in lines_of(tmp_path / "run/worker-0") if line["phase"] == "train"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "learning_rate", "grad_norm", "step_time", "tokens_per_second", "steps_total"} <= steps[0].keys()
    assert "compile_time" in steps[0]
    assert "compile_time" not in steps[1]
    assert not (tmp_path / "run/worker-1").exists()
    summary = json.loads((tmp_path / "bucket/summary.json").read_text())
    assert np.isfinite(summary["eval_loss"])
    assert summary["eval_probe_texts"] == 2
    assert 17 < summary["eval_probe_nats"] < 17 * 8  # of 16 tokens
    assert "failed after update 6: ValueError: only worker 0 knows" in first.stderr
    assert "only worker 0 knows" not in second.stderr
    assert sorted(path.name for path in (tmp_path / "bucket/checkpoints").iterdir()) == ["4", "6"]


@pytest.mark.parametrize(("error", "code"), [("OSError(28, 'full')", 1), ("main.LocalRunFileError('own file')", 2)])
def test_an_error_ends_the_program_though_the_disk_of_its_log_is_full(error, code):
    """An orderly exit would wait for threads that wait for the other workers."""
    program = f"""
import sys, threading
from trainer import main
def fails(experiment): raise {error}
main.load, main.is_sampler, sys.argv = (lambda path: None), fails, ["trainer", "run.yaml"]
threading.Thread(target=threading.Event().wait).start()
main.main()
"""
    with open("/dev/full", "w") as log:  # noqa: PTH123
        words = [sys.executable, "-c", program]
        assert subprocess.run(words, stdout=log, stderr=log, check=False, timeout=300).returncode == code


def test_workers_that_disagree_all_exit_4_and_name_the_one(pair, tmp_path, compile_cache):
    other = {"SLIPWAY_CODE_SHA256": "1a2b" * 16}
    for ended in wait_processes(start_trainer(pair, tmp_path / "run", compile_cache, {}, other)):
        assert ended.exit_code == 4
        assert f"worker 1: code 1a2b1a2b1a2b… differs from {CODE[:12]}… on workers 0" in ended.stderr
        assert "Traceback" not in ended.stderr


@pytest.mark.deep
def test_wrong_number_of_devices_exits_3_on_every_worker(pair, tmp_path, compile_cache):
    for ended in wait_processes(start_trainer(pair, tmp_path / "run", compile_cache, {}, {"JAX_NUM_CPU_DEVICES": "1"})):
        assert ended.exit_code == 3
        assert re.search(r"^0 +cpu +cpu +2\n1 +cpu +cpu +1$", ended.stderr, re.MULTILINE)
        assert "Traceback" not in ended.stderr


def endless(run: dict[str, Any]) -> dict[str, Any]:
    loop = {"steps": 1_000_000, "eval_interval": 1_000_000}
    return changed(run, loop=loop, checkpoint={"save_interval": 1_000_000})


@pytest.mark.deep
def test_a_killed_worker_ends_the_other(pair, tmp_path, compile_cache):
    processes = start_trainer(endless(pair), tmp_path / "run", compile_cache, {}, {})
    metrics = tmp_path / "run/worker-0/metrics.jsonl"
    deadline = time.monotonic() + 400
    while not (metrics.exists() and '"step": 2,' in metrics.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGKILL)
    first, second = wait_processes(processes)
    assert second.exit_code == -signal.SIGKILL
    # by the collective's error or, where XLA waits on, by the missing heartbeat
    assert first.exit_code in (1, -signal.SIGABRT)


INVALID = """run.yaml: 2 invalid keys
  loop.steps: Input should be greater than or equal to 1 (got -1)
  loop.stepz: unknown key"""


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"pod": {"devices": 4}}, 3, "\n0       cpu      cpu   8\n"),
        ({"mesh": {"data": 3}}, 2, "mesh: data 3 x fsdp 1 x tensor 1 does not make 8 devices; change"),
        ({"data": load_group("data/text") | {"path": "absent.txt"}}, 2, "data.path: absent.txt does not exist\n"),
        ({"loop": {"steps": -1, "stepz": 3}}, 2, INVALID),
    ],
)
def test_what_only_the_worker_can_see_ends_with_a_code_and_one_error(lm_run, run_here, changes, code, words):
    ended = run_here(changed(lm_run, **changes))
    assert ended.exit_code == code
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_nothing_touches_a_backend_at_import():
    """All modules of the trainer, imported in a fresh process."""
    code = (
        "import pkgutil, importlib, trainer\n"
        "names = [module.name for module in pkgutil.walk_packages(trainer.__path__, 'trainer.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "from jax._src import xla_bridge\n"
        "assert 'trainer.loops.lm' in names\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code], check=True, cwd=ROOT, env=dict(os.environ)
    )


def run_with_a_bad_row(run: dict[str, Any], path: Path) -> dict[str, Any]:
    """It trains for a while before it meets the row."""
    path.write_text('{"text": "a line of text"}\n' * 400 + "oops\n")
    data = load_group("data/jsonl") | {"path": str(path), "streams": 2, "shuffle": False, "eval_path": str(path)}
    data |= {"eval_fraction": 0, "tokenizer": "bytes"}
    return changed(endless(run), data=data, model={"vocab_size": 260})


def test_data_that_cannot_be_read_end_the_run(lm_run, tmp_path, run_here):
    path = tmp_path / "rows.jsonl"
    ended = run_here(run_with_a_bad_row(lm_run, path))
    assert ended.exit_code == 2
    assert ended.stderr == f"data.path: {path}:401 is not JSON: Expecting value, at character 0 of the line\n"
    assert (tmp_path / "run/metrics.jsonl").read_text().startswith('{"step": 1,')


@pytest.mark.deep
def test_data_that_one_worker_cannot_read_end_the_run_with_its_words(pair, tmp_path, compile_cache):
    path = tmp_path / "rows.jsonl"
    run = run_with_a_bad_row(pair, path)
    ended = wait_processes(start_trainer(run, tmp_path / "run", compile_cache, {}, {}))
    alone = [worker for worker in ended if worker.exit_code == 2]
    assert len(alone) == 1, ended
    assert f"data.path: {path}:401 is not JSON: Expecting value, at character 0 of the line\n" in alone[0].stderr
    assert "Traceback" not in alone[0].stderr


@pytest.mark.parametrize(
    "command",
    [
        *("main", "fit.report", "chat", "generate", "convert", "puzzles.__main__", "puzzles.__main__ sudoku"),
        *("puzzles.__main__ maze", "tokenizer.__main__", "tokenizer.__main__ train"),
    ],
)
def test_the_help_of_each_program_describes_each_argument(command, monkeypatch):
    module, *words = command.split()
    printed = []
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", lambda parser, file=None: printed.append(parser))
    monkeypatch.setattr(sys, "argv", ["program", *words, "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module(f"trainer.{module}").main()
    [parser] = printed
    assert parser.prog.startswith("python -m trainer")
    assert [action.dest for action in parser._actions if not (action.help or action.choices)] == []
    described = parser.format_help().splitlines()
    assert all(line in described for line in (parser.description or "").splitlines()), "its lines are run together"
    assert max(map(len, described)) <= 120
