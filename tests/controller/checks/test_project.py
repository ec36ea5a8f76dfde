"""What is wrong with the program and its code is found before a pod is billed."""

from pathlib import Path

import pytest

from controller.checks.project import all_code_is_shipped, command_can_start
from controller.plan.build import build_plan
from tests.composed import config_of
from tests.controller.inputs.wheels import git, git_repository
from tests.fakes.context import make_context

WORDS = ["cloud=local", "program=command", "env.packages=image"]
COMMAND = 'program.command=[sh,-c,"cd $1 && shift && exec $@",sh,sub,python,train.py,--config,own.yaml,--out,runs]'


def test_code_that_would_be_missed_is_named(tmp_path: Path) -> None:
    """A link that leaves; a file that the command names and git ignores; a folder may be for the output."""
    files = {
        "sub/train.py": "",
        "sub/own.yaml": "",
        "sub/runs/x": "",
        "sub/.gitignore": "own.yaml\nruns/\n",
        "a.pem": "",
    }
    git_repository(tmp_path / "r", files)
    git(tmp_path / "r", "rm", "--quiet", "--cached", "sub/own.yaml", "sub/runs/x")

    def said() -> list[str]:
        made = config_of(*WORDS, COMMAND, f"run.state_dir={tmp_path}/state", "program.setup=[[cat,a.pem]]")
        plan = build_plan(made, "acme", tmp_path / "r")
        return [f"{f.severity} {f}" for f in all_code_is_shipped(plan, make_context(None))]

    own = [
        "warning program.setup: names a.pem, which is not shipped: code.exclude",
        "warning program.command: names sub/own.yaml, which is not shipped: ignored by git",
        "note program.command: names sub/runs, which is not shipped: ignored by git",
    ]
    assert said() == own
    for number in range(6):
        (tmp_path / f"r/link{number}").symlink_to("/usr")
    line = "warning code.exclude: not shipped: link0 (a link that leaves the code: /usr), link1 "
    assert said()[0].startswith(line)
    assert said()[0].endswith(" and 1 more; name there what is not needed, to silence this")


@pytest.mark.parametrize(
    ("pattern", "command", "named"),
    [("*.py", "[python,train.py]", "train.py"), ("lab/", "[python,-m,lab.job]", "lab/job.py")],
)
def test_a_program_that_is_left_out_cannot_start(tmp_path: Path, pattern: str, command: str, named: str) -> None:
    git_repository(tmp_path / "r", {"train.py": "", "lab/job.py": "", "a.txt": ""})
    words = [*WORDS, f"program.command={command}", f"run.state_dir={tmp_path}/state", f"code.exclude=['{pattern}']"]
    plan = build_plan(config_of(*words), "acme", tmp_path / "r")
    [found] = all_code_is_shipped(plan, make_context(None))
    assert f"{found.severity} {found}" == f"error program.command: starts {named}, which is not shipped: code.exclude"


@pytest.mark.parametrize(
    ("setup", "command", "said"),
    [
        ("", "[python,build/gen.py]", "error program.command: build/gen.py: is ignored by git"),
        ("[python,gen.py]", "[python,build/gen.py]", "warning program.command: build/gen.py: is ignored by git"),
        ("", "[python,-m,build.gen]", "error program.command: starts build/gen.py, which is not shipped"),
        ("[python,gen.py]", "[python,-m,build.gen]", "warning program.command: starts build/gen.py, which is not "),
        ("[python,build/gen.py]", "[python,gen.py]", "error program.setup: build/gen.py: is ignored by git"),
        ("[python,gen.py],[python,left/a.py]", "[ls]", "warning program.setup: starts left/a.py, which is not shipp"),
    ],
)
def test_a_program_that_is_not_shipped_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: str, command: str, said: str
) -> None:
    """An earlier command may make it."""
    files = {**dict.fromkeys(("gen.py", "build/gen.py", "left/a.py"), "print()\n"), ".gitignore": "build/\n"}
    git_repository(tmp_path / "r", files)
    git(tmp_path / "r", "rm", "--quiet", "--cached", "build/gen.py")
    monkeypatch.chdir(tmp_path / "r")
    words = [f"program.setup=[{setup}]", f"program.command={command}", "code.exclude=[left/]"]
    made = config_of(*WORDS, *words, f"run.state_dir={tmp_path}/state")
    plan = build_plan(made, "acme", tmp_path / "r")
    [found] = [*command_can_start(made), *all_code_is_shipped(plan, make_context(None))]
    assert f"{found.severity} {found}".startswith(said)
