"""The GitHub workflows and the action: what they may do, and their shell steps as a runner would execute them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.paths import ROOT

GITHUB = ROOT / ".github"
ACTION_FOLDER = GITHUB / "actions" / "rehearse"
ACTION: dict[str, Any] = yaml.safe_load((ACTION_FOLDER / "action.yml").read_text())
WORKFLOWS: dict[str, dict[Any, Any]] = {
    file.stem: yaml.safe_load(file.read_text()) for file in sorted((GITHUB / "workflows").glob("*.yml"))
}
STEPS = [
    *ACTION["runs"]["steps"],
    *(step for flow in WORKFLOWS.values() for job in flow["jobs"].values() for step in job["steps"]),
]
PLAN = {
    "run": "mine-0123abcd", "pod": "slipway-v5litepod-16-0ef9e1", "usd_per_hour": 3.9, "usd_per_hour_network": 0.01,
    "resources": [{}, {}], "estimate": {"usd": 1.5, "hours": 0.25, "basis": "2e12 FLOPs"},
    "findings": [
        {"check": "credentials", "severity": "warning", "key": "cloud", "words": "no Google credentials"},
        {"check": "x", "severity": "warning", "key": "loop", "words": "ask @someone about <b>"},
    ],
}  # fmt: skip
SLIPWAY = """
import json, os, sys
from pathlib import Path
state = Path({state!r})
with (state / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps([sys.argv[1:], sorted(os.environ)]) + "\\n")
document = json.loads((state / f"{{sys.argv[1]}}.json").read_text())
print('{{"event": "step_done"}}' if sys.argv[1] == "rehearse" else "", end="\\n" if sys.argv[1] == "rehearse" else "")
print(json.dumps(document)) if document else print("error: loop.step: unknown key", file=sys.stderr)
"""
GH = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> "{state}/gh.log"
case "$*" in *--jq*) cat "{state}/known" ;; esac
"""


def _run_step(name: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    [step] = [step for step in ACTION["runs"]["steps"] if step.get("name") == name]
    script = folder / "step.sh"
    script.write_text(step["run"])
    argv = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]  # as a runner does for `shell: bash`
    return subprocess.run(argv, cwd=folder, env=variables, capture_output=True, text=True, check=False)


@pytest.fixture
def runner(tmp_path: Path) -> dict[str, str]:
    """Variables of a runner, on which `slipway` and `gh` are stand-ins that record their calls."""
    (tools := tmp_path / "tools").mkdir()
    (tools / "python").symlink_to(sys.executable)
    (tools / "gh").write_text(GH.format(state=tmp_path))
    (tools / "gh").chmod(0o755)
    (package := tmp_path / "packages" / "slipway").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(SLIPWAY.format(state=str(tmp_path)))
    (tmp_path / "known").write_text("")
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    (tmp_path / "rehearse.json").write_text(json.dumps({"facts": [{"proven": True, "words": "preempted, resumed"}]}))
    return {
        "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(package.parent), "RUNNER_TEMP": str(tmp_path),
        "GITHUB_ACTION_PATH": str(ACTION_FOLDER), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "GITHUB_OUTPUT": str(tmp_path / "outputs"), "GITHUB_REPOSITORY": "me/mine", "MINUTES": "5",
        "WORDS": "+experiment=mine 'run.name=two words' loop.steps=$(touch /tmp/x)",
    }  # fmt: skip


def _outputs(tmp_path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (tmp_path / "outputs").read_text().splitlines())


def test_a_rehearsal_becomes_a_report(runner: dict[str, str], tmp_path: Path) -> None:
    done = _run_step("Rehearse", tmp_path, **runner)
    assert done.returncode == 0, done.stderr
    outputs = _outputs(tmp_path)
    report = Path(outputs["report"]).read_text()
    assert outputs["passed"] == "true"
    assert report.startswith(f"{outputs['marker']}\n### ✓ ")
    said = ("$3.90 per hour", "$1.50, 0.2 h", "2 resources", "✓ preempted, resumed", "ask @\u200bsomeone about &lt;b>")
    assert all(words in report for words in said)
    assert "no Google credentials" not in report
    assert report in (tmp_path / "summary.md").read_text()
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    words = ["--json", "+experiment=mine", "run.name=two words", "loop.steps=$(touch", "/tmp/x)"]
    assert [call for call, _ in calls] == [["plan", *words], ["rehearse", *words]], "no shell reads the words"
    assert [name for _, names in calls for name in names if name.startswith("GITHUB_")] == []


@pytest.mark.parametrize(
    ("file", "document", "said"),
    [
        ("plan", {}, "The plan failed:"),
        ("rehearse", {}, "error: loop.step: unknown key"),
        ("rehearse", {"facts": [{"proven": False, "words": "2 nodes are left"}]}, "- ✗ 2 nodes are left"),
    ],
)
def test_a_failure_fails_the_job_and_is_explained(
    runner: dict[str, str], tmp_path: Path, file: str, document: dict[str, Any], said: str
) -> None:
    (tmp_path / f"{file}.json").write_text(json.dumps(document))
    done = _run_step("Rehearse", tmp_path, **runner)
    outputs = _outputs(tmp_path)
    assert said in Path(outputs["report"]).read_text()
    assert (done.returncode, outputs["passed"]) == ((1, "false") if file == "rehearse" else (0, "true"))


@pytest.mark.parametrize(
    ("known", "method"),
    [("", "POST repos/me/mine/issues/7/comments"), ("99\n", "PATCH repos/me/mine/issues/comments/99")],
)
def test_one_comment_is_kept_up_to_date(runner: dict[str, str], tmp_path: Path, known: str, method: str) -> None:
    (tmp_path / "known").write_text(known)
    marker, report = "<!-- slipway rehearsal ab -->", tmp_path / "report.md"
    done = _run_step("Comment", tmp_path, **runner, NUMBER="7", REPORT=str(report), MARKER=marker, GH_TOKEN="t")
    assert done.returncode == 0, done.stderr
    listed, sent = (tmp_path / "gh.log").read_text().splitlines()
    assert f'startswith("{marker}")' in listed
    assert method in sent
    assert f"body=@{report}" in sent


def test_the_workflows_may_do_little() -> None:
    for name, flow in WORKFLOWS.items():
        triggers = flow[True]  # YAML 1.1 reads the key `on` as true
        usual = {"push", "pull_request", "schedule"}
        assert set(triggers) <= usual, f"{name}: no token that may write for code of strangers"
        allowed = {"contents": "read"} | ({"pull-requests": "write"} if name == "rehearse" else {})
        assert flow["permissions"] == allowed
        assert not any("permissions" in job for job in flow["jobs"].values())
        assert all("timeout-minutes" in job for job in flow["jobs"].values())
    texts = [file.read_text() for file in (GITHUB / "workflows").glob("*.yml")]
    assert not any("secrets." in text for text in texts)


def test_every_lock_is_compared_with_known_vulnerabilities_each_night() -> None:
    audit = WORKFLOWS["audit"]
    [nightly] = audit[True]["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* \*", nightly["cron"])
    steps = [step["run"] for step in audit["jobs"]["packages"]["steps"] if "run" in step]
    assert any(re.search(r"pip install pip-audit==[\d.]+$", step) for step in steps)
    [by_lock] = [step for step in steps if "--require-hashes" in step]
    locks = {str(file.relative_to(ROOT)) for file in (ROOT / "conf").glob("*.txt") if "--hash=" in file.read_text()}
    assert set(re.findall(r"conf/\w+\.txt", by_lock)) == locks
    assert len(locks) >= 4
    assert re.search(r"pip-audit --strict .*\|\| failed=1.*exit \"\$failed\"", by_lock, re.DOTALL), (
        "one finding fails it"
    )


def test_the_newest_of_everything_is_tried_each_night_by_the_one_command() -> None:
    nightly = WORKFLOWS["nightly"]
    [night] = nightly[True]["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* \*", night["cron"])
    job = nightly["jobs"]["newest"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert "apparmor" in commands[0]
    assert commands[1:] == ["python -m pip install -e '.[dev]'", "python -m tests.newest --blame"]
    tested = WORKFLOWS["tests"]["jobs"]["linux"]["strategy"]["matrix"]["python"]
    assert set(job["strategy"]["matrix"]["python"]) <= set(tested), "what fails at night passes by day"
    assert not any("continue-on-error" in step for step in [job, *job["steps"]])


def test_other_actions_are_pinned_and_get_no_credentials_and_no_expression_reaches_a_shell() -> None:
    """Values of a pull request, such as a branch's name, would be executed."""
    assert [step["run"] for step in STEPS if "${{" in step.get("run", "")] == []
    for step in STEPS:
        uses = step.get("uses", "./")
        assert uses.startswith("./") or re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", uses), uses
        if "checkout" in uses:
            assert step["with"]["persist-credentials"] is False


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("script", [step["run"] for step in STEPS if "run" in step])
def test_shell_steps_parse(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_readme_commands_are_tested() -> None:
    install = ("-e . && python -m controller +experiment=quickstart", "-e '.[dev]' && python -m pytest")
    commands = {f"python -m pip install uv && python -m uv pip install {words}" for words in install}
    assert commands <= {step["run"].strip() for step in STEPS if "run" in step}
    assert all(command in (ROOT / "README.md").read_text() for command in commands)
