"""What words start on a worker, and why it could not, as the words after `--` and as program.command."""

import subprocess
import sys
from pathlib import Path

import pytest

from controller.checks.project import command_can_start
from controller.core.errors import ConfigError
from controller.inputs.own_program import OwnProgram, quote_words
from controller.inputs.program_words import program_doubt
from tests.composed import config_of


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "train.py").write_text("print()\n")
    return tmp_path


OF_CONTENT = ("is empty, ", "no Makefile", ", line ", "null", ": line ", "imports ", "never closed", "nothing waits")
"""Said once the config is composed: it names the workers' Python and packages."""
PROGRAMS = {
    "plain.py": "import jax\n",
    "bad.py": "def f(:\n",
    "late.py": "x = 1\nreturn x\n",
    "null.py": "\0",
    "lacks.py": "import beside\nfrom nosuchpkg import x\n",
    "beside.py": "",
    "bad.sh": "if true; then\n",
    "windows.sh": "#!/bin/bash\r\nls\r\n",
    "bare.sh": "ls\n",
    "odd.pl": "#!/usr/bin/env -S pelr -w\n",
    "home.pl": "#!/home/me/venv/bin/python\n",
    "lab/__main__.py": "x = = 1\n",
    "lab/alone.py": "import beside\n",
    "near.py": "import numpyy\n",
    "lab/inner.py": "import beside\nfrom lab.inner import y\n",
    "book.ipynb": '{"cells": []}',
    "job.slurm": "ls\n",
    "elsewhere.py": "import sys\nsys.path.append('x')\nimport nosuchpkg\n",
}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ehco", "hi"], "error ehco: there is no such program on this machine"),
        (["python", "trian.py"], "error trian.py: there is no such file in "),
        (["env", "LR=1", "python3", "trian.py"], "error trian.py: there is no such file in "),
        (["timeout", "60", "./trian.py"], "error ./trian.py: there is no such file in "),
        (["bash", "-c", "python trian.py --out a"], "error trian.py: there is no such file in "),
        (["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", "lab", "python", "a.py"], "error a.py: there is no"),
        ([""], "error the program's name is empty"),
        (["timeout", "python", "plain.py"], "error timeout: how long stands before the program: timeout 60m python pl"),
        (["timeout", "./plain.sh"], "error timeout: how long stands before the program: timeout 60m ./plain.sh"),
        (["timeout", "1h", "python", "plain.py"], None),
        (["timeout", "-s", "INT", "60", "python", "plain.py"], None),
        (["python", "a" * 300], f"error {'a' * 300}: there is no such file in "),
        (["python", "books"], "error books: is a folder without __main__.py; name a file of it"),
        (["python", "beside.py"], "warning beside.py: is empty, so the run ends at once"),
        (["make", "train"], "warning make: there is no Makefile in "),
        (["make", "-C", "lab"], None),
        (["python"], "error python: has nothing to run; name a file, such as python train.py"),
        (["bash"], "error bash: has nothing to run; name a file, such as bash run.sh"),
        (["bash", "-l"], "error bash -l: has nothing to run; name a file, such as bash run.sh"),
        (["zsh", "-s"], "error zsh -s: has nothing to run; name a file, such as zsh run.sh"),
        (["python", "-u"], "error python -u: has nothing to run; name a file, such as python train.py"),
        (["python3", "-"], "error python3 -: has nothing to run; name a file, such as python3 train.py"),
        (["python", "-V"], None),
        (["python", "-m", "nosuch.train"], "error -m nosuch.train: "),
        (
            ["plain.py", "--x"],
            "error plain.py: is a file here, and no program on the workers' PATH; use: python plain.py",
        ),
        (["./plain.py"], "error ./plain.py: cannot be executed, for it has no x bit; use: python ./plain.py"),
        (["./windows.sh"], "error ./windows.sh: its first line ends as on Windows"),
        (
            ["./bare.sh"],
            "error ./bare.sh: cannot be executed: it is no program for Linux and has no #! line; use: bash",
        ),
        (["bash", "plain.py"], "error plain.py: is not for bash; use: python plain.py"),
        (["python", "bare.sh"], "error bare.sh: is not for python; use: bash bare.sh"),
        (["./lab"], "error ./lab: is a folder, which only python starts; use: python ./lab"),
        (["python", "bad.py"], "error bad.py, line 1: "),
        (["python", "late.py"], "error late.py, line 2: 'return' outside function"),
        (["python", "-u", "null.py"], "error null.py"),
        (["python", "lab"], "error __main__.py, line 1: "),
        (["python", "-m", "lab"], "error __main__.py, line 1: "),
        (["bash", "bad.sh"], "error bad.sh: line "),
        (["python", "lacks.py"], "line 2: imports nosuchpkg, and this machine, whose packages the workers have, has"),
        (["bash", "-lc", "python trian.py"], "error trian.py: there is no such file in "),
        (["uv", "run", "--with", "jax", "trian.py"], "error trian.py: there is no such file in "),
        (["pyhton", "plain.py"], "error pyhton: there is no such program; did you mean python?"),
        (["uv", "run", "bad.py"], "error bad.py, line 1: "),
        (["torchrun", "--nproc=8", "bad.py"], "; Slipway itself starts a program on every worker: python bad.py"),
        (["mpirun", "-n", "4", "python", "lab/a.py", "x"], "a program on every worker: python lab/a.py x"),
        (
            ["python", "-m", "lab/train.py"],
            "error -m lab/train.py: is a file, not a module's name; use: python -m lab.tr",
        ),
        (["python", "-u", "-c"], "error -c: nothing is behind it"),
        (["./odd.pl"], "error ./odd.pl: its #! line names pelr, and there is no such program on this machine"),
        (["./home.pl"], "error ./home.pl: its #! line names /home/me/venv/bin/python, which the workers lack"),
        (
            ["python", "near.py"],
            "line 1: imports numpyy, and this machine, whose packages the workers have, has no such package; did you m",
        ),
        (["python", "lab/alone.py"], "alone.py, line 1: imports beside, and this machine, whose packages the workers"),
        (["python", "src/plain.py"], "error src/plain.py: there is no such file in "),
        (["python", "x/alone.py"], "; did you mean lab/alone.py?"),
        (["python", "alone.py"], "; did you mean lab/alone.py?"),
        (["python", "src/palin.py"], ", which has plain.py"),
        (
            ["python", "book.ipynb"],
            "error book.ipynb: is a notebook, no program; jupyter nbconvert --to script book.ip",
        ),
        (["./book.ipynb"], "error ./book.ipynb: is a notebook, no program; jupyter nbconvert --to script ./book.ipynb"),
        (["book.ipynb"], "error book.ipynb: is a notebook, no program; "),
        (
            [".venv/bin/python", "plain.py"],
            "error .venv/bin/python: the workers have no such file, but a Python of the",
        ),
        (["env", "A=1", "venv/bin/python3", "-m", "lab"], "error venv/bin/python3: the workers have no such file"),
        (["python", "-c", "print(1"], "error -c: '(' was never closed"),
        (["bash", "-c", "if true; python plain.py"], "error bash: -c: line "),
        (["sh", "-c", "python plain.py --x $A &"], "error ends with &, so nothing waits for the program"),
        (["python", "-uc", "print(1"], "error -c: '(' was never closed"),
        (["python", "-X", "dev", "-cprint(1"], "error -c: '(' was never closed"),
        (["python", "-um", "nosuch.train", "-c", "x y"], "error -m nosuch.train: "),
        (["python", "trian.py", "-m", "lab/train.py"], "error trian.py: there is no such file in "),
        (["bash", "-euo", "pipefail", "-c", "python trian.py"], "error trian.py: there is no such file in "),
        (["bash", "-c", "-e", "if true; python plain.py"], "error bash: -c: line "),
        (["bash", "-o", "pipefail", "bad.sh"], "error bad.sh: line "),
        (["bash", "-c"], "error -c: nothing is behind it"),
        *(
            (words.split(" "), None)
            for words in (
                "python -m lab.inner -c ./config.yaml",
                "python -m lab.inner -m lab/train.py -c",
                "python -mlab.inner -c a/b",
                "python plain.py -c ./my:cfg",
                "python -u plain.py -m lab/train.py",
                "python -W ignore -Xdev plain.py -c",
                "python -uc pass",
                "bash job.slurm -c if",
                "bash job.slurm -lc if&",
                "bash -o pipefail job.slurm",
                "bash -euxo pipefail job.slurm -c x",
                "bash --rcfile my.rc job.slurm",
                "bash -cl ls",
            )
        ),
        (["bash", "-c", "pythn plain.py --x 1"], "error pythn: there is no such program; did you mean python?"),
        (["sh", "-ec", "ehco hi"], "error ehco: there is no such program on this machine"),
        *((["bash", "-c", line], None) for line in ("exit 0", "true", "echo hi", "command ls", "declare x")),
        (["python", "-c", "import nosuchpkg"], "warning -c, line 1: imports nosuchpkg, and this machine, whose"),
        (["python3", "-c", "import json\nimport numppy"], "warning -c, line 2: imports numppy, and this machine"),
        (["bash", "-c", "python -c 'from nosuch import x'"], "warning -c, line 1: imports nosuch, and this machine"),
        (["python", "-c", "import plain, json"], None),
        (["python", "-c", "print(1)"], None),
        (["bash", "-c", "for i in 1 2; do python plain.py; done"], None),
        (["python", "-m", "lab.inner"], None),
        (["bash", "job.slurm"], None),
        (["python", "elsewhere.py"], None),
        (["python", "plain.py"], None),
        (["bash", "-lc", "cd lab && python x.py"], None),
        (["bash", "bare.sh"], None),
        (["bash", "-c", "python $FILE"], None),
        (["python", "{assets.models.x}/run.py"], None),
    ],
)
def test_a_command_of_the_config_is_judged_as_words_after_two_dashes_are(
    repository: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str | None
) -> None:
    (repository / "lab").mkdir()
    (repository / "books").mkdir()
    for name, text in PROGRAMS.items():
        (repository / name).write_bytes(text.encode())
    for name in ("windows.sh", "bare.sh", "odd.pl", "home.pl"):
        (repository / name).chmod(0o755)
    monkeypatch.chdir(repository)
    wanted = ["program=command", "cloud=local", f'env.python="{sys.version_info[0]}.{sys.version_info[1]}"']
    config = config_of(*wanted, f"program.command={quote_words(words)}")
    issues = [f"{i.severity or 'error'} {i.message}" for i in command_can_start.function(config)]
    assert len(issues) == (said is not None)
    assert said is None or said in issues[0]
    if said is not None and not any(part in said for part in OF_CONTENT):
        with pytest.raises(ConfigError) as refused:
            OwnProgram(tuple(words), repository, on_this_machine=True).overrides([])
        assert f"error {refused.value}" == issues[0]


def test_what_other_words_may_make_or_use_is_less_certain(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    Path("Makefile").write_text("train:\n")

    def said(*words: str) -> list[str]:
        issues = command_can_start.function(config_of("cloud=local", *words))
        return [f"{i.severity or 'error'} {i.key or 'program.command'}: {i.message}" for i in issues]

    own = ["program=command", "program.command=[python,made.py]"]
    assert said(*own, "program.setup=[[make]]")[0].startswith("warning program.command: made.py: there is no such file")
    assert said(*own[:1], "program.command=[ehco]", "program.setup=[[make]]") == []
    for words in ("made.py", ".venv/bin/python"):
        made = OwnProgram((*(["python"] if words.endswith(".py") else []), words), repository, on_this_machine=True)
        assert made.overrides(["program.setup=[[make]]"])
    [absent, line] = said(*own[:1], "program.command=[ls]", "program.setup=[[bash,no.sh],['cd a && make']]")
    assert absent.startswith("error program.setup: no.sh: there is no such file")
    assert line.endswith('use program.setup=[[bash,-c,"cd a && make"]]')
    (repository / "no.sh").touch()
    for name in ("notes.txt", "lab.yaml"):
        (repository / name).write_text("a: 1")
        [wrong] = said(*own[:1], f"program.command=[python,{name}]")
        assert wrong.startswith(f"warning program.command: {name}: is no Python by its name")
    absent, here = "/nowhere/train.py", f"{tmp_path_factory.mktemp('beside')}/beside.py"
    Path(here).write_text("print()\n")
    for words in (f"[python,{absent}]", f"[bash,-c,'python {absent}']", f"[{absent}]"):
        [wrong] = said(*own[:1], f"program.command={words}")
        assert wrong.startswith(f"warning program.command: {absent}: is outside {repository}, which is what the worke")
    assert said(*own[:1], f"program.command=[python,{here}]") == []
    assert "it must be on them" in said(*own[:1], f"program.command=[python,{here}]", "cloud=gcp", "cloud.project=a")[0]
    assert said(*own[:1], "program.command=[/opt/own/prog]") == []
    assert said(*own[:1], "program.command=[ehco]", "env.packages=none") == []
    [other] = said(*own[:1], "program.command=[python3.9,train.py]", "env.packages=lock", "env.python='3.11'")
    assert other.startswith("warning program.command: python3.9 is not the Python of the packages, which is 3.11")
    Path("train.py").touch()
    [other] = said(*own[:1], "program.command=[python3.9,train.py]")
    assert other.startswith("warning program.command: python3.9 is not the Python of the packages, which is 3.")
    for line in ("python -m http.server 8000 &", "nvtop > log 2>&1 & "):
        assert said(*own[:1], "program.command=[ls]", f'program.setup=[[bash,-c,"{line}"]]') == []
        [ends] = said(*own[:1], f'program.command=[bash,-c,"{line}"]')
        assert ends.startswith("error program.command: ends with &, so nothing waits for the program")
    Path("Makefile").write_text("include x.mk\ntrain eval: a.txt\n\ttrue\n%.txt:\n\ttrue\nNAME := x\nset:\n")
    for words in ("train", "eval", "train,'X=1'", "out.txt", "deploy", "Makefile", "-n,trian", ""):
        assert said(*own[:1], f"program.command=[make,{words}]".replace(",]", "]")) == []
    [other] = said(*own[:1], "program.command=[make,trian]")
    assert other == "warning program.command: make: Makefile has no trian; did you mean train?"
    Path("Makefile").unlink()
    assert said(*own[:1], "program.command=[make,train]", "program.setup=[[cmake,.]]") == []
    alone = said("program.command=[python,train.py]")
    assert alone == ["error program.command: program=trainer does not run it; add program=command, or leave it out"]
    beside = said("+experiment=quickstart", "program.command=[python,made.py]")
    assert beside == ["warning program.command: program=trainer does not run it; add program=command, or leave it out"]


@pytest.mark.parametrize("words", [["tmux"], ["vim", "train.py"], ["env", "A=1", "python", "train.py"]])
def test_a_run_has_no_terminal(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()\n")
    said = program_doubt(words, tmp_path, tmp_path, here=False)
    assert said.startswith(f"{words[0]}: needs a terminal, and a run has none; `slipway ssh`") is (words[0] != "env")
