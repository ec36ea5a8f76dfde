"""Words of commands that prepare a worker: the files that they install, and the rights that they need."""

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from controller.inputs.program_words import PLACEHOLDER, shell_text, started

PIP_READS = frozenset(["install", "uninstall", "download", "wheel", "compile", "sync"])
PIP_FILES = frozenset(["-r", "--requirement", "--requirements", "-c", "--constraint", "-e", "--editable"])
"""Options of pip and uv before a file or folder that they read."""
PIP_FLAGS = frozenset(["-U", "--upgrade", "-q", "--no-deps", "--system", "--no-cache-dir", "--force-reinstall"])
"""Options that take no word. Behind any other may be a place that they write to."""
CHANGES = frozenset(["install", "update", "upgrade", "dist-upgrade", "full-upgrade", "remove", "purge", "autoremove"])
OF_ROOT = {
    **dict.fromkeys(("apt", "apt-get", "snap"), CHANGES),
    "dpkg": frozenset(["-i", "--install", "-r", "--remove", "-P", "--purge"]),
    "systemctl": frozenset(["start", "stop", "restart", "enable", "disable"]),
}
"""Programs that only root may let do this to the machine."""
NOTHING_DONE = re.compile(r"-[a-zA-Z]*s[a-zA-Z]*|--(simulate|dry-run|just-print|no-act|recon|print-uris|user|help)")
ANSWERS = re.compile(r"-[a-zA-Z]*(y|qq)[a-zA-Z]*|-q=[2-9]|--yes|--force-yes|.*assume-(yes|no).*", re.IGNORECASE)
"""Words with which apt asks nothing."""
OF_VENV = re.compile(r"python[\d.]*|pip3?|uvx?")
SIGNS = "();<>|&\n"
BRANCHES = frozenset(["if", "case", "while", "until", "for"])
"""With these, a line does not start each of its commands, and may ask who it is."""


def named_file_problem(argv: Sequence[str], root: Path) -> str:
    """Return that a file or folder that words of pip and uv read is not shipped; empty if all are."""
    words, folder = started(argv, root)
    at = next((i for i, word in enumerate(words) if word in ("pip", "pip3")), len(words))
    verb = next((i for i, word in enumerate(words) if i > at and word in PIP_READS), len(words))
    if any(word.startswith("--directory") for word in words):
        return ""
    for option, word in pairwise(words[verb:]):
        place = word.partition("[")[0]
        is_free = option in PIP_FLAGS or not option.startswith("-")
        named = option in PIP_FILES or (words[verb] == "install" and is_free and place.startswith(("./", "../")))
        is_elsewhere = place.startswith(("/", "-")) or {":", PLACEHOLDER} & set(place)
        if named and not is_elsewhere and not (folder / place).exists():
            return f"{word}: there is no such file or folder in {folder}"
    return ""


def _commands(argv: Sequence[str]) -> Iterator[tuple[list[str], bool]]:
    """Yield the words of each command that words surely start, and whether another answers it.

    Of themselves, or of a shell's line; none of a line that only a shell can follow.
    """
    line = shell_text(argv)
    if not line:
        yield [*argv], False
        return
    lexer = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars=SIGNS)
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    try:
        words = list(lexer)
    except ValueError:  # a quote that is never closed
        return
    signs = {word for word in words if word and set(word) <= set(SIGNS)}
    joins = {sign for sign in signs if sign.replace("\n", "") in ("", ";", "&&", "|")}
    if BRANCHES & {*words} or any({"(", "<", "|"} & {*sign} for sign in signs - joins):
        return
    command, is_fed = list[str](), False
    for word in [*words, "\n"]:
        if word not in {*joins, "\n"}:
            command.append(word)
            continue
        if command:
            yield command, is_fed
        command, is_fed = [], "|" in word


def root_doubt(argv: Sequence[str]) -> str:
    """Return why a command that changes the machine would fail or wait, or one of Python must not be root's."""
    for words, is_fed in _commands(argv):
        by_root = words[0] == "sudo"
        plain = [word for word in words[by_root:] if not word.startswith("-")]
        name, verb = [*plain, "", ""][:2]
        if by_root and OF_VENV.fullmatch(name):
            return "sudo leaves out the program's Python and variables; leave it out"
        does = {verb} if name != "dpkg" else {*words}
        if not does & OF_ROOT.get(name, frozenset()) or any(NOTHING_DONE.fullmatch(word) for word in words):
            continue
        if not by_root:
            return f"{name} needs the rights of root; write sudo {name}"
        if name in ("apt", "apt-get") and verb == "install" and not is_fed and not any(map(ANSWERS.fullmatch, words)):
            return f"{name} asks whether to install, and nobody answers; add -y"
    return ""
