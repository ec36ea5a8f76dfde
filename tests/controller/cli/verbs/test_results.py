"""`get` among what strangers have put beside the results: nothing that tools obey is written, and the rest arrives."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.cli import main
from controller.cli.verbs import results
from controller.core.errors import CloudError
from controller.gcp.google_errors import GoogleError
from tests.composed import config_of
from tests.fakes.google import MemoryStorage
from tests.fakes.sessions import open_results_of

RUN = "run-0a1b2c3d"
GOOD = {"result.json": b"{}", "logs/attempt-1/worker-0.log": b"hello", "checkpoints/3/d/0": b"x" * 5000, "empty": b""}
ROGUE = b"[core]\n\tfsmonitor = touch ran\n\trepositoryformatversion = 0\n\tbare = false\n[alias]\n\tst = !touch ran\n"
REPOSITORY = {"HEAD": b"ref: refs/heads/main\n", "config": ROGUE, "objects/x": b"", "refs/heads/x": b"", "index": b""}
BAD = {
    **{f".git/{name}": content for name, content in REPOSITORY.items()},
    **{f"sub/.GIT/{name}": content for name, content in REPOSITORY.items()},
    ".envrc": b"touch ran", "a/conftest.py": b"open('ran', 'w')", "../../out": b"", "/etc/out": b"", "x\x1b[2Jy": b"",
    "__init__.py": b"", "-rf": b"", "a//b": b"", "result.json/x/.vscode/tasks.json": b"",
}  # fmt: skip


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> MemoryStorage:
    """The run's bucket, whose session needs no cloud."""
    return open_results_of(RUN, {**GOOD, **BAD}, monkeypatch)


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {".gitignore"}


def test_get_skips_what_tools_obey_and_writes_the_rest(
    bucket: MemoryStorage, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del bucket
    folder = home.parent / "got"
    assert main.run(["get", RUN, "--to", __file__]) == 2
    assert capsys.readouterr().err.endswith(f"--to {__file__} is a file; name a folder\n")
    assert main.run(["get", RUN, "--to", str(folder)]) == 1
    said = capsys.readouterr()
    assert files_below(folder) == set(GOOD)
    assert {name: (folder / name).read_bytes() for name in GOOD} == GOOD
    assert said.out == f"{len(GOOD)} files in {folder}/; {len(BAD)} skipped\n"
    assert said.err.count("warning: skipped ") == len(BAD)
    assert said.err.endswith(f"what was skipped stays in gs://b/runs/{RUN}\n")
    assert "\x1b" not in said.err
    assert [path.name for path in home.parent.iterdir()] == ["got"], "nothing is outside"
    assert main.run(["get", RUN, "--to", str(folder), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["downloaded"], set(document["files"])) == (0, set(GOOD))
    assert {row["path"] for row in document["skipped"]} == set(BAD)
    if shutil.which("git"):
        for place in (folder, folder / "logs"):
            subprocess.run(["git", "status"], cwd=place, capture_output=True, check=False)
        assert not list(folder.rglob("ran"))


def test_a_program_that_saved_itself_arrives_where_no_python_imports_it(
    bucket: MemoryStorage, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del home
    saved = {"train.py": b"raise SystemExit('imported')", "json.py": b"raise SystemExit('imported')", "Makefile": b"a:"}
    bucket.buckets["b"] = {f"runs/{RUN}/{name}": content for name, content in {**GOOD, **saved}.items()}
    for downloaded in (len(GOOD) + 3, 0):
        assert main.run(["get", RUN, "--to", "got", "--json"]) == 0
        said = capsys.readouterr()
        document = json.loads(said.out)
        assert document["aside"] == {"train.py": "top-level/train.py", "json.py": "top-level/json.py"}
        assert (document["downloaded"], document["skipped"]) == (downloaded, [])
        assert files_below(Path("got")) == set(document["files"]) == {*GOOD, "Makefile", *document["aside"].values()}
        line = (
            "train.py is in got/top-level/train.py: at the top it would be imported by a Python that is started there"
        )
        assert line in said.err.splitlines()
    ran = subprocess.run([sys.executable, "-c", "import json"], cwd="got", capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_bare_repository_is_none_without_its_head(
    bucket: MemoryStorage, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del home
    bucket.buckets["b"] = {f"runs/{RUN}/deep/er/{name}": content for name, content in REPOSITORY.items()}
    assert main.run(["get", RUN, "--to", "got"]) == 1
    assert files_below(Path("got")) == {f"deep/er/{name}" for name in REPOSITORY if name != "HEAD"}
    assert "deep/er/HEAD: would make the folder a git repository" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CloudError("the downloaded content does not match its checksum"), 1),
        (IsADirectoryError(21, "Is a directory"), 1),
        (OSError(36, "File name too long"), 1),
        (OSError(28, "No space left on device"), 2),
        (GoogleError("get", 503, "UNREACHABLE", "no network"), 2),
    ],
)
def test_a_damaged_object_is_skipped_and_a_full_disk_is_not(
    bucket: MemoryStorage, home: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    bucket.buckets["b"] = {f"runs/{RUN}/{name}": content for name, content in GOOD.items()}
    really = results.fetch_file

    def fetch(google: Any, bucket: str, file: Any, *more: Any) -> None:
        if file.path == "logs/attempt-1/worker-0.log":
            raise error
        really(google, bucket, file, *more)

    monkeypatch.setattr(results, "fetch_file", fetch)
    assert main.run(["get", RUN, "--to", str(home.parent / "got")]) == code
    if code == 1:
        assert files_below(home.parent / "got") == set(GOOD) - {"logs/attempt-1/worker-0.log"}


def test_programs_import_what_a_trusted_config_names_and_nothing_of_a_stranger() -> None:
    config = config_of("cloud=local", "program=command", "program.command=[ls]", "code.checks=[a:b]")
    plan: Any = SimpleNamespace(config=config, trusted=True)
    assert results.importable(plan) == {"modules": config.code.modules, "imports": ["a:b"]}
    plan.trusted = False
    assert results.importable(plan) == {"modules": (), "imports": ()}
