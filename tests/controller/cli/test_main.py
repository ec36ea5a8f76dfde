"""The command as a process: a deleted folder and an output that cannot be written end it with one line."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from controller.cli import main
from tests.paths import ROOT

PROGRAM = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from controller.__main__ import main; sys.exit(main())"


def slipway(*words: str, cwd: Path | None = None, stdout: str = "") -> tuple[int, str]:
    """Exit code and stderr of the command in a process of its own."""
    with open(stdout or os.devnull, "w") as out:  # noqa: PTH123
        argv = [sys.executable, "-P", "-c", PROGRAM, *words]
        done = subprocess.run(argv, cwd=cwd, stdout=out, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", [["plan", "+experiment=quickstart"], ["runs"], ["--version"]])
def test_a_deleted_folder(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    script = f"import os; os.chdir({str(tmp_path / 'gone')!r}); os.rmdir({str(tmp_path / 'gone')!r}); {PROGRAM}"
    done = subprocess.run([sys.executable, "-P", "-c", script, *words], capture_output=True, text=True)
    said = "error: the working folder has been deleted; change to one that exists\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize(
    "words",
    [
        "model={}",
        "cloud.kind={}",
        "cloud=here cloud.folder=/tmp/{}",
        "cloud=local -- python -m {}",
        "cloud=local -- {}",
    ],
)
def test_a_word_that_no_file_can_have_as_its_name(words: str, tmp_path: Path) -> None:
    code, err = slipway("plan", *words.format("a" * 300).split(), cwd=tmp_path)
    said = err.splitlines()[-1]
    assert code == 2
    assert said == f"error: {'a' * 60}… is too long for the name of a file"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.parametrize("words", [["--version"], ["help"], ["runs", "--json"]])
def test_a_full_disk(words: list[str], tmp_path: Path) -> None:
    said = "error: cannot write the output: No space left on device\n"
    assert slipway(*words, cwd=tmp_path, stdout="/dev/full") == (1, said)


@pytest.mark.parametrize("words", [["plan", "+experiment=quickstart"], ["runs"], ["status"], ["localcloud", "stop"]])
def test_a_state_folder_of_nobody_and_none_at_all(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", "~nobody-here/state")
    said = "error: SLIPWAY_HOME: this machine has no user 'nobody-here'; write the path in full"
    code, err = slipway(*words, cwd=tmp_path)
    assert (code, " ".join(err.split())) == (2, said)
    monkeypatch.setenv("SLIPWAY_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (work := tmp_path / "work").mkdir()
    slipway(*words, cwd=work)
    assert list(work.iterdir()) == [], "an empty variable is none"


@pytest.mark.parametrize(
    ("closed", "words", "code"), [(">&-", "version", 0), (">&-", "runs", 0), ("2>&-", "help plam", 2)]
)
def test_an_output_that_the_shell_has_closed(closed: str, words: str, code: int, tmp_path: Path) -> None:
    env = {**os.environ, "SLIPWAY_HOME": str(tmp_path)}
    line = f"{sys.executable} -P -c '{PROGRAM.replace(chr(39), chr(34))}' {words} {closed}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("verb", ["up", "plan", "status", "down"])
def test_a_sweep_and_a_run_are_not_meant_at_once(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([verb, "-m", "--run", "quickstart-0b1c2d3e", "run.seed=1,2"]) == 2
    assert capsys.readouterr().err == "error: -m acts on a sweep and --run on one run: give one of them\n"


@pytest.mark.parametrize(
    "words",
    [
        "env.secrets.KEY = sk-planted", "--env.secrets.KEY=sk-planted", "env.secrets.KEY:sk-planted",
        "env.secrets..KEY=sk-planted", "env.secret={KEY: sk-planted}", "env.secrets={KEY=sk-planted}",
        "notify=https://h/planted", "notify.webhok=https://h/planted", "--webhook https://h/planted",
        "--slack-url=https://h/planted", "--hf-token sk-planted", "-m env.secrets.KEY=sk-planted,other",
    ],
)  # fmt: skip
def test_no_error_shows_a_value_that_may_be_a_secret(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", "+experiment=quickstart", *shlex.split(words.replace("{KEY: ", "{KEY:\\ "))]) == 2
    said = "".join(capsys.readouterr())
    assert "error: " in said
    assert "planted" not in said
