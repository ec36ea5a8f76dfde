"""What prepares a worker names files that are shipped, and has the rights that it needs."""

from pathlib import Path

import pytest

from controller.inputs.setup_words import named_file_problem, root_doubt


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        ("uv pip install -r no.txt", "no.txt"),
        ("pip install --constraint no.txt jax", "no.txt"),
        ("pip install ./no[extra]", "./no[extra]"),
        ("python -m pip install -e lib", "lib"),
        ("pip install -r r.txt -e . ./own[dev]", ""),
        ("uv pip install -r https://h/r.txt -e git+https://h/r.git", ""),
        ("pip install -r {run_dir}/r.txt -c /etc/pip.txt", ""),
        ("grep -r no.txt", ""),
    ],
)
def test_what_is_installed_is_shipped(tmp_path: Path, words: str, absent: str) -> None:
    (tmp_path / "r.txt").touch()
    (tmp_path / "own").mkdir()
    said = f"{absent}: there is no such file or folder in {tmp_path}" if absent else ""
    assert named_file_problem(words.split(), tmp_path) == said


@pytest.mark.parametrize(
    "words",
    [["sudo", "apt-get", "install", "-y", "g++"], ["bash", "-c", "sudo apt update; python a.py"], ["bash", "a.sh"]],
)
def test_rights_that_suffice_are_not_commented_on(words: list[str]) -> None:
    assert root_doubt(words) == ""
