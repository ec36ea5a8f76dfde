"""A node's startup script: it is valid, whatever the names are, and starts its parts."""

from __future__ import annotations

import subprocess
from pathlib import Path

from controller.resources.pod.data_disk import mount_part
from controller.resources.pod.startup_script import startup_script, switch_part

METADATA_VALUE_BYTES = 256 << 10
"""https://cloud.google.com/compute/docs/metadata/setting-custom-metadata#limitations"""


def test_it_starts_the_switch_in_the_background_with_exactly_its_arguments(tmp_path: Path) -> None:
    hostile = """it's "$(touch hit)" `touch hit` \\ END_OF_DEAD_MANS_SWITCH"""
    script = startup_script("mounted=yes\n", switch_part(7200.0, [hostile, "b"]))
    assert len(script.encode()) < METADATA_VALUE_BYTES / 10
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "setsid").write_text('#!/bin/sh\nprintf "%s\\0" "$@" > seen\n')
    (tools / "setsid").chmod(0o700)
    (tmp_path / "script").write_text(script)
    variables = {"PATH": f"{tools}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    subprocess.run(["bash", "-c", ". ./script; wait"], cwd=tmp_path, env=variables, check=True)
    words = (tmp_path / "seen").read_text().split("\0")
    assert words[:4] == ["python3", "-I", "-S", "-c"]
    assert words[5:] == ["7200", hostile, "b", ""]
    compile(words[4], "switch", "exec")
    assert not (tmp_path / "hit").exists()


def test_the_mount_of_a_data_disk_comes_first() -> None:
    script = startup_script(mount_part(100), switch_part(60.0, ["a"]))
    assert script.startswith("#!/bin/bash\n")
    assert script.index("mkfs") < script.index("setsid")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
