import stat
import subprocess
import sys
from pathlib import Path

import asyncssh

from controller.ssh.client_key import private_key, public_key_line


def test_a_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    line = public_key_line(tmp_path / "keys", "slipway")
    path = private_key(tmp_path / "keys")
    assert line.split()[0] == "ssh-ed25519"
    assert line.endswith(" slipway")
    assert public_key_line(tmp_path / "keys", "slipway") == line
    assert asyncssh.read_private_key(path).export_public_key().split()[1].decode() == line.split()[1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no draft is left"


def test_several_processes_agree_on_one_key(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from controller.ssh.client_key import *; "
        "print(public_key_line(pathlib.Path(sys.argv[1]), 'u'))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "keys")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert len({process.communicate(timeout=300)[0] for process in processes}) == 1
