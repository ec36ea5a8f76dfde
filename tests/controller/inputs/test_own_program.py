"""slipway run -- PROGRAM: its overrides, slice, name and packages; requirements files, git lines, wheels."""

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from controller.checks.project import command_can_start
from controller.config.compose import with_overrides
from controller.core.errors import CloudError, ConfigError
from controller.inputs.env_inputs import GitRequirement, read_requirements
from controller.inputs.own_program import OwnProgram, program_name, quote_words, slice_overrides
from controller.inputs.program_words import shell_line
from controller.resources.uploads.archives import build_wheel
from tests.composed import config_of
from tests.controller.inputs.wheels import git_repository, package_repository

HOSTILE = st.sampled_from("\\'\"${}[](),=:~#%é\n\t aA1.-")
WORDS = st.lists(st.text(HOSTILE, max_size=8) | st.just("\\${x}"), min_size=1, max_size=4)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "train.py").touch()
    (tmp_path / "lab.py").touch()
    return tmp_path


def packages(repository: Path, *given: str, folder: str = ".", on_this_machine: bool = False) -> list[str]:
    program = OwnProgram(("python", "-m", "lab"), repository / folder, on_this_machine=on_this_machine)
    return [word for word in program.overrides(given) if word.startswith(("env.", "program.setup"))]


@given(WORDS)
def test_words_arrive_byte_for_byte(words: list[str]) -> None:
    composed = OmegaConf.create(with_overrides({}, [f"a.b={quote_words(words)}"]))
    assert OmegaConf.to_container(composed, resolve=True) == {"a": {"b": words}}


def test_interpolations_in_words_are_not_resolved() -> None:
    words = ["python", "train.py", "out=${oc.env:HOME}", "\\${x}", "null", "1", "1e-3", "true", "--steps"]
    composed = config_of("program=command", "cloud=local", f"program.command={quote_words(words)}")
    assert list(composed.program.command) == words


def test_a_run_is_named_after_its_program() -> None:
    names = {
        "python train.py --lr 1e-3": "train",
        "python3.12 -u -X dev src/Train_GPT.py": "train-gpt",
        "python -m lab.pretrain --config a.py": "pretrain",
        "torchrun --nproc-per-node 4 train.py": "train",
        "bash -x scripts/run.sh": "run",
        "./train": "train",
        "echo hello": "echo",
        "./é": "run",
    }
    assert {command: program_name(command.split()) for command in names} == names


def test_a_slice_is_named_by_its_type_or_its_file(tmp_path: Path) -> None:
    (tmp_path / "slipway" / "tpu").mkdir(parents=True)
    (tmp_path / "slipway" / "tpu" / "mine.yaml").touch()
    meant = {
        **{"v5litepod-8": ["tpu=v5litepod_8"], "v5e-8": ["tpu=v5litepod_8"], "v6e_8": ["tpu=v6e_8"]},
        **{"tpu-v6e-8": ["tpu=v6e_8"], "TPU-v5e-8": ["tpu=v5litepod_8"], "v6-8": ["tpu=v6e_8"]},
        **{"v7x-8": ["tpu.accelerator_type=tpu7x-8", "tpu.zone=us-central1-ai1a"], "v7-16": ["tpu=tpu7x_16"]},
        **{"mine": ["tpu=mine"], "v5litepod-64": ["tpu.accelerator_type=v5litepod-64", "tpu.zone=us-central1-a"]},
    }
    assert {typed: slice_overrides(typed, tmp_path) for typed in meant} == meant
    with pytest.raises(ConfigError, match=r"--tpu: unknown type 'v6e-9'; closest: v6e-8"):
        slice_overrides("v6e-9", tmp_path)


def test_overrides_of_the_user_come_last_and_are_not_contradicted(repository: Path) -> None:
    program = OwnProgram(("python", "train.py"), repository, tpu="v6e-8", zone="us-east1-d")
    assert program.overrides(["cloud=local"]) == (
        "program=command", "program.command=[python,train.py]", "run.name=train", "tpu=v6e_8", "tpu.zone=us-east1-d",
        "env.packages=image", "cloud=local",
    )  # fmt: skip
    assert not any(word.startswith("run.name=train") for word in program.overrides(["run.name=mine"]))
    with pytest.raises(ConfigError, match=r"--tpu v6e-8: tpu.accelerator_type is given too; remove one of them"):
        program.overrides(["tpu.accelerator_type=v5litepod-8"])
    with pytest.raises(ConfigError, match=r"--zone us-east1-d: tpu.zone is given too"):
        program.overrides(["tpu.zone=us-east5-b"])


def test_a_program_starts_in_the_folder_one_stands_in(repository: Path) -> None:
    (repository / "a lab").mkdir()
    (repository / "a lab" / "train.py").touch()
    words = OwnProgram(("python", "train.py"), repository / "a lab").overrides([])
    enter = """program.command=[sh,-c,'cd "$1" && shift && exec "$@"',sh,"a lab",python,train.py]"""
    assert words[1] == enter


def test_a_program_that_would_not_be_there_is_found_at_once(repository: Path) -> None:
    (repository / ".gitignore").write_text("out/\n")
    (repository / "out").mkdir()
    (repository / "out" / "run.sh").touch()
    (repository / "package").mkdir()
    for words, message in {
        "python trian.py": "trian.py: there is no such file in .*, which has train.py",
        "bash out/run.sh": "out/run.sh: is ignored by git",
        "python ../train.py": "is outside",
        f"python {repository}/train.py": "the workers do not have this path; name it relative to",
        "./nothing": "there is no such file",
        "nosuchprog --steps 3": "nosuchprog: there is no such program on this machine .*env.requirements=FILE",
        "python -m nosuch.train": "-m nosuch.train: .* has no nosuch, nor have Slipway's packages",
        "python -u -m package.train": "-m package.train: there is no package/train.py",
        "python3 -m package": "-m package: there is no package/__main__.py",
        "python3 -m __main__": "-m __main__: .* has no __main__",
    }.items():
        with pytest.raises(ConfigError, match=message):
            OwnProgram(tuple(words.split()), repository).overrides([])


def test_what_only_the_workers_know_is_left_to_them(repository: Path) -> None:
    for words in ("timeout 60 python train.py", "/opt/own/prog", "python -m lab", "python -m http.server", "ls"):
        said = OwnProgram(tuple(words.split()), repository).overrides([])
        assert said[1] == f"program.command={quote_words(words.split())}"
    for key in ("env.requirements=r.txt", "env.vars.PATH=/opt/bin", "program.setup=[[make]]", "+experiment=mine"):
        assert OwnProgram(("nosuchprog",), repository).overrides([key])[-1] == key
    (repository / "requirements.txt").write_text("accelerate\n")
    assert "env.requirements=requirements.txt" in OwnProgram(("accelerate", "launch"), repository).overrides([])


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        (["python train.py --steps 3"], "python train.py --steps 3"),
        (["python train.py --out $HOME"], "bash -c 'python train.py --out $HOME'"),
        (["cd sub && python train.py"], "bash -c 'cd sub && python train.py'"),
        (["python train.py 'open"], None),
        (["cd", "sub", "&&", "python", "train.py"], "bash -c 'cd sub && python train.py'"),
        (["python", "train.py", "|", "tee", "a b"], None),
        (["python", "train.py", ">", "log"], "bash -c 'python train.py > log'"),
        (["source", "env.sh"], "bash -c 'source env.sh'"),
        (["LR=1", "python", "train.py"], "env LR=1 python train.py"),
        (["export", "LR=1", ";", "python", "train.py"], "bash -c 'export LR=1 ; python train.py'"),
    ],
)
def test_a_line_for_a_shell_is_refused_with_what_to_write(repository: Path, words: list[str], cure: str | None) -> None:
    with pytest.raises(ConfigError, match=r"; use: slipway run -- ") as refused:
        OwnProgram(tuple(words), repository).overrides([])
    written = shlex.split(str(refused.value).partition("slipway run -- ")[2])
    assert cure is None or written == shlex.split(cure)
    assert shell_line(written) is None
    config = config_of("program=command", "cloud=local", f"program.command={quote_words(words)}")
    [issue] = command_can_start.function(config)
    assert issue.message.endswith(f"; use program.command={quote_words(written)}")


@pytest.mark.parametrize("words", ["find . -exec rm {} ;", "bash -c true", "python train.py --sep=|", "test 1"])
def test_what_starts_a_program_is_no_line_for_a_shell(words: str) -> None:
    assert shell_line(words.split()) is None


def test_packages_are_those_of_the_nearest_folder(repository: Path) -> None:
    assert packages(repository) == []
    (repository / "lab").mkdir()
    (repository / "requirements.txt").touch()
    found = ["env.packages=requirements", "env.requirements=requirements.txt"]
    assert packages(repository) == packages(repository, folder="lab") == found
    (repository / "lab" / "pyproject.toml").write_text('[project]\nname = "lab"\nrequires-python = ">=3.14"\n')
    install = ["env.packages=requirements", 'program.setup=[[uv,pip,install,-e,"./lab"]]', 'env.python="3.14"']
    assert packages(repository, folder="lab") == install
    (repository / "lab" / "uv.lock").touch()
    with pytest.raises(ConfigError, match=r"uv\.lock: is no lock of uv; run `uv lock`"):
        packages(repository, folder="lab")
    (repository / "lab" / "uv.lock").write_text("version = 1\n")
    sync = "program.setup=[[uv,sync,--frozen,--active,--inexact,--no-dev,--project,lab]]"
    assert packages(repository, folder="lab")[1] == sync


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        (">=3.11", []),
        (">=3.9,<4", []),
        ("==3.13.*", []),
        ("<3.13", ['env.python="3.12"']),
        ("~=3.11.2", ['env.python="3.11"']),
    ],
)
def test_the_python_is_the_nearest_to_the_default(repository: Path, accepted: str, chosen: list[str]) -> None:
    (repository / "pyproject.toml").write_text(f'[project]\nname = "lab"\nrequires-python = "{accepted}"\n')
    assert packages(repository)[2:] == chosen


def test_what_the_user_says_about_packages_stands(repository: Path) -> None:
    (repository / "requirements.txt").touch()
    assert packages(repository, "env.packages=lock") == ["env.packages=lock"]
    assert packages(repository, "cloud=local") == ["env.packages=image"]
    assert packages(repository, on_this_machine=True) == ["env.packages=image"]
    assert packages(repository, "+experiment=mine") == []


def test_a_project_that_no_python_suits_is_found_at_once(repository: Path) -> None:
    for text, message in {
        '[project]\nrequires-python = "<3.10"\n': "none of Python 3.11, .* satisfies '<3.10'",
        '[project]\nrequires-python = "new"\n': "'new' is not a version range",
        "[project": "pyproject.toml: cannot be read",
    }.items():
        (repository / "pyproject.toml").write_text(text)
        with pytest.raises(ConfigError, match=message):
            packages(repository)


def test_without_git_the_folder_itself_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    program = OwnProgram(("python", "train.py"), tmp_path, tpu="v5litepod-8")
    assert "program.command=[python,train.py]" in program.overrides([])


PYTHON = "3.11"


def written(folder: Path, text: str, name: str = "requirements.txt") -> Path:
    (folder / name).write_text(text)
    return folder


def test_it_is_read_with_its_includes_and_without_comments(tmp_path: Path) -> None:
    written(tmp_path, "numpy>=2  # arrays\n", "base.txt")
    text = "# mine\n-r base.txt\njax[tpu]==0.7.1 \\\n  --hash=sha256:00\n--find-links https://example.com/x.html\n"
    found = read_requirements(written(tmp_path, text), "requirements.txt")
    assert found.text == "numpy>=2\njax[tpu]==0.7.1 --hash=sha256:00\n--find-links https://example.com/x.html\n"
    assert found.git == ()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mine @ git+ssh://git@github.com/org/mine.git@main",
         ("ssh://git@github.com/org/mine.git", "main", "", "", "")),
        ("mine[tpu] @ git+https://github.com/org/mine@v1#subdirectory=py ; python_version > '3'",
         ("https://github.com/org/mine", "v1", "py", "[tpu]", " ; python_version > '3'")),
        ("git+https://github.com/org/mine.git#egg=mine", ("https://github.com/org/mine.git", None, "", "", "")),
    ],
)  # fmt: skip
def test_git_lines_are_for_this_machine(tmp_path: Path, line: str, expected: tuple[str | None, ...]) -> None:
    found = read_requirements(written(tmp_path, f"numpy\n{line}\n"), "requirements.txt")
    assert found.text == "numpy\n"
    [git] = found.git
    assert (git.url, git.ref, git.subdirectory, git.extras, git.marker) == expected


def test_what_means_nothing_on_a_worker_is_refused(tmp_path: Path) -> None:
    plain = (
        "--index-url https://h/simple\nhttps://h/a.whl\nb[x]>=1 ; python_version > '3.10'\nc @ https://h/c.whl  # why\n"
        "-i=https://h/s\n-f https://h\n--extra-index-url https://u:${T}@h/s\n--no-binary :all:\n--only-binary=x\n"
        "--pre\nd (>=1)\ne == 1.* --hash=sha256:00\nf >= 1 , < 2\ng~=1.0;sys_platform=='linux'\nh===1+cpu\nr.yaml!=1\n"
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/r.txt").write_text("-e ../lib\n")
    (tmp_path / "latin.txt").write_bytes(b"jax # \xe9\n")
    assert read_requirements(written(tmp_path, f"\ufeff{plain}"), "requirements.txt").text.count("\n") == 16
    for text, words in {
        "-e git+https://h/a@v1\n": "is an address, which is installed as it is; write it without -e: git+https://h/a@v1",
        "--editable=a[b] @ git+ssh://git@h/a\n": "write it without --editable: a[b] @ git+ssh://git@h/a",
        "numpy>=1.26,<1.20\n": "numpy<1.20,>=1.26: no version satisfies all of this; change it",
        "a_b==1.0\nx\nA-b[c]~=2.1 --hash=sha256:0\n": "a_b==1.0 and A-b[c]~=2.1: no version satisfies all of this",
        "-e .\n": ", line 1: '-e .' is a local path, which the workers do not have",
        "./wheels/my.whl\n": "set program.setup=[[uv, pip, install, ./wheels/my.whl]]",
        "my-1.0-py3-none-any.whl\n": "local path",
        "../mylib\n": "'../mylib' is a path outside of what is shipped; move it into the repository, or name it as git",
        "-e ../mylib\n": "outside of what is shipped",
        "c @ file:///home/me/c\n": "outside of what is shipped",
        "/home/me/a.whl\n": "outside of what is shipped",
        "./lib/../../c\n": "outside of what is shipped",
        "--editable ./lib/..\n": "install, -e, .]]",
        "-r sub/r.txt\n": "includes sub/r.txt, line 1: '-e ../lib' is a local path, which the workers do not have; "
        "to install what is shipped, set program.setup=[[uv, pip, install, -e, ./lib]]",
        "c @ ./lib\n": "install, ./lib]]",
        "-c bounds.txt\n": "put the constraints into the file itself",
        "-r missing.txt\n": "requirements.txt includes missing.txt: cannot read it: No such file",
        "-r latin.txt\n": "includes latin.txt: is not UTF-8; save it as UTF-8",
        "-r requirements.txt\n": "includes itself",
        "jaxx==\n": ", line 1: 'jaxx==' is no requirement; write one a line, such as ",
        "jax[tpu\n": "did you mean jax[tpu]?",
        "jax[tpu]=0.4.30 --hash=sha256:00\n": "did you mean jax[tpu]==0.4.30?",
        "jax>0.4 <0.5\n": "did you mean jax>0.4,<0.5?",
        "torch>=2.0;cuda\n": "did you mean torch>=2.0?",
        "- jax\n": "is no option of a requirements file",
        "--upgrade\n": "is no option",
        "import jax\n": "'import jax' is no requirement; ",
        "name: env\ndependencies:\n  - jax\n": "requirements.txt: is an environment of conda; ",
        "numpy \\\n  --hash=sha256:00\n\njax = '^0.4'\n": ", line 4: \"jax = '^0.4'\" is no requirement; ",
        "pip install jax flax\n": ", line 1: 'pip install jax flax' is a command; write what it installs, one a line",
        "jax flax\n": ", line 1: 'jax flax' is no requirement; ",
    }.items():
        with pytest.raises(ConfigError, match=r"^env\.requirements: requirements\.txt") as refused:
            read_requirements(written(tmp_path, text), "requirements.txt")
        assert words in str(refused.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pyproject.toml", "a program after -- has its packages if env.packages and env.requirements are left out"),
        ("uv.lock", "a program after -- has its packages if"),
        ("poetry.lock", "list its packages in a text file, one a line"),
    ],
)
def test_what_describes_a_project_is_no_requirements_file(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).write_text("[project]\nname = 'a'\n")
    with pytest.raises(ConfigError, match=rf"env\.requirements: {name}: is no requirements file; {said}"):
        read_requirements(tmp_path, name)


def line(url: str, ref: str | None) -> GitRequirement:
    return GitRequirement(line=f"git+{url}", url=url, ref=ref, subdirectory="", extras="", marker="")


def test_a_wheel_is_built_of_a_commit_or_a_branch(tmp_path: Path) -> None:
    commit = package_repository(tmp_path / "repository", "private_thing")
    for ref in (commit, "main", None):
        wheel, built = build_wheel(line(f"file://{tmp_path}/repository", ref), tmp_path / str(ref), PYTHON)
        assert (wheel.name, built) == ("private_thing-1.0-py3-none-any.whl", commit)


def test_what_cannot_be_had_or_built_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.requirements: file:///nowhere/at/all: cannot clone: fatal"):
        build_wheel(line("file:///nowhere/at/all", None), tmp_path / "a", PYTHON)
    git_repository(tmp_path / "repository", {"readme": "no package\n"})
    with pytest.raises(ConfigError, match="does not exist"):
        build_wheel(line(f"file://{tmp_path}/repository", "f" * 40), tmp_path / "b", PYTHON)
    with pytest.raises(CloudError, match="cannot build a wheel"):
        build_wheel(line(f"file://{tmp_path}/repository", "main"), tmp_path / "c", PYTHON)


def test_a_line_cannot_give_git_an_option(tmp_path: Path) -> None:
    """`git fetch origin --upload-pack=PROGRAM` would run the program on this machine."""
    package_repository(tmp_path / "repository", "private_thing")
    touch = f"touch${{IFS}}{tmp_path}/canary"
    text = f"git+file://{tmp_path}/repository@--upload-pack={touch};git-upload-pack\n"
    [hostile] = read_requirements(written(tmp_path, text), "requirements.txt").git
    with pytest.raises(ConfigError, match=r"env\.requirements: .* '--upload-pack.* is not a valid branch"):
        build_wheel(hostile, tmp_path / "a", PYTHON)
    assert not (tmp_path / "canary").exists()


def test_a_file_of_somebody_else_reads_nothing_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text("secret\n")
    (repository := tmp_path / "repository").mkdir()
    (repository / "link.txt").symlink_to(tmp_path / "outside.txt")
    outside = ("git+https://h/r#subdirectory=../../x", "git+https://h/r#subdirectory=/x", "-r ../outside.txt")
    for text in (*outside, "-r /etc/hostname", "-r link.txt"):
        words = "leads outside the repository" if "subdirectory" in text else "is outside the repository"
        with pytest.raises(ConfigError, match=words) as caught:
            read_requirements(written(repository, f"{text}\n"), "requirements.txt")
        assert "secret" not in str(caught.value)


def test_a_wheel_for_another_machine_is_refused(tmp_path: Path) -> None:
    package_repository(tmp_path / "repository", "private_thing")
    backend = tmp_path / "repository/backend.py"
    backend.write_text(backend.read_text().replace("py3-none-any", "cp39-cp39-macosx_11_0_arm64"))
    git_repository(tmp_path / "repository", {})
    with pytest.raises(ConfigError, match="compiled code that cannot run on the workers"):
        build_wheel(line(f"file://{tmp_path}/repository", None), tmp_path / "a", PYTHON)


@pytest.mark.parametrize("where", ["cloud=local", "cloud=here", "cloud=gcp"])
def test_a_requirements_file_alone_says_which_packages_are_meant(repository: Path, where: str) -> None:
    mine = "env.requirements=mine.txt"
    assert packages(repository, where, mine) == ["env.packages=requirements", mine]
    for none in ("env.requirements=null", "~env.requirements"):
        assert "env.packages=requirements" not in packages(repository, where, none)
    for kind in ("env.packages=requirements", "env.packages=lock"):
        assert packages(repository, where, kind, mine) == [kind, mine]
