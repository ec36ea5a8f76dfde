"""What prepares a worker names files that are shipped, and has the rights that it needs."""

from pathlib import Path

import pytest

from controller.inputs.program_words import ENTER
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
        ("pip3 install -U ./no", "./no"),
        ("uv pip install --system -q ./no", "./no"),
        ("pip install einops --no-deps ../no", "../no"),
        ("uv pip sync -c no.txt", "no.txt"),
        ("grep -r no.txt", ""),
        ("pip install --target ./vendor einops", ""),
        ("pip install -c r.txt --prefix ./no --cache-dir ./no --log ./no.log x", ""),
        ("pip download -d ./wheels einops", ""),
        ("pip wheel -w ./wheels einops", ""),
        ("uv pip compile r.txt -o ./lock.txt", ""),
        ("uv pip compile -c no.txt r.txt -o ./lock.txt", "no.txt"),
        ("uv --directory sub pip install -r s.txt", ""),
        ("pip list -e --format json", ""),
        ("pip freeze --path ./no", ""),
    ],
)
def test_what_is_installed_is_shipped(tmp_path: Path, words: str, absent: str) -> None:
    (tmp_path / "r.txt").touch()
    (tmp_path / "own").mkdir()
    said = f"{absent}: there is no such file or folder in {tmp_path}" if absent else ""
    assert named_file_problem(words.split(), tmp_path) == said


def test_what_is_installed_in_a_folder_is_looked_for_there(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/s.txt").touch()
    assert named_file_problem([*ENTER, "sub", "pip", "install", "-r", "s.txt"], tmp_path) == ""
    assert named_file_problem([*ENTER, "sub", "pip", "install", "-r", "r.txt"], tmp_path).startswith("r.txt: there is ")


@pytest.mark.parametrize(
    "words",
    [
        ["sudo", "apt-get", "install", "-y", "g++"],
        ["bash", "a.sh"],
        *(
            words.split()
            for words in (
                "apt list --installed",
                "apt search update",
                "apt-get -s install x",
                "apt-get download x",
                "dpkg -s libgl1",
                "dpkg -l",
                "mount",
                "sysctl vm.max_map_count",
                "systemctl --user start a",
                "systemctl status a",
                "sudo ./install.sh",
                "sudo bash install.sh",
                "sudo -E env python a.py",
            )
        ),
        *(["sudo", "apt-get", *words.split(), "x"] for words in ("install --assume-yes", "-yqq install")),
        *(["sudo", "apt-get", "install", *words.split()] for words in ("-qq x", "x -qy", "-q=2 x", "x --yes")),
        ["sudo", "apt-get", "-o", "APT::Get::Assume-Yes=true", "install", "x"],
        ["sudo", "bash", "-c", "apt-get update && apt-get install -y x"],
        *(
            ["bash", "-c", line]
            for line in (
                "sudo apt update; python a.py",
                "mount | grep gcs",
                "dpkg -l | grep x",
                "yes | sudo apt-get install x",
                "sudo apt-get update && yes '' | sudo apt-get install x",
                "sudo apt-get install \\\n  -y g++",
                "echo 'first; apt install x'",
                "cat > a.sh <<EOF\napt-get update\nEOF",
                "if [ `id -u` = 0 ]; then\napt-get update\nfi",
                "sudo apt-get update || apt-get update",
                "echo it's",
            )
        ),
    ],
)
def test_rights_that_suffice_are_not_commented_on(words: list[str]) -> None:
    assert root_doubt(words) == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(
            (words.split(), "needs the rights of root; write sudo")
            for words in (
                "apt -q install g++",
                "dpkg -i a.deb",
                "snap install x",
                "systemctl restart a",
                "apt-get full-upgrade",
            )
        ),
        (["bash", "-c", "echo a # first\ncd b;\napt-get update"], "apt-get needs the rights of root"),
        (["bash", "-euo", "pipefail", "-c", "apt-get update | tee log"], "apt-get needs the rights of root"),
        (["bash", "-c", "sudo apt-get update && sudo apt-get install 'g++' | tee log 2>&1"], "asks whether to install"),
        (["sudo", "apt", "-q", "install", "--only-upgrade", "x"], "asks whether to install"),
        (["sudo", "uv", "pip", "install", "a"], "sudo leaves out"),
        (["bash", "-c", "ls && sudo -H pip3 install a"], "sudo leaves out"),
    ],
)
def test_a_command_that_fails_or_waits_without_a_person_is_named(words: list[str], said: str) -> None:
    assert said in root_doubt(words)
