"""Which files of a folder are code: git decides, and nothing is left out without a name and a reason."""

import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.core.errors import ConfigError
from controller.inputs.code_files import CodeFiles, list_code
from tests.controller.inputs.wheels import git, git_repository, write

IGNORING = {
    "sub/.gitignore": "secrets.env\ndata/\n",
    "sub/secrets.env": "TOKEN=abc",
    "sub/data/x.bin": "1",
    "sub/train.py": "",
    "deep/.gitignore": "*\n!.gitignore\n!*/\n!*.py\n",
    "deep/a/b.py": "",
    "deep/a/b.bin": "",
    "lib/m.py": "",
}
KEPT = ["deep/.gitignore", "deep/a/b.py", "lib/m.py", "sub/.gitignore", "sub/train.py"]


@pytest.mark.parametrize("is_repository", [True, False])
def test_ignore_files_of_every_folder_hold_and_git_stays_here(tmp_path: Path, is_repository: bool) -> None:
    write(tmp_path, IGNORING)
    write(tmp_path, {"info.txt": "", "made/.gitignore": "*\n", "made/x": "", "made/y": ""})
    kept = [*KEPT, "info.txt"]
    if is_repository:
        git(tmp_path, "init", "--quiet")
        (tmp_path / ".git/info/exclude").write_text("/info.txt\n")
        kept.remove("info.txt")
    found = list_code(tmp_path, ())
    assert found.files == sorted(kept)
    ignored = {"sub/data/", "sub/secrets.env", "deep/a/b.bin", "made/", *({"info.txt"} if is_repository else ())}
    assert found.left_out == dict.fromkeys(ignored, "ignored by git")


def test_without_git_what_may_be_ignored_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    write(tmp_path, {"train.py": "", "sub/x.py": "", "sub/old/y.py": ""})
    (tmp_path / "all").symlink_to("sub")
    found = list_code(tmp_path, ["old/"])
    assert (found.files, found.links) == (["sub/x.py", "train.py"], {"all": "sub"})
    assert found.left_out == {"sub/old/": "code.exclude"}
    for name in ("sub/.gitignore", "sub/old/.git"):
        write(tmp_path, {name: ""})
        with pytest.raises(ConfigError, match=f"{name} says what is not shipped, and error: git is not installed"):
            list_code(tmp_path, ())
        (tmp_path / name).unlink()


@pytest.mark.parametrize("folder", ["/", "/etc", "/usr/../var", str(Path.home().parent)])
def test_the_system_is_no_project(folder: str) -> None:
    with pytest.raises(ConfigError, match="is no project, and all of it would be shipped"):
        list_code(Path(folder), ())


@pytest.mark.parametrize("place", ["", "sub/"])
@pytest.mark.parametrize(
    ("encoding", "is_read"), [("utf-8", True), ("utf-8-sig", True), ("utf-16", False), ("utf-16-be", False)]
)
def test_an_ignore_file_of_which_git_reads_nothing_is_refused(
    place: str, encoding: str, is_read: bool, tmp_path: Path
) -> None:
    """Else what it names would be shipped."""
    git_repository(tmp_path, {"train.py": ""})
    write(tmp_path, {f"{place}secrets.env": "", f"{place}.gitignore": ""})
    (tmp_path / f"{place}.gitignore").write_bytes("secrets.env\n".encode(encoding))
    if is_read:
        assert list_code(tmp_path, ()).left_out == {f"{place}secrets.env": "ignored by git"}
        return
    with pytest.raises(ConfigError, match=rf"{place}\.gitignore is text in UTF-16, of which git reads no pattern"):
        list_code(tmp_path, ())


def test_an_index_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    git_repository(tmp_path, {"train.py": ""})
    (tmp_path / ".git/index").write_bytes(b"DIRC")
    with pytest.raises(ConfigError, match=r"`git ls-files` in .*: fatal: .*index"):
        list_code(tmp_path, ())


def test_a_warning_that_something_was_missed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a folder or an ignore file that this user cannot read."""
    git_repository(tmp_path / "r", {"train.py": ""})
    real = shutil.which("git")
    write(tmp_path, {"bin/git": f'#!/bin/sh\necho "warning: unable to access \'.gitignore\'" >&2\nexec {real} "$@"\n'})
    (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=r"warning: unable to access '\.gitignore'"):
        list_code(tmp_path / "r", ())


def test_a_folder_outside_any_repository_needs_no_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(tmp_path / "nowhere"))
    write(tmp_path, {"train.py": "", ".gitignore": "x\n", "x": ""})
    assert list_code(tmp_path, ()).files == [".gitignore", "train.py"]


@pytest.fixture
def with_submodules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a submodule in a submodule, and a clone that nobody added."""
    for name, value in {"COUNT": "1", "KEY_0": "protocol.file.allow", "VALUE_0": "always"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    git_repository(tmp_path / "innermost", {"deep.py": ""})
    git_repository(tmp_path / "inner", {"mylib.py": "VALUE = 7", ".gitignore": "*.log\n"})
    top = tmp_path / "r"
    git_repository(top, {"train.py": ""})
    git(tmp_path / "inner", "submodule", "--quiet", "add", str(tmp_path / "innermost"), "most")
    git(tmp_path / "inner", "commit", "--quiet", "--message=two")
    git(top, "submodule", "--quiet", "add", str(tmp_path / "inner"), "vendor")
    git(top, "submodule", "--quiet", "update", "--init", "--recursive")
    git_repository(top / "clone", {"other.py": ""})
    write(top, {"vendor/new.py": "", "vendor/run.log": ""})
    return top


def test_submodules_are_shipped(with_submodules: Path) -> None:
    found = list_code(with_submodules, ())
    own = [".gitmodules", "clone/other.py", "train.py"]
    inner = [".gitignore", ".gitmodules", "most/deep.py", "mylib.py", "new.py"]
    assert found.files == sorted([*own, *(f"vendor/{name}" for name in inner)])
    assert found.left_out == {"vendor/run.log": "ignored by git"}
    assert "clone/other.py" not in list_code(with_submodules, (), tracked_only=True).files
    assert "vendor/new.py" not in list_code(with_submodules, (), tracked_only=True).files


def test_a_submodule_that_is_not_there_is_named_and_a_broken_one_is_an_error(with_submodules: Path) -> None:
    link = (with_submodules / "vendor/.git").read_text()
    (with_submodules / "vendor/.git").write_text("gitdir: ../nowhere")
    with pytest.raises(ConfigError, match=r"vendor/? is a git repository, and git says: fatal: not a git repository"):
        list_code(with_submodules, ())
    assert list_code(with_submodules, ["vendor/"]).left_out == {"vendor/": "code.exclude"}
    (with_submodules / "vendor/.git").unlink()
    (with_submodules / "vendor/.git").mkdir()
    with pytest.raises(ConfigError, match=r"vendor/? has a \.git that git does not take for a repository"):
        list_code(with_submodules, ())
    (with_submodules / "vendor/.git").rmdir()
    (with_submodules / "vendor/.git").write_text(link)
    git(with_submodules, "submodule", "--quiet", "deinit", "--force", "vendor")
    assert list_code(with_submodules, ()).left_out == {"vendor/": "a submodule that is not checked out"}


def test_links_that_stay_inside_are_shipped_and_others_are_named(tmp_path: Path) -> None:
    top = tmp_path / "r"
    write(tmp_path, {"outside/secret": "s"})
    git_repository(top, {"train.py": "", "lib/m.py": "", ".gitignore": "cache/\n", ".env": "", "cache/x": ""})
    git(top, "rm", "--quiet", "--cached", "cache/x")
    links = {
        "file": "train.py", "folder": "lib", "absolute": f"{top}/lib", "around": "../r/lib/m.py", "chain": "folder",
        "lib/up": "../train.py",
        "out": "../outside", "secret": f"{tmp_path}/outside/secret", "gone": "nowhere", "self": "self", "circle": ".",
        "lib/circle": "../lib", "ignored": "cache", "excluded": ".env", "config": ".git/config",
    }  # fmt: skip
    for name, target in links.items():
        (top / name).symlink_to(target)
    found = list_code(top, [".env"])
    assert found.links == {
        "file": "train.py", "folder": "lib", "absolute": "lib", "around": "lib/m.py", "chain": "lib",
        "lib/up": "../train.py",
    }  # fmt: skip
    assert found.files == [".gitignore", "lib/m.py", "train.py"]
    reasons = {
        "out": "a link that leaves the code: .*/outside",
        "secret": "a link that leaves the code: .*/outside/secret",
        "gone": r"a link that leads nowhere \(No such file or directory\): nowhere",
        "self": r"a link that leads nowhere \(Too many levels of symbolic links\): self",
        "circle": "a link to a folder that holds it",
        "lib/circle": "a link to a folder that holds it",
        "ignored": "a link to cache, which is not shipped",
        "excluded": r"a link to \.env, which is not shipped",
        "config": r"a link to \.git/config, which is not shipped",
    }
    assert [name for name, reason in reasons.items() if not re.match(reason, found.left_out[name])] == []
    assert found.left_out.keys() == {*reasons, "cache/", ".env"}


def test_a_tracked_folder_that_became_a_link_brings_nothing_from_its_target(tmp_path: Path) -> None:
    git_repository(tmp_path / "r", {"train.py": "", "data/x": "mine"})
    write(tmp_path, {"outside/x": "theirs"})
    shutil.rmtree(tmp_path / "r/data")
    (tmp_path / "r/data").symlink_to("../outside")
    found = list_code(tmp_path / "r", ())
    assert found.files == ["train.py"]
    assert found.left_out.keys() == {"data", "data/x"}


def a_socket(path: Path) -> None:
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has at most 108 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_written_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("train.py")
    git(path.parent, "add", path.name)
    path.unlink()
    git(path.parent, "-c", "core.symlinks=false", "checkout", path.name)


def sparse(path: Path) -> None:
    path.unlink()
    git(path.parent, "update-index", "--skip-worktree", path.name)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (a_socket, "neither a file, a folder nor a link"),
        (a_pipe, "neither a file, a folder nor a link"),
        (a_folder, "neither a file, a folder nor a link"),
        (a_written_link, "a link that git has written as a file (core.symlinks=false)"),
        (Path.unlink, "deleted here, tracked by git"),
        (sparse, "outside the sparse checkout"),
    ],
)
def test_what_is_no_file_any_more_is_named(change: Callable[[Path], None], why: str, tmp_path: Path) -> None:
    git_repository(tmp_path, {"train.py": "", "x": "1"})
    change(tmp_path / "x")
    found = list_code(tmp_path, ())
    assert (found.files, found.left_out) == (["train.py"], {"x": why})


@pytest.mark.skipif(sys.platform == "darwin", reason="whose file systems refuse such names")
@pytest.mark.parametrize("is_repository", [True, False])
def test_names_that_are_not_utf8_are_named(tmp_path: Path, is_repository: bool) -> None:
    write(tmp_path, {"train.py": "", "caf\u00e9 1.py": ""})
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.py")).touch()
    if is_repository:
        git(tmp_path, "init", "--quiet")
    found = list_code(tmp_path, ())
    assert found.files == ["caf\u00e9 1.py", "train.py"]
    assert found.left_out == {r"caf\xe9.py": "its name is not UTF-8"}


@pytest.mark.parametrize(
    "text",
    [
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
        "version https://hawser.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
        "/annex/objects/SHA256E-s5--2cf2.bin\n",
    ],
)
def test_a_pointer_to_a_large_file_is_not_shipped_in_its_place(tmp_path: Path, text: str) -> None:
    git_repository(tmp_path, {"train.py": "", "w/model.safetensors": text, "notes.md": f"> {text}"})
    with pytest.raises(
        ConfigError, match=r"w/model\.safetensors stands for a larger file .*`git lfs pull`.*code\.exclude"
    ):
        list_code(tmp_path, ())
    assert list_code(tmp_path, ["w/"]).files == ["notes.md", "train.py"]


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`os.access` stands for a user who may not: root may read all."""
    git_repository(tmp_path, {"train.py": "", "key": ""})
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "key")
    with pytest.raises(ConfigError, match=r"cannot read key; make it readable, or name it in code\.exclude"):
        list_code(tmp_path, ())
    assert list_code(tmp_path, ["key"]).files == ["train.py"]


@pytest.mark.skipif(sys.platform == "darwin", reason="whose disks take them for one file")
def test_two_names_of_one_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`samefile` stands for a disk that ignores case; on others they are two files, and are shipped."""
    git_repository(tmp_path, {"Model.py": "", "model.py": "", "sub/model.py": ""})
    assert list_code(tmp_path, ()).files == ["Model.py", "model.py", "sub/model.py"]
    monkeypatch.setattr(Path, "samefile", lambda one, other: True)
    with pytest.raises(ConfigError, match=r"odel\.py and .odel\.py are two files for git and one on this disk"):
        list_code(tmp_path, ())


def test_what_the_user_keeps_out_is_named_by_its_folder(tmp_path: Path) -> None:
    git_repository(tmp_path, {"train.py": "", "a/__pycache__/x.pyc": "", "a/__pycache__/y.pyc": "", "home/runs/r": ""})
    git_repository(tmp_path / "home/repositories/r", {"x": ""})
    found = list_code(tmp_path, ["__pycache__/"], not_in=tmp_path / "home")
    assert found == CodeFiles(tmp_path, ["train.py"], {}, {"a/__pycache__/": "code.exclude", "home/": "run.state_dir"})
