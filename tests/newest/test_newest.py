"""The table, the exit code and the blame of `python -m tests.newest`, with a machine that installs nothing."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.newest import __main__ as newest

LOCKED = {"good": "1.0", "bad": "2.0", "same": "3.0", "absent": "-"}
NEWEST = {"good": "1.1", "bad": "2.1", "same": "3.0", "absent": "0.1"}


@dataclass
class Machine:
    """Says of each command what it is told to; the tests fail while any of `guilty` is at its newest."""

    guilty: set[str] = field(default_factory=set)
    unimportable: dict[str, str] = field(default_factory=dict)
    cannot_install: str = "\0"
    quick_start: int = 0
    commands: list[list[str]] = field(default_factory=list)
    installed: dict[str, str] = field(default_factory=dict)

    def __call__(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.commands.append(list(argv))
        code, said = self._run(list(argv))
        return subprocess.CompletedProcess(argv, code, said)

    def _run(self, argv: list[str]) -> tuple[int, str]:
        if "venv" in argv:
            return 0, ""
        if "pip" in argv:
            if self.cannot_install in argv:
                return 1, ""
            self.installed = {**NEWEST, **dict(word.split("==") for word in argv if "==" in word)}
            return 0, ""
        if newest.IMPORT in argv:
            found = {name: (self.installed[name], self.unimportable.get(name, "")) for name in argv[3:]}
            return 0, f"a library greets\n{json.dumps(found)}\n"
        if "pytest" in argv:
            failing = [name for name in self.guilty if self.installed[name] == NEWEST[name]]
            [cache] = [word.partition("=")[2] for word in argv if word.startswith("cache_dir=")]
            kept = Path(cache, "v", "cache", "lastfailed")
            assert "--last-failed" not in argv or json.loads(kept.read_text()) == {"t": True}, "they are kept each time"
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps({"t": True} if failing else {}))
            return bool(failing), ""
        assert argv[-1] == "+experiment=quickstart"
        return self.quick_start, ""

    def count(self, word: str) -> int:
        return sum(word in argv for argv in self.commands)


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest, "dependencies", lambda: dict.fromkeys(LOCKED, "") | {"same": " (<4)"})
    monkeypatch.setattr(newest, "locked_version", LOCKED.__getitem__)


def run(capsys: pytest.CaptureFixture[str], machine: Machine, *words: str) -> tuple[int, list[str]]:
    code = newest.main(words, machine)
    return code, capsys.readouterr().out.splitlines()


def test_what_passes_is_a_table_and_zero(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run(capsys, machine := Machine())
    assert code == 0
    assert lines == [
        "package  locked  newest    verdict",
        "good     1.0     1.1       newer, passed",
        "bad      2.0     2.1       newer, passed",
        "same     3.0     3.0 (<4)  same",
        "absent   -       0.1       newer, passed",
        "passed: the default tests and the quick start",
    ]
    [install] = [argv for argv in machine.commands if "pip" in argv]
    assert install[install.index("--prerelease") : install.index("--prerelease") + 3] == [
        "--prerelease", "allow", "--upgrade",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "verdict", "last"),
    [
        (Machine({"bad"}), "newer, tests failed", "tests failed"),
        (Machine(quick_start=1), "newer, quick start failed", "quick start failed"),
        (Machine({"bad"}, quick_start=5), "newer, tests and quick start failed", "tests and quick start failed"),
        (Machine(unimportable={"bad": "bad: no"}), "cannot be imported: bad: no", "cannot be imported: bad"),
    ],
)  # fmt: skip
def test_what_fails_is_one(capsys: pytest.CaptureFixture[str], machine: Machine, verdict: str, last: str) -> None:
    code, lines = run(capsys, machine)
    assert code == 1
    assert lines[2].endswith(verdict)
    assert lines[-1] == f"failed: the default tests and the quick start: {last}"
    assert machine.count("pytest") == 1


def test_packages_that_cannot_be_installed_together_are_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, [line] = run(capsys, machine := Machine(cannot_install="--upgrade"))
    assert (code, machine.count("pytest")) == (1, 0)
    assert line.startswith("the newest packages cannot be installed together")


def test_blame_holds_one_package_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run(capsys, machine := Machine({"bad"}, cannot_install="good==1.0"), "--blame")
    assert code == 1
    assert [line.split(maxsplit=3)[3] for line in lines[-5:-1]] == [
        newest.CANNOT_HOLD, newest.BLAMED, "(<4)  same", "newer, tests failed",
    ]  # fmt: skip
    assert lines[-1].endswith(": tests failed")
    assert machine.count("--last-failed") == 1, "only what failed, and only with a package held"
    assert machine.installed == NEWEST


def test_two_packages_that_fail_by_themselves_are_no_ones_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run(capsys, machine := Machine({"good", "bad"}), "--blame")
    assert (code, machine.count("--last-failed")) == (1, 2)
    assert lines[-1].endswith("tests failed; no package alone is the cause")
    assert run(capsys, machine := Machine(), "--blame")[0] == machine.count("--last-failed") == 0


def test_arguments_choose_the_tests_and_leave_out_the_quick_start(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = run(capsys, machine := Machine(quick_start=1), "--", "tests/conf", "-k", "x")
    assert code == 0
    assert [argv[-3:] for argv in machine.commands if "pytest" in argv] == [["tests/conf", "-k", "x"]]
    assert lines[-1] == "passed: pytest tests/conf -k x, without the quick start"


def test_the_dependencies_are_those_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = newest.dependencies()
    assert {"jax", "hydra-core", "etils", "pytest"} <= set(found)
    assert found["hydra-core"] == " (<1.5)"
    versions = {name: newest.locked_version(name) for name in found}
    assert all(text == "-" or text[0].isdigit() for text in versions.values()), versions
    assert f"jax=={versions['jax']} " in (newest.ROOT / "conf" / "requirements.txt").read_text()


def test_a_command_is_shown_and_kept(capfd: pytest.CaptureFixture[str]) -> None:
    done = newest.run_here(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.returncode, done.stdout) == (3, "out\nerr\n")
    assert capfd.readouterr().out == "out\nerr\n"
