"""A whole run whose words, variables, files and folders are hostile, and one that fails while it holds secrets."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import threading
from pathlib import Path

import psutil
import pytest
import yaml

from controller.localcloud import lifecycle
from tests.controller.conftest import SlipwayCli
from tests.hostile import CANARY, HOSTILE_STRINGS, TOUCH_COMMAND

ONE = "tpu.accelerator_type=v5litepod-4"
REFUSED = ("\0", "\ud800", "${", "{assets", "é" * 1000)
CARRIED = [text for text in HOSTILE_STRINGS if not any(part in text for part in REFUSED)]
"""What is not refused; OmegaConf has a meaning of its own for the dollar with a brace."""
GOT = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open('got.json', 'w'))"
PLANTED = "planted_0123456789"
PASSWORD = "planted_password"


def experiment(slipway: SlipwayCli, content: dict) -> str:
    """The user's own file, for what Hydra's command line has no words for."""
    folder = slipway.repository / "slipway" / "experiment"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own.yaml").write_text("# @package _global_\n" + yaml.safe_dump(content, default_style='"'))
    return "+experiment=own"


@pytest.mark.e2e
def test_nothing_of_a_config_meets_a_shell(
    slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slipway.home = tmp_path / f"-rf ;{TOUCH_COMMAND} $({TOUCH_COMMAND})`{TOUCH_COMMAND}`'\" [a] é\n{TOUCH_COMMAND}"
    slipway.packages = "none"
    monkeypatch.setenv("SLIPWAY_HOME", str(slipway.home))
    (slipway.repository / f"$({TOUCH_COMMAND});.py").write_text("")
    (slipway.repository / "-rf").write_text("")
    variables = {f"V{number}": text for number, text in enumerate(CARRIED)}
    command = ["python3", "-c", GOT, *CARRIED]
    content = {
        "program": {"command": command, "setup": [["true", text] for text in CARRIED[:9]]},
        "env": {"vars": variables},
    }
    code, out, err = slipway("up", ONE, "cleanup.on_success=keep", "program=command", experiment(slipway, content))
    assert (code, err) == (0, ""), out
    [got] = slipway.home.glob("localcloud/nodes/*/worker-0/home/.slipway/runs/*/work/got.json")
    words, environment = json.loads(got.read_text())
    bucket = "gs://slipway-local-slipway-us-central1"
    assert words == [text.replace("{bucket}", bucket) for text in CARRIED]
    assert {name: environment[name] for name in variables} == {
        name: text.replace("{bucket}", bucket) for name, text in variables.items()
    }
    assert (got.parent / "-rf").exists()
    exports = lifecycle.format_exports(slipway.home / "localcloud")
    shell = ["/bin/sh", "-c", f'{exports}\nprintf %s "$CLOUDSDK_CONFIG"']
    shown = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert shown == str(slipway.home / "localcloud/gcloud")
    assert [path for path in [*tmp_path.rglob("*"), *Path.cwd().iterdir()] if path.name == CANARY] == []


def test_words_for_a_shell_are_quoted(tmp_path: Path) -> None:
    """As `exec`, `ssh` and the messages that repeat a command do it."""
    texts = [text for text in CARRIED if len(text) < 1000]
    words = ["/bin/sh", "-c", shlex.join(["printf", "%s\\0", *texts])]
    shown = subprocess.run(words, cwd=tmp_path, capture_output=True, check=True).stdout
    assert shown.split(b"\0") == [*(text.encode() for text in texts), b""]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.deep
@pytest.mark.e2e
def test_a_failing_run_tells_no_secret(slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its setup fails first, then its program, with the secrets in what they print and raise."""
    (tmp_path / "netrc").write_text(f"machine example.com login me password {PASSWORD}\n")
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    says = "import os, sys, time; print(os.environ['HF_TOKEN']); sys.stderr.write(open(os.environ['NETRC']).read())"
    wait = f"while not os.path.exists({str(tmp_path / 'looked')!r}): time.sleep(0.02)"
    fails = f"{says}\n{wait}\nraise RuntimeError(os.environ['HF_TOKEN'] + {PASSWORD[:8]!r} + {PASSWORD[8:]!r})"
    lines: list[str] = []
    holders: list[dict[str, str]] = []
    ended = threading.Event()

    def look() -> None:
        """Every argument list of the machine, and the environments of the workers' processes."""
        while not ended.wait(0.02):
            for process in psutil.process_iter(["cmdline", "environ"]):
                lines.append(" ".join(process.info["cmdline"] or []))
                environ = process.info["environ"] or {}
                if "SLIPWAY_LOCALCLOUD_WORKER" in environ and PLANTED in environ.values():
                    holders.append(environ)
                    (tmp_path / "looked").touch()

    looking = threading.Thread(target=look)
    looking.start()
    said = ""
    try:
        for part in ("setup", "command"):
            program = {
                "command": ["python3", "-c", fails],
                "setup": [["python3", "-c", fails]] if part == "setup" else [],
            }
            code, out, err = slipway(
                "up", ONE, "recovery.max_program_failures=0", "recovery.max_without_progress=1", "program=command",
                experiment(slipway, {"program": program}),
            )  # fmt: skip
            said += out + err
            assert code != 0, part
    finally:
        ended.set()
        looking.join()
    slipway("logs", ONE, "program=command", "+experiment=own")
    slipway("status", ONE, "program=command", "+experiment=own")
    assert "RuntimeError" in said
    assert "*" * len(PLANTED) in said
    cloud = slipway.cloud()
    known = json.dumps([cloud.requests(), cloud.get("state")])
    for secret in (PLANTED, PASSWORD):
        assert secret not in said
        assert secret not in known
        assert not [line for line in lines if secret in line]
        files = [path for path in slipway.home.rglob("*") if path.is_file()]
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
    assert holders
    assert all("SLIPWAY_RUN_ID" in environ for environ in holders), "only what the run started"
    assert PLANTED in os.environ.values()
