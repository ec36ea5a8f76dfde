"""A build on a worker: in a copy of the code, begun again after a kill, and on record only once it is complete."""

import hashlib
import json
import signal
from pathlib import Path
from typing import Any

from controller.agent.process import start_time
from tests.controller.agent.conftest import AgentWorker, wait_for

MAKE = """
import os, pathlib, sys, time
out = pathlib.Path(sys.argv[1])
print("token", os.environ.get("TOKEN"))
(out / "sub").mkdir()
(out / "sub/a").write_text("half")
pathlib.Path("beside").write_text("not in the code")
pathlib.Path(sys.argv[2], f"began-{os.getpid()}").touch()
while not pathlib.Path(sys.argv[2], "go").exists():
    time.sleep(0.02)
(out / "sub/a").write_text("whole")
(out / "b").write_text("b")
sys.exit(int(pathlib.Path(sys.argv[2], "go").read_text() or 0))
"""


def order(worker: AgentWorker, folder: Path, *argv: str, **more: Any) -> dict[str, Any]:
    code = worker.upload_code({"make.py": MAKE})
    words = [*(argv or ("python", "make.py", "{output}", str(folder)))]
    asked = {"bucket": "b", "prefix": "assets/t-1", "argv": words, "code": code["tree"], "venv": "none"}
    return {**asked, "get_code": code, **more}


def test_a_build_that_is_killed_begins_again(worker: AgentWorker, tmp_path: Path) -> None:
    """Also what it left running is ended, and nothing of it counts."""
    asked = order(worker, tmp_path)
    first = worker.start_command("build_asset", **asked)
    [began] = wait_for(lambda: list(tmp_path.glob("began-*")))
    wait_for(lambda: (worker.root / "builds/t-1/process.json").is_file())
    first.kill()
    first.communicate()
    assert not [name for name in worker.bucket.objects if name.startswith("assets/")]
    second = worker.start_command("build_asset", **asked)
    wait_for(lambda: len(list(tmp_path.glob("began-*"))) == 2)
    wait_for(lambda: start_time(int(began.name.partition("-")[2])) is None)
    (tmp_path / "go").write_text("0")
    code, said = worker.finish_command(second)
    assert (code, said[0], said[-1]) == (0, {"bytes": 0}, {"done": True})
    stored = {name: content for name, content in worker.bucket.objects.items() if name.startswith("assets/t-1/")}
    manifest = json.loads(stored.pop("assets/t-1/manifest.json"))
    assert stored == {"assets/t-1/sub/a": b"whole", "assets/t-1/b": b"b"}
    assert manifest == {name.removeprefix("assets/t-1/"): hashlib.sha256(c).hexdigest() for name, c in stored.items()}
    assert not (worker.root / "builds/t-1").exists()
    assert sorted(p.name for p in (worker.root / "code" / asked["code"]).iterdir()) == ["make.py"]
    worker.bucket.requests.clear()
    assert worker.run_command("build_asset", **asked)[0] == 0
    assert [r for r in worker.bucket.requests if r.startswith("POST")] == []


def test_a_build_that_has_ended_is_copied_and_not_run_again(worker: AgentWorker, tmp_path: Path) -> None:
    (tmp_path / "go").write_text("0")
    asked = order(worker, tmp_path)
    worker.bucket.faults = [404, None, None, 403]  # look for the manifest, the code, the first file, the second
    code, said = worker.run_command("build_asset", **asked)
    assert code == 1, said
    assert "assets/t-1/manifest.json" not in worker.bucket.objects
    worker.bucket.requests.clear()
    assert worker.run_command("build_asset", **asked)[0] == 0
    assert len(list(tmp_path.glob("began-*"))) == 1
    posts = [r for r in worker.bucket.requests if r.startswith("POST")]
    assert len(posts) == 2
    assert posts[-1] == "POST assets/t-1/manifest.json"


def test_a_build_that_fails_shows_the_end_of_its_log(worker: AgentWorker, tmp_path: Path) -> None:
    (tmp_path / "go").write_text("3")
    code, said = worker.run_command("build_asset", **order(worker, tmp_path, secrets={"TOKEN": "hf_planted"}))
    assert code == 1
    command = f"`python make.py '{{output}}' {tmp_path}`"
    assert said[-1] == {
        "error": f"{command} ended with code 3; its log is gs://b/builds/t-1.log", "detail": "token **********",
    }  # fmt: skip
    assert worker.bucket.objects["builds/t-1.log"] == b"token **********\n"
    assert not [name for name in worker.bucket.objects if name.startswith("assets/")]
    _, said = worker.run_command("build_asset", **order(worker, tmp_path, "true", "{output}"))
    assert said[-1]["error"] == "`true '{output}'` wrote no file to {output}; its log is gs://b/builds/t-1.log"
    _, said = worker.run_command("build_asset", **order(worker, tmp_path, "no-such-program", "{output}"))
    assert said[-1]["error"] == "`no-such-program '{output}'` cannot start here: No such file or directory"
    _, said = worker.run_command("build_asset", **order(worker, tmp_path, "sh", "-c", "kill -KILL $$", "{output}"))
    assert f"ended with code {-signal.SIGKILL}" in said[-1]["error"]
