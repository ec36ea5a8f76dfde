"""Words of commands that prepare a worker: the files that they install, and the rights that they need."""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from controller.inputs.program_words import PLACEHOLDER, is_interpreter, is_script, is_text_option

OF_ROOT = frozenset(["apt", "apt-get", "dpkg", "snap", "mount", "systemctl", "sysctl", "modprobe"])
PIP_FILES = frozenset(["-r", "--requirement", "--requirements", "-c", "--constraint", "-e", "--editable"])
"""Options of pip and uv before a file or folder."""


def named_file_problem(argv: Sequence[str], root: Path) -> str:
    """Return that a file or folder that words of pip and uv name is not shipped; empty if all are."""
    for option, word in pairwise(argv if "pip" in argv else ()):
        place = word.partition("[")[0]
        named = option in PIP_FILES or place.startswith(("./", "../"))
        is_elsewhere = place.startswith("/") or {":", PLACEHOLDER} & set(place)
        if named and not is_elsewhere and not (root / place).exists():
            return f"{word}: there is no such file or folder in {root}"
    return ""


def lines_of(argv: Sequence[str]) -> list[list[str]]:
    """Return the words of each command that words start: of themselves, or of a shell's line as written in it."""
    line = argv[2] if len(argv) > 2 and is_text_option(argv[0], argv[1]) else ""
    return [part.split() for part in re.split(r"&&|\|\||[;|\n]", line) if part.strip()] if line else [[*argv]]


def root_doubt(argv: Sequence[str]) -> str:
    """Return why a command that changes the machine would fail or wait, or one of Python must not be root's."""
    for words in lines_of(argv):
        by_root = words[0] == "sudo"
        name = next((word for word in words[by_root:] if not word.startswith("-")), "")
        if by_root and (is_interpreter(name) or name in ("pip", "pip3", "uv") or is_script(name)):
            return "sudo leaves out the program's Python and variables; leave it out"
        if not by_root and name in OF_ROOT:
            return f"{name} needs the rights of root; write sudo {name}"
        if name in ("apt", "apt-get") and "install" in words and not {"-y", "-qy", "-yq", "--yes", "-qqy"} & {*words}:
            return f"{name} asks whether to install, and nobody answers; add -y"
    return ""
