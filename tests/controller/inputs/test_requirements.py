"""A requirements file: includes, git lines, what means nothing on a worker; and wheels built of git lines."""

from pathlib import Path

import pytest

from controller.core.errors import CloudError, ConfigError
from controller.inputs.requirements import GitRequirement, read_requirements
from controller.resources.uploads.archives import build_wheel
from tests.controller.inputs.wheels import git_repository, package_repository

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
    for text, words in {
        "-e .\n": "'-e .' is a local folder, which the workers do not have",
        "./lib\n": "program.setup",
        "mine @ file:///home/me/mine\n": "local folder",
        "-c bounds.txt\n": "put the constraints into the file itself",
        "-r missing.txt\n": "No such file",
        "-r requirements.txt\n": "includes itself",
    }.items():
        with pytest.raises(ConfigError, match=r"^env\.requirements: requirements\.txt") as refused:
            read_requirements(written(tmp_path, text), "requirements.txt")
        assert words in str(refused.value)


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
