"""Which files are shipped: exclusions, the limit, another repository at a commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.schema.config import Config
from conf.schema.run.program import Repository
from controller.config.compose import compose
from controller.core.errors import ConfigError
from controller.inputs.code import take_snapshot
from controller.inputs.git import checkout, strip_password
from tests.controller.inputs.wheels import git, git_repository


def config(tmp_path: Path, *overrides: str) -> Config:
    words = ["cloud=local", "program=command", "program.command=[echo]", f"run.state_dir={tmp_path}/state"]
    found, problems = compose([*words, *overrides])
    assert not problems
    assert found is not None
    return found


def test_secrets_and_what_is_excluded_stay_here(tmp_path: Path) -> None:
    files = {"train.py": "", ".env": "TOKEN=1", "sub/.env.local": "", "key.pem": "", "data/big.bin": "", "data.py": ""}
    git_repository(tmp_path / "r", files)
    (tmp_path / "r" / "new.py").write_text("")
    found = take_snapshot(config(tmp_path), tmp_path / "r")
    assert found.files == ("data.py", "data/big.bin", "new.py", "train.py")
    assert take_snapshot(config(tmp_path, "code.exclude=[data/]"), tmp_path / "r").files == (
        ".env", "data.py", "key.pem", "new.py", "sub/.env.local", "train.py",
    )  # fmt: skip


def test_the_state_folder_is_no_code(tmp_path: Path) -> None:
    """It may lie in the repository, and changes while it is shipped."""
    git_repository(tmp_path / "r", {"train.py": "", "home/runs/r/events.jsonl": ""})
    assert take_snapshot(config(tmp_path, f"run.state_dir={tmp_path}/r/home"), tmp_path / "r").files == ("train.py",)


@pytest.mark.parametrize("is_repository", [True, False])
def test_links_bring_nothing_from_outside(tmp_path: Path, is_repository: bool) -> None:
    (tmp_path / "outside/deep").mkdir(parents=True)
    (tmp_path / "outside/deep/secret").write_text("s")
    if is_repository:
        git_repository(tmp_path / "r", {"train.py": ""})
    else:
        (tmp_path / "r").mkdir()
        (tmp_path / "r/train.py").write_text("")
    (tmp_path / "r/folder").symlink_to(tmp_path / "outside")
    (tmp_path / "r/file").symlink_to(tmp_path / "outside/deep/secret")
    (tmp_path / "r/circle").symlink_to(tmp_path / "r")
    assert take_snapshot(config(tmp_path), tmp_path / "r").files == ("train.py",)


def test_too_much_names_the_largest(tmp_path: Path) -> None:
    git_repository(tmp_path / "r", {"train.py": "", "weights.bin": "w" * 2_000_000})
    with pytest.raises(ConfigError, match=r"code\.max_mb: 2\.0 MB .* largest: weights\.bin \(2\.0 MB\).*code\.exclude"):
        take_snapshot(config(tmp_path, "code.max_mb=1"), tmp_path / "r")


def test_another_repository_is_shipped_at_its_commit_and_cloned_once(tmp_path: Path) -> None:
    first = git_repository(tmp_path / "r", {"train.py": "first"})
    (tmp_path / "r" / "train.py").write_text("second")
    git(tmp_path / "r", "commit", "--quiet", "--all", "--message=two")
    words = [f"code.repository={{url: {tmp_path}/r, commit: {first}}}"]
    found = take_snapshot(config(tmp_path, *words), tmp_path)
    assert found.files == ("train.py",)
    assert (found.root / "train.py").read_text() == "first"
    (tmp_path / "r").rename(tmp_path / "gone")
    (found.root / "made.txt").write_text("by a build")
    assert take_snapshot(config(tmp_path, *words), tmp_path).sha256 == found.sha256


def test_a_repository_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"code\.repository: .*/r: cannot clone: fatal"):
        checkout(Repository(url=f"{tmp_path}/r", commit="0" * 40), tmp_path)
    git_repository(tmp_path / "r", {"train.py": ""})
    with pytest.raises(ConfigError, match=r"code\.repository: .*/r: (commit .* does not exist|cannot clone)"):
        checkout(Repository(url=f"{tmp_path}/r", commit="0" * 40), tmp_path)
    assert [p.name for p in (tmp_path / "repositories").iterdir()] == []


def test_without_git_a_repository_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="cannot clone: error: git is not installed"):
        checkout(Repository(url=f"{tmp_path}/r", commit="0" * 40), tmp_path)


def test_a_password_in_a_url_is_not_shown() -> None:
    assert strip_password("https://me:hunter2@example.com/r.git") == "https://example.com/r.git"
    assert strip_password("ssh://git@example.com/r.git") == "ssh://git@example.com/r.git"
    assert strip_password("git@example.com:r.git") == "git@example.com:r.git"
