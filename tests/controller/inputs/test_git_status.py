"""What git says of the code of a run."""

from __future__ import annotations

import subprocess
from pathlib import Path

from controller.inputs.git_status import collect_git_status
from tests.controller.inputs.wheels import git, git_repository

EXCLUDE = (".env",)


def test_commit_changes_and_new_files_are_on_record(tmp_path: Path) -> None:
    root = tmp_path / "r"
    commit = git_repository(root, {"train.py": "lr = 1\n", ".env": "A=1\n", "big.txt": "", ".gitignore": "out/\n"})
    git(root, "remote", "add", "origin", "https://me:hunter2@example.com/r.git")
    clean, patch = collect_git_status(root, EXCLUDE, [])
    assert (clean["commit"], clean["branch"], clean["dirty"], clean["untracked"], patch) == (
        commit,
        "main",
        False,
        [],
        "",
    )
    assert clean["remote"] == "https://example.com/r.git"
    (root / "train.py").write_text("lr = 2\ntoken = 'hf_planted'\n")
    (root / ".env").write_text("A=2\n")
    (root / "big.txt").write_text("x\n" * 1_000_000)
    (root / "new.py").write_text("")
    (root / "out").mkdir()
    (root / "out/x").write_text("")
    document, patch = collect_git_status(root, EXCLUDE, ["hf_planted"])
    assert (document["dirty"], document["changed"], document["untracked"]) == (
        True,
        ["big.txt", "train.py"],
        ["new.py"],
    )
    assert document["not_in_patch"] == ["big.txt"]
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
