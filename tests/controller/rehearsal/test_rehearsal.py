"""Rehearsals: each file of conf/experiment on a pod of its own, through a bucket, with a preemption and stand-ins."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from conf.schema.config import Config
from controller import emulator
from controller.cli import main
from controller.config.compose import config_groups
from controller.core.errors import CloudError
from controller.core.events import Event
from controller.emulator import mark_in_use
from controller.localcloud.lifecycle import find_endpoint
from controller.localcloud.vms.image import process_marker
from controller.localcloud.vms.processes import MARKER, kill_marked
from controller.rehearsal.recipe import SPECIAL_TOKENS, emulated_hub, with_recipe
from controller.rehearsal.rehearsal import FAULT_KEY, PREEMPTION, Check, Interruption, check_recovery
from tests.composed import config_of
from tests.conftest import deep, wide
from tests.emulators import Emulators
from tests.paths import ROOT

FLAGSHIP = "gemma2b_gsm8k tpu.accelerator_type=v4-16 tpu.zone=us-central2-b loop.steps=3 loop.updates_per_rollout=1"
"""Half as many workers and devices, which is what every run of the tests has time for."""
AS_TYPED = (
    *("lm_3b_v6e8", "trm_stable1", "trm_e1_1_baseline_xla", "nanochat_cpp", "nash_mhc_3b"),
    "simply_gemma2_2b_gsm8k",
)
"""One of each kind, and those that need their own slice."""
OTHERS = tuple(name for name in config_groups()["experiment"] if name not in AS_TYPED)
EACH_RUN = ("trm_sudoku", "gsm8k_local", "word_game", "sft_gsm8k", "nanochat_d16", "qwen3_5_4b_gsm8k")
ONE_WORKER = ("tpu=v5litepod_8", "cloud.faults=[{kind: stockout, times: 1}]")
"""A rehearsal of these in each run of `.ci/run`: one process, and no preemption. Each night all run as typed."""
ADOPTED = {"trm_sudoku_stable1", "trm_stable1"}
"""Their pod may not be replaced, hence is not preempted; its SSH fails instead, and so does the API."""
RESUMED = re.compile(
    "preempted .*: replaced, and the program "
    r"(resumed: 2 attempts|started again: 2 attempts; at step [2-9] of \d; no step arrived)"
)
"""The second: on a busy machine no line of the first attempt may arrive before the preemption."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulators: Emulators) -> Path:
    """A state folder; the emulated clouds of rehearsals are forked."""
    monkeypatch.setattr(emulator, "run_emulator_verb", emulators.run_emulator_verb)
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def rehearse(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main.run(["rehearse", *words])
    out, err = capsys.readouterr()
    return code, out, err


def nothing_runs(home: Path) -> bool:
    """No emulated cloud below this folder serves, and no process of its workers lives."""
    running = [p for p in psutil.process_iter(["cmdline"]) if str(home) in " ".join(p.info["cmdline"] or [])]
    clouds = [folder / "localcloud" for folder in (home / "rehearsals").iterdir()]
    served = [cloud for cloud in clouds if find_endpoint(cloud) or kill_marked(process_marker(cloud.resolve()))]
    return not running and not served


def nothing_is_left(home: Path) -> bool:
    return nothing_runs(home) and not list((home / "rehearsals").iterdir())


@pytest.mark.e2e
@pytest.mark.parametrize("experiment", [FLAGSHIP, *deep(*AS_TYPED), *wide(*OTHERS)])
def test_an_experiment_is_preempted_and_goes_on(
    experiment: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = rehearse(capsys, *f"+experiment={experiment}".split(), "cloud.project=my-own", "--json")
    assert code == 0, err
    facts = json.loads(out.splitlines()[-1])["facts"]
    proven = "\n".join(fact["words"] for fact in facts if fact["proven"])
    assert [fact["words"] for fact in facts if not fact["proven"]] == []
    assert " shared resources created, and unchanged when observed again\n" in proven
    assert experiment != FLAGSHIP or "fetched from an emulated Hugging Face Hub: hf://google/gemma-2-2b/*\n" in proven
    if experiment in ADOPTED:
        assert "ssh_refused (seconds 2.0): overcome" in proven
        assert "stable-1 still exists; no other billed resource does" in proven
    else:
        assert RESUMED.search(proven), proven
        assert "no billed resource is left" in proven
    assert nothing_is_left(home)


@pytest.mark.e2e
@pytest.mark.deep
@pytest.mark.parametrize("experiment", EACH_RUN)
def test_one_like_another_runs_on_one_worker(experiment: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = rehearse(capsys, f"+experiment={experiment}", *ONE_WORKER, "cloud.project=my-own", "--json")
    assert code == 0, err
    facts = json.loads(out.splitlines()[-1])["facts"]
    proven = "\n".join(fact["words"] for fact in facts if fact["proven"])
    assert [fact["words"] for fact in facts if not fact["proven"]] == []
    assert "stockout (times 1): overcome" in proven
    assert "the program exited with 0 on 1 of 1 worker\n" in proven
    assert nothing_is_left(home)


@pytest.mark.e2e
@pytest.mark.deep
def test_a_failure_is_kept_for_a_look_and_a_fault_that_never_came_proves_nothing(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    Path("hello.txt").write_text("hello\n")
    mine = ["program=command", "program.command=[cat,goodbye.txt]", "tpu=v5litepod_8"]
    code, _, err = rehearse(capsys, *mine)
    assert code == 5
    assert "goodbye.txt" in err
    assert nothing_runs(home)
    look = re.search(r"inspect it with `slipway (status .*?)`", err)
    assert look
    assert main.run([*shlex.split(look[1]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pod"]["state"] == "ready"
    end = re.search(r"`slipway (localcloud .*?)` ends it", err)
    assert end
    assert main.run(shlex.split(end[1])) == 0
    assert capsys.readouterr().out.startswith("deleted: the emulated cloud")
    assert nothing_runs(home)
    Path("goodbye.txt").write_text("bye\n")
    faults = "{kind: stockout, times: 1}, {kind: preempted, after_object: nowhere}"
    code, out, err = rehearse(capsys, *mine, f"cloud.faults=[{faults}]")
    assert (code, err) == (2, "")
    assert "✓ stockout (times 1): overcome" in out
    assert "✗ preempted (after_object nowhere): did not occur" in out
    assert out.count("✗") == 1
    assert max(map(len, out.splitlines())) <= 80
    assert "slipway get" not in out
    assert nothing_is_left(home)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("where", "error", "code"),
    [
        ("reconcile", CloudError("no quota"), 2),  # of the pod that is to be adopted, which is made before the run
        ("drive", KeyboardInterrupt(), 130),
        ("Rehearsal.checks", ValueError("a bug"), None),
    ],
)
def test_no_error_leaves_the_emulated_cloud_running(
    where: str, error: BaseException, code: int | None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        """Leave a process of a worker behind, as a supervisor is, and fail."""
        [cloud] = (home / "rehearsals").glob("*/localcloud")
        assert find_endpoint(cloud)
        left.append(subprocess.Popen(["sleep", "1000"], env={MARKER: process_marker(cloud.resolve()) + "worker"}))
        if isinstance(error, KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)  # as Ctrl-C, and as a terminal that is closed
        raise error

    Path("hello.txt").write_text("hello\n")
    left: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr("controller.rehearsal.rehearsal.drive", lambda *_: None)
    monkeypatch.setattr(f"controller.rehearsal.rehearsal.{where}", fail)
    pod = ["tpu=v5litepod_8", *(["tpu.adopt=true", "tpu.name=stable-1"] if where == "reconcile" else [])]
    with suppress(ValueError):
        assert main.run(["rehearse", "program=command", "program.command=[date]", *pod]) == code
    assert left[0].wait() == -signal.SIGKILL
    assert nothing_runs(home)


@pytest.mark.e2e
def test_two_of_one_name_do_not_get_into_each_others_way(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("hello.txt").write_text("hello\n")
    mine = ["program=command", "program.command=[cat,hello.txt]", "tpu=v5litepod_8"]
    with mark_in_use(home / "rehearsals" / "run" / "localcloud"):
        code, _, err = rehearse(capsys, *mine)
    assert code == 2
    assert "run.name: a rehearsal of run is running" in err


GSM8K = ("gsm8k/train.jsonl", "gsm8k/test.jsonl", "gemma-2-2b/tokenizer.json", "gemma-2-2b")
RECIPES = {
    # what the trainer reads of the Hub: data, held-out data, tokenizer, weights
    "nanochat_cpp": ("text/*.parquet", "validation/*.parquet", "tokenizer/tokenizer.json", None),
    "lm_3b_v6e8": ("text/*.parquet", None, "tokenizer/tokenizer.json", None),
    "sft_gsm8k": GSM8K,
    "gemma2b_gsm8k": GSM8K,
}


def recipe(name: str, *words: str) -> Config:
    full, tiny = (config_of(f"+experiment={name}", "cloud=local", *words, *scale) for scale in ((), ("scale=tiny",)))
    return with_recipe(tiny, full, {word.partition("=")[0] for word in words})


def test_a_recipe_reads_of_the_hub_what_the_experiment_reads() -> None:
    """test_rehearsal.py trains on it."""
    for name, sources in RECIPES.items():
        config: Any = recipe(name)
        names = (config.data.path, config.data.eval_path, config.data.tokenizer, config.model.weights)
        assert names == tuple(source and f"assets://{source}" for source in sources), name


@pytest.mark.parametrize("chat", ["own", "gemma"])
def test_the_stand_in_for_a_tokenizer_has_no_turns(chat: str) -> None:
    data: Any = recipe("gemma2b_gsm8k", f"data.chat_template={chat}", "data.bos=null", "data.eos=null").data
    assert (data.tokenizer, data.chat_template) == ("assets://gemma-2-2b/tokenizer.json", "none")
    assert (data.bos, data.eos) == ("<bos>", "<eos>")
    assert {data.bos, data.eos} <= {*SPECIAL_TOKENS}


def test_what_the_user_sets_and_what_has_no_source_stays() -> None:
    assert getattr(recipe("lm_3b_v6e8", "data.tokenizer=bytes").data, "tokenizer") == "bytes"  # noqa: B009
    config = recipe("lm_tinyshakespeare")
    assert not [asset for _, _, asset in config.assets.iter_assets() if asset.source]


def test_puzzles_are_generated_and_need_no_hub(tmp_path: Path) -> None:
    config = recipe("trm_sudoku")
    build = config.assets.datasets["sudoku"].build
    assert build is not None
    assert build[build.index("--source") + 1] == "generated"
    before = os.environ.get("HF_ENDPOINT")
    with emulated_hub(config, tmp_path):
        assert os.environ.get("HF_ENDPOINT") == before


def launched(attempt: int) -> Event:
    return Event(0.0, "note", "r", "launched", {"attempt": attempt, "launched": True})


def said(text: str = "hello\n") -> Event:
    return Event(0.0, "log", "r", text, {"worker": 1})


def steps(*numbers: int, time: float | None = None) -> list[Event]:
    lines: list[dict[str, Any]] = [{"step": n, "steps_total": 100} | ({"time": time} if time else {}) for n in numbers]
    return [Event(0.0, "metrics", "r", "", {"metrics": line}) for line in lines]


def tell(events: list[Event], strike: list[str] | None = None) -> Interruption:
    interruption = Interruption((lambda: strike.append("!")) if strike is not None else None)
    for event in events:
        interruption(event)
    return interruption


def fault(left: int = 0, **spec: Any) -> dict[str, Any]:
    return {"spec": {**(spec or PREEMPTION)}, "left": left}


def recovered(events: list[Event], attempts: int = 2) -> Check:
    [check] = check_recovery({f"{FAULT_KEY}/000": fault()}, attempts, tell(events))
    return check


def test_it_strikes_once_and_only_after_the_program_has_said_something() -> None:
    strikes: list[str] = []
    tell([Event(0.0, "note", "r", "the pod is ready"), launched(1)], strikes)
    assert strikes == []
    tell([launched(1), said(), said(), *steps(1, 2)], strikes)
    assert strikes == ["!"]


BEFORE = [launched(1), *steps(1, 2, 40), launched(2)]
RESTORED = [*steps(1, time=10), *steps(40, time=20)]
"""Lines that the program restores are not its steps."""


@pytest.mark.parametrize(
    ("events", "doubtful", "message"),
    [
        ([*BEFORE, *steps(31, 32)], False,
         "preempted (4 s after its first output): replaced, and the program resumed: 2 attempts; "
         "at step 31 of 100; step 40 was reached before"),
        ([*BEFORE, *steps(1, 2)], True,
         "started again: 2 attempts; from the beginning, at step 1 of 100: it loaded no checkpoint"),
        ([launched(1), *RESTORED, launched(2), *RESTORED, *steps(41, time=50)], False, "at step 41 of 100"),
        ([launched(1), said(), launched(2), said()], True, "reports no steps"),
        # a machine so busy that the first attempt's steps came late
        ([launched(1), said(), launched(2), *steps(3, 4)], True,
         "started again: 2 attempts; at step 3 of 100; no step arrived before the preemption to compare it with"),
    ],
)  # fmt: skip
def test_it_is_said_where_a_program_goes_on(events: list[Event], doubtful: bool, message: str) -> None:
    check = recovered(events)
    assert (check.passed, check.doubtful) == (True, doubtful)
    assert message in check.message


def test_a_preemption_outside_of_the_program_or_none_proves_nothing() -> None:
    [uninterrupted] = check_recovery({}, 1, tell([launched(1)], []))
    [ended] = check_recovery({f"{FAULT_KEY}/000": fault(1)}, 1, tell([launched(1), said()], []))
    outside = recovered([launched(1), said()], attempts=1)
    for check, message in (
        (outside, "nothing proven, because it struck while the program was not running"),
        (uninterrupted, "not interrupted: nothing proven"),
        (ended, "nothing proven, because the program ended before"),
    ):
        assert not check.passed
        assert message in check.message
    [check] = check_recovery({"r/000": fault(0, kind="stockout", times=1)}, 1, Interruption())
    assert (check.passed, check.message) == (True, "stockout (times 1): overcome"), "a fault of the user's"


STANDINS = ROOT / "controller" / "rehearsal" / "standins"
NASH = ["-m", "nash_mhc.train", "--mesh-data=2", "--checkpoint-dir=checkpoints"]


def start(folder: Path, *words: str, worker: int = 0, hosts: str = "127.0.0.1", **more: str) -> subprocess.Popen[str]:
    run = folder / f"run-{worker}"
    run.mkdir(exist_ok=True)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(STANDINS), "WANDB_MODE": "offline", **more}
    environment |= {"TPU_WORKER_ID": str(worker), "TPU_WORKER_HOSTNAMES": hosts, "JAX_NUM_CPU_DEVICES": "1"}
    environment |= {"SLIPWAY_RUN_DIR": str(run)}
    argv, out = [sys.executable, *words], subprocess.PIPE
    return subprocess.Popen(argv, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=300)
    return process.returncode, said


def test_an_unknown_flag_or_a_mesh_that_is_not_the_devices_ends_it(tmp_path: Path) -> None:
    code, said = finish(start(tmp_path, *NASH, "--no-such-flag=1"))
    assert (code, "unrecognized arguments: --no-such-flag" in said) == (2, True)
    code, said = finish(start(tmp_path, *NASH))
    assert (code, "does not make the 1 devices" in said) == (3, True)


def test_a_missing_variable_or_asset_ends_it(tmp_path: Path) -> None:
    simply = ["launch_simply.py", "--experiment_config=lm_test", "--experiment_dir=out"]
    words = [str(STANDINS / simply[0]), *simply[1:]]
    code, said = finish(start(tmp_path, *words))
    assert (code, "not set: SIMPLY_MODELS" in said) == (1, True)
    places = {name: str(tmp_path) for name in ("SIMPLY_MODELS", "SIMPLY_DATASETS", "SIMPLY_VOCABS")}
    code, said = finish(start(tmp_path, *words, **places))
    assert (code, "_METADATA is missing" in said) == (1, True)


@pytest.mark.parametrize("code_of_1", ["a", "b"])
def test_workers_meet_and_an_odd_one_is_named(code_of_1: str, tmp_path: Path) -> None:
    hosts = f"127.0.{7 if code_of_1 == 'a' else 8}.1,127.0.0.1"  # an address of its own: the port is a fixed one
    codes = enumerate(["a", code_of_1])
    both = [start(tmp_path, *NASH, worker=n, hosts=hosts, SLIPWAY_CODE_SHA256=code) for n, code in codes]
    ends = [finish(one) for one in both]
    if code_of_1 == "a":
        assert [code for code, _ in ends] == [0, 0], ends
        assert "checkpoint 8" in ends[0][1]
    else:
        assert [code for code, _ in ends] == [4, 4], ends
        assert "the workers disagree" in ends[1][1]
