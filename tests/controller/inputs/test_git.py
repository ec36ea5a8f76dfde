"""What git says of a folder and of the code in it; and when it says nothing, why."""

import os
import subprocess
from pathlib import Path

import pytest

from conf.schema.program import Repository
from controller.core.errors import ConfigError
from controller.inputs.git import checkout, collect_git_status, find_repository, repository_root, strip_password
from tests.controller.inputs.wheels import git, git_repository, write


def broken_worktree(top: Path) -> None:
    git(top, "worktree", "add", "--quiet", "../other")
    (top / ".git/worktrees").rename(top / ".git/gone")


def no_head(top: Path) -> None:
    (top / ".git/HEAD").unlink()


def of_another_user(top: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give files away")
    for path in (top, top / ".git"):
        os.chown(path, 1234, 1234)


def bad_settings(top: Path) -> None:
    (top / ".git/config").write_text("[core")


def a_newer_format(top: Path) -> None:
    git(top, "config", "core.repositoryformatversion", "99")


def no_git(top: Path) -> None:
    (top / "git").touch()  # which is no program


@pytest.mark.parametrize(
    ("harm", "folder", "words"),
    [
        (broken_worktree, "other", "not a git repository: .*other"),
        (no_head, "r/sub", r"r is a git repository, and git says: .*not a git repository"),
        (of_another_user, "r/sub", "dubious ownership .* git config --global --add safe.directory"),
        (bad_settings, "r/sub", "bad config line"),
        (a_newer_format, "r", "[Ee]xpected git repo version"),
        (no_git, "r/sub", "r is a git repository, and git says: .*git is not installed|cannot start git"),
    ],
)
def test_a_refusal_is_told_in_its_own_words(
    harm, folder: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")  # which may trust every folder
    git_repository(tmp_path / "r", {"sub/train.py": ""})
    harm(tmp_path / "r")
    if harm is no_git:
        monkeypatch.setenv("PATH", str(tmp_path / "r"))
    with pytest.raises(ConfigError, match=words):
        find_repository(tmp_path / folder)
    assert collect_git_status(tmp_path / folder, (), [])[0]["commit"] is None


def test_variables_of_another_repository_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a hook sets name the same repository, and count for nothing."""
    git_repository(tmp_path / "r", {"train.py": "", "sub/x": ""})
    git_repository(tmp_path / "other", {"x": ""})
    for name, own, others in (("GIT_DIR", ".git", "other/.git"), ("GIT_WORK_TREE", ".", "other")):
        monkeypatch.setenv(name, str(tmp_path / "r" / own))
        monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "nowhere"))
        assert repository_root(tmp_path / "r/sub") == tmp_path / "r"
        for value in (others, "nowhere"):
            monkeypatch.setenv(name, str(tmp_path / value))
            for folder in ("r", ""):
                with pytest.raises(ConfigError, match=f"{name}=.*; run `unset {name}`"):
                    repository_root(tmp_path / folder)
        monkeypatch.delenv(name)


def test_a_folder_may_be_in_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_repository(tmp_path) is None
    with monkeypatch.context() as traced:
        traced.setenv("GIT_TRACE", "1")
        assert find_repository(tmp_path) is None
        assert collect_git_status(tmp_path, (), [])[0]["why"] == "the code is not in a git repository of its own"
    (tmp_path / ".git").mkdir()
    (tmp_path / "sub").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert find_repository(tmp_path / "sub") is None
    monkeypatch.setenv("PATH", "")
    assert find_repository(tmp_path / "sub") is None


def test_submodules_are_cloned_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, value in enumerate({"protocol.file.allow": "always"}.items()):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", value[0])
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value[1])
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    git_repository(tmp_path / "inner", {"mylib.py": ""})
    git_repository(tmp_path / "r", {"train.py": ""})
    git(tmp_path / "r", "submodule", "--quiet", "add", str(tmp_path / "inner"), "vendor")
    git(tmp_path / "r", "commit", "--quiet", "--message=two")
    commit = git(tmp_path / "r", "rev-parse", "HEAD")
    (tmp_path / "r/vendor/mylib.py").write_text("x = 1\n")
    assert collect_git_status(tmp_path / "r", (), [])[0]["not_in_patch"] == ["vendor"]
    assert (checkout(Repository(url=f"{tmp_path}/r", commit=commit), tmp_path / "a") / "vendor/mylib.py").is_file()
    (tmp_path / "inner").rename(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"code\.repository: .*/r: cannot clone its submodules: fatal"):
        checkout(Repository(url=f"{tmp_path}/r", commit=commit), tmp_path / "b")


def test_changes_that_git_was_told_to_overlook_are_on_record(tmp_path: Path) -> None:
    git_repository(tmp_path / "r", {"lr.py": "lr = 1\n", "seed.py": "seed = 1\n", "far/away.py": ""})
    git(tmp_path / "r", "update-index", "--assume-unchanged", "lr.py")
    git(tmp_path / "r", "update-index", "--skip-worktree", "seed.py", "far/away.py")
    (tmp_path / "r/far/away.py").unlink()
    assert collect_git_status(tmp_path / "r", (), [])[0]["changed"] == []
    (tmp_path / "r/lr.py").write_text("lr = 2\n")
    (tmp_path / "r/seed.py").write_text("seed = 2\n")
    document, patch = collect_git_status(tmp_path / "r", (), [])
    assert (document["changed"], document["dirty"]) == (["lr.py", "seed.py"], True)
    assert "+lr = 2" in patch
    assert "+seed = 2" in patch
    assert git(tmp_path / "r", "ls-files", "-v").splitlines() == ["S far/away.py", "h lr.py", "S seed.py"]


def test_an_overlooked_change_in_the_second_of_the_commit_is_on_record(tmp_path: Path) -> None:
    root, old = tmp_path / "r", (1_700_000_000, 1_700_000_000)
    git_repository(root, {"lr.py": "lr = 1\n"})
    git(root, "config", "core.trustctime", "false")
    os.utime(root / "lr.py", old)
    git(root, "update-index", "--refresh")
    git(root, "update-index", "--assume-unchanged", "lr.py")
    os.utime(root / ".git/index", old)
    (root / "lr.py").write_text("lr = 2\n")
    os.utime(root / "lr.py", old)
    assert collect_git_status(root, (), [])[0]["changed"] == ["lr.py"]


def test_what_a_patch_cannot_hold_is_named(tmp_path: Path) -> None:
    git_repository(tmp_path / "r", {"train.py": "lr = 1\n", "old.txt": "", "sub/x": ""})
    (tmp_path / "r/old.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "r/train.py").write_text("lr = 2\n")
    document, patch = collect_git_status(tmp_path / "r", (), [])
    assert (document["changed"], document["not_in_patch"]) == (["old.txt", "train.py"], ["old.txt"])
    assert "+lr = 2" in patch
    git(tmp_path / "r", "checkout", "--quiet", ".")
    done = subprocess.run(["git", "apply", "-"], cwd=tmp_path / "r", input=patch, text=True, check=False)
    assert done.returncode == 0


def test_a_repository_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Repository(url=f"{tmp_path}/r", commit="0" * 40)
    with pytest.raises(ConfigError, match=r"code\.repository: .*/r: cannot clone: fatal"):
        checkout(absent, tmp_path)
    git_repository(tmp_path / "r", {"train.py": ""})
    with pytest.raises(ConfigError, match=r"code\.repository: .*/r: (commit .* does not exist|cannot clone)"):
        checkout(absent, tmp_path)
    assert [p.name for p in (tmp_path / "repositories").iterdir()] == []
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="cannot clone: error: git is not installed"):
        checkout(absent, tmp_path)


def test_a_password_in_a_url_is_not_shown() -> None:
    assert strip_password("https://me:hunter2@example.com/r.git") == "https://example.com/r.git"
    assert strip_password("ssh://git@example.com/r.git") == "ssh://git@example.com/r.git"
    assert strip_password("git@example.com:r.git") == "git@example.com:r.git"


EXCLUDE = (".env",)


def test_commit_changes_and_new_files_are_on_record(tmp_path: Path) -> None:
    root = tmp_path / "r"
    commit = git_repository(root, {"train.py": "lr = 1\n", ".env": "A=1\n", "big.txt": "", ".gitignore": "out/\n"})
    git(root, "remote", "add", "origin", "https://me:hunter2@example.com/r.git")
    clean, patch = collect_git_status(root, EXCLUDE, [])
    assert (clean["commit"], clean["branch"], clean["dirty"], clean["untracked"]) == (commit, "main", False, [])
    assert (clean["remote"], patch) == ("https://example.com/r.git", "")
    (root / "train.py").write_text("lr = 2\ntoken = 'hf_planted'\n")
    (root / ".env").write_text("A=2\n")
    (root / "big.txt").write_text("x\n" * 1_000_000)
    write(root, {"new.py": "", "out/x": ""})
    document, patch = collect_git_status(root, EXCLUDE, ["hf_planted"])
    assert (document["dirty"], document["changed"]) == (True, ["big.txt", "train.py"])
    assert (document["untracked"], document["not_in_patch"]) == (["new.py"], ["big.txt"])
    assert "+lr = 2" in patch
    assert "hf_planted" not in patch
    assert "A=2" not in patch
    git(root, "checkout", "--quiet", ".")
    (root / ".env").write_text("A=1\n")
    done = subprocess.run(["git", "apply", "-"], cwd=root, input=patch, text=True, check=False)
    assert done.returncode == 0
    assert (root / "train.py").read_text().startswith("lr = 2")


def test_code_outside_git_says_so(tmp_path: Path) -> None:
    document, patch = collect_git_status(tmp_path, EXCLUDE, [])
    assert (document["commit"], patch) == (None, "")
    git(tmp_path, "init", "--quiet")
    document, patch = collect_git_status(tmp_path, EXCLUDE, [])
    assert (document["commit"], document["dirty"], patch) == (None, False, "")
    (tmp_path / "sub").mkdir()
    assert "not in a git repository of its own" in collect_git_status(tmp_path / "sub", EXCLUDE, [])[0]["why"]
