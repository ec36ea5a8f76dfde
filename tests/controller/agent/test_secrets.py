"""Secrets on a worker: there for the program, in a file of its owner's, gone at the end, masked in what is printed."""

import json
from pathlib import Path

import pytest

from controller.agent.secrets import SecretMask
from tests.controller.agent.conftest import ProgramRun, wait_for

SECRET = "hf_abcdefghij"
PRINT = "import os, sys, time; print('token', os.environ['HF_TOKEN'], 'end', flush=True)"


def test_the_program_sees_them_and_nothing_else_does(run: ProgramRun) -> None:
    script = f"import json, os; json.dump(dict(os.environ), open('../seen', 'w')); {PRINT}"
    netrc = "machine api.example.com login me password sesame-open\n"
    order = run.start_payload(
        script + "; print(open(os.environ['NETRC']).read())", bucket="b", log_object="l", exit_object="e"
    )
    run.worker.call("start", **order, secrets={"HF_TOKEN": SECRET, "NETRC": netrc})
    end = run.wait_ended()
    masked = f"token {'*' * len(SECRET)} end\nmachine api.example.com login me password {'*' * 11}\n\n"
    assert (end["code"], end["log_tail"]) == (0, masked)
    assert json.loads((run.folder / "seen").read_text())["HF_TOKEN"] == SECRET
    (run.folder / "seen").unlink()
    assert run.worker.bucket.objects["l"].decode() == masked
    left = [p for p in run.worker.home.rglob("*") if p.is_file() and not p.is_symlink() and p.suffix != ".pyz"]
    assert [p for p in left if SECRET.encode() in p.read_bytes() or b"sesame-open" in p.read_bytes()] == []
    assert not (run.folder / "secrets").exists()
    assert not (run.folder / "netrc").exists()


def test_while_it_lives_they_are_in_one_private_file_and_the_stream_is_masked(run: ProgramRun) -> None:
    line = "json.dumps({'step': 1, 'x': os.environ['HF_TOKEN']})"
    metrics = f"print({line}, file=open('../metrics.jsonl', 'w'), flush=True)"
    run.start(f"import json, os; {metrics}; {PRINT}; time.sleep(600)", secrets={"HF_TOKEN": SECRET})
    log, hidden = run.folder / "attempt-1/log", "*" * len(SECRET)
    wait_for(lambda: log.exists() and b"end" in log.read_bytes())
    assert (run.folder / "secrets").stat().st_mode & 0o777 == 0o600
    said = run.worker.watch(run_id=run.run_id, follow=False)
    assert "".join(line.get("log", "") for line in said) == f"token {hidden} end\n"
    assert [line["metrics"] for line in said if "metrics" in line] == [{"step": 1, "x": hidden}]
    assert SECRET not in run.state()["log_tail"]
    written = (log, run.folder / "metrics.jsonl")
    holding = [p for p in run.folder.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]
    assert [p for p in holding if p not in written] == [run.folder / "secrets"]
    run.worker.call("stop", run_id=run.run_id, grace_seconds=1)
    assert SECRET.encode() not in log.read_bytes()
    assert not (run.folder / "secrets").exists()


def test_the_files_that_slipway_reads_are_masked_too_and_a_second_start_brings_none_back(run: ProgramRun) -> None:
    script = "import json, os; json.dump({'x': os.environ['HF_TOKEN']}, open('../summary.json', 'w'))"
    run.start(script, secrets={"HF_TOKEN": SECRET})
    assert run.wait_ended()["summary"] == {"x": "*" * len(SECRET)}
    run.start(script, secrets={"HF_TOKEN": SECRET})
    assert not (run.folder / "secrets").exists()


def test_a_setup_sees_them_and_its_output_is_masked(run: ProgramRun) -> None:
    order = {"run_id": run.run_id, "key": "k", "code": run.code, "venv": "image", "secrets": {"HF_TOKEN": SECRET}}
    said = run.worker.call_error("run_setup", commands=[["sh", "-c", "echo $HF_TOKEN; exit 3"]], **order)
    assert SECRET not in json.dumps(said)
    assert "*" * len(SECRET) in said["detail"]
    assert not (run.folder / "secrets").exists()
    assert SECRET not in (run.folder / "setup.log").read_text()


@pytest.mark.parametrize("gap", [0, 1, (1 << 20) - 5, (1 << 20) + 1])
def test_a_mask_covers_every_place_and_moves_nothing(tmp_path: Path, gap: int) -> None:
    mask = SecretMask({"A": SECRET, "B": "line one\nline two", "C": "short"})
    content = b"x" * gap + SECRET.encode() + b"line two short" + SECRET.encode()
    (log := tmp_path / "log").write_bytes(content)
    assert mask.mask_file(log) == len(content)
    found = log.read_bytes()
    assert len(found) == len(content)
    assert SECRET.encode() not in found
    assert found.endswith(b"*" * 8 + b" short" + b"*" * len(SECRET))
    assert mask.apply(content) == found


def test_half_a_secret_waits_for_the_rest(tmp_path: Path) -> None:
    mask = SecretMask({"A": SECRET})
    (log := tmp_path / "log").write_text(f"said {SECRET[:5]}")
    assert mask.mask_file(log) == len("said ")
    assert mask.partial_length(b"said " + SECRET[:1].encode()) == 1
    assert mask.partial_length(b"said") == 0
    assert not SecretMask({"A": "tiny"})
