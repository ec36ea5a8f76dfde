import stat
import subprocess
import sys
from pathlib import Path

import asyncssh
import pytest

from controller.keys import HostKeys, private_key, public_line


def test_a_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    line = public_line(tmp_path / "keys", "slipway")
    path = private_key(tmp_path / "keys")
    assert line.split()[0] == "ssh-ed25519"
    assert line.endswith(" slipway")
    assert public_line(tmp_path / "keys", "slipway") == line
    assert asyncssh.read_private_key(path).export_public_key().split()[1].decode() == line.split()[1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no draft is left"


def test_several_processes_agree_on_one_key(tmp_path: Path) -> None:
    script = "import pathlib, sys; from controller.keys import *; print(public_line(pathlib.Path(sys.argv[1]), 'u'))"
    command = [sys.executable, "-c", script, str(tmp_path / "keys")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert len({process.communicate(timeout=60)[0] for process in processes}) == 1


@pytest.mark.parametrize(
    ("published", "expected", "reads"),
    [
        ([["a", "b"]], ["a", "b", "a"], 1),
        ([[], ["a", "b"]], ["", "b", "a"], 2),
        ([["", "b"], ["a", "b"]], ["", "b", "a"], 2),
    ],
    ids=["all there", "none at first", "one late"],
)
def test_host_keys_are_read_until_they_are_there(published: list, expected: list[str], reads: int) -> None:
    left = list(published)
    keys = HostKeys(lambda: left.pop(0))
    assert [keys.of(worker) for worker in (0, 1, 0)] == expected
    assert len(published) - len(left) == reads


def test_a_refused_host_key_is_read_anew_once(tmp_path: Path) -> None:
    published = [["old", "old"], ["new", "new"]]
    keys = HostKeys(lambda: published.pop(0))
    assert keys.of(0) == "old"
    assert keys.of(0, refused="old") == "new"
    assert keys.of(1, refused="old") == "new", "another worker has had it read already"
