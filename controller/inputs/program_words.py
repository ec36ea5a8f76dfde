"""Words of a command line: what they start on a worker, and why it could not start there.

The same judgement for the words after `--` and for `program.command`.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from controller.core.text import nearest_names
from controller.inputs.git import run_git
from controller.inputs.modules import OURS, is_importable, syntax_tree

INTERPRETERS = re.compile(r"^(python[\d.]*|bash|sh|dash|zsh)$")
PYTHON_OPTION = re.compile(r"-[bBdEhiIOPqsSuvVx]*(?P<option>[mcXW])(?P<value>.*)|--check-hash-based-pycs", re.DOTALL)
SHELL_OPTION = re.compile(r"[-+][a-zA-Z]*?(?P<option>[coO])[a-zA-Z]*(?P<value>)|--(rcfile|init-file)")
"""Options of an interpreter that take a word: the next one, unless it is attached."""
TELLS = re.compile(r"-[VhH?]+|--(version|help)[\w-]*")  # options that only say something of an interpreter
SCRIPT_SUFFIXES = (".py", ".sh", ".bash", ".pl", ".jl")
SHELL_OPERATORS = frozenset(["&&", "||", "|", ";", "&", ">", ">>", "<", "<<", "<<<", "2>", "2>>", "2>&1", "&>", "|&"])
SHELL_WORDS = SHELL_OPERATORS | {
    *(".", "alias", "builtin", "case", "cd", "command", "declare", "do", "done", "elif", "else", "eval", "exec"),
    *("exit", "export", "fi", "for", "function", "hash", "if", "let", "local", "popd", "pushd", "read", "set"),
    *("shift", "shopt", "source", "then", "trap", "ulimit", "umask", "unset", "until", "wait", "while"),
}
"""What a shell does itself; there is no such program. Builtins that are programs too, as `test`, are not among them."""
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)
WRAPPERS = frozenset(
    ["env", "nohup", "nice", "ionice", "stdbuf", "timeout", "time", "taskset", "numactl", "setsid", "sudo"]
)
"""Programs that start another one, which their further words name."""
ON_WORKERS = WRAPPERS | {
    *("xargs", "make", "gcloud", "gsutil", "docker", "uv", "uvx", "git", "curl", "nproc", "lscpu", "free")
}
"""Programs that a TPU VM's image has, or Slipway puts there, whether this machine has them or not."""
LAUNCHERS = frozenset(["torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "conda", "poetry", "pipenv"])
"""Programs that start a Python program on each device or machine, as Slipway does on each worker, or in a venv."""
OF_TERMINAL = frozenset(["tmux", "screen", "vi", "vim", "nano", "less", "top", "htop"])  # which wait for somebody
ENTER = ("sh", "-c", 'cd "$1" && shift && exec "$@"', "sh")
"""Words that start the words behind a folder in that folder."""
SHELL_SYNTAX = frozenset("$`*?~\n;&|<>(){}")
PLACEHOLDER = "{"
"""Begins what Slipway fills in."""
SYSTEM_PLACES = ("/usr/", "/bin/", "/opt/")
OF_PYTHON = frozenset(["", ".py", ".pyw", ".pyc", ".pyz", ".zip", ".whl", ".egg"])
"""Endings of what python starts."""
JOBS = "slipway_job"
"""The module that is shipped with the jobs of a multirun."""
NO_PROGRAM = "there is no such program on this machine or among Slipway's packages"
CURE = "name the packages that have it with env.packages=requirements env.requirements=FILE"


def shell_line(argv: Sequence[str]) -> tuple[str, str] | None:
    """Return why words are a line for a shell, and what to write after `--`; None if they start a program."""
    first = argv[0]
    if len(argv) == 1 and len(first.split()) > 1:
        try:
            words = shlex.split(first)
        except ValueError:
            words = []
        plain = words and not shell_line(words) and not set(first) & set("$`*?~\n")
        return f"{first!r} is one word, and no program's name", shlex.join(words if plain else ["bash", "-c", first])
    if first == "--" and argv[1:]:
        return "-- stands twice", shlex.join(argv[1:])
    line = " ".join(word if word in SHELL_WORDS or word == first else shlex.quote(word) for word in argv)
    if len(first.split()) > 1:
        return f"{first!r} is no program's name", shlex.join(["bash", "-c", line])
    if ASSIGNMENT.match(first):
        return f"{first} is no program; `env` sets variables", shlex.join(["env", *argv])
    inner = argv[:-1] if argv[-1] == ";" else argv  # the last word may be the `;` of find
    of_shell = [first] if first in SHELL_WORDS else [word for word in inner if word in SHELL_OPERATORS]
    if of_shell:
        return f"{of_shell[0]} is for a shell, and no shell reads these words", shlex.join(["bash", "-c", line])
    return None


def started(argv: Sequence[str], folder: Path) -> tuple[list[str], Path]:
    """Return the words that start the program itself, and the folder in which they do.

    Looks behind `env`, `timeout 60` and the like, into a `bash -c` that names a program and nothing for a shell, and
    behind what enters a folder.
    """
    words = list(argv)
    if tuple(words[: len(ENTER)]) == ENTER and len(words) > len(ENTER) + 1:
        return started(words[len(ENTER) + 1 :], folder / words[len(ENTER)])
    if Path(words[0]).name in WRAPPERS and not any(word.startswith(("-C", "--chdir", "-S")) for word in words):
        inner = (i for i, word in enumerate(words) if i and (_is_interpreter(word) or _is_script(word)))
        if (at := next(inner, None)) is not None:
            return started(words[at:], folder)
    launches = words[:2] == ["uv", "run"] or Path(words[0]).name in LAUNCHERS
    if launches and (at := next((i for i, w in enumerate(words) if w.endswith(".py")), None)):
        return started(["python", *words[at:]], folder)
    line = shell_text(words)
    if line and line == words[-1] and not set(line) & SHELL_SYNTAX:
        try:
            inside = shlex.split(line)
        except ValueError:
            inside = []
        if inside and shell_line(inside) is None:
            return started(inside, folder)
    return words, folder


def program_problem(argv: Sequence[str], folder: Path, root: Path, *, bare: bool) -> str:
    """Return why a worker could not start the words, which are for no shell, or lack what they name; else empty.

    Args:
        argv: the words.
        folder, root: where they start, and the code that is shipped, with the folder in it.
        bare: whether nothing but Slipway's packages and what the repository has is installed.
    """
    if not argv[0].strip():
        return "the program's name is empty; name one, such as python train.py"
    if bare and Path(argv[0]).name in LAUNCHERS and (absent := _absence(argv, folder)):
        return f"{absent}; Slipway itself starts a program on every worker: {shlex.join(started(argv, folder)[0])}"
    words, folder = started(argv, folder)
    if argv[0] == "timeout" and words == [*argv[1:]]:
        return f"timeout: how long stands before the program: {shlex.join(['timeout', '60m', *words])}"
    script = script_of(words)
    if (named := script or words[0]).endswith(".ipynb"):
        return f"{named}: is a notebook, no program; jupyter nbconvert --to script {shlex.quote(named)} makes one of it"
    python = words[0]
    if _is_interpreter(python) and "/" in python and not _is_shipped(python, folder):
        return f"{python}: the workers have no such file, but a Python of their own; write {Path(python).name}"
    if script is None:
        return _option_problem(words) or (_absence(words, folder) if bare else "")
    if PLACEHOLDER in script:
        return ""
    path = folder / script
    if Path(script).is_absolute():
        if path.resolve().is_relative_to(root):
            return f"{script}: the workers do not have this path; name it relative to {folder}"
        return ""  # such as /usr/bin/env, which a worker has
    if not path.resolve().is_relative_to(root):
        return f"{script}: is outside {root}, which is what the workers get"
    if os.path.isdir(path) and not (path / "__main__.py").is_file():  # noqa: PTH112 (Path's raises for long names)
        return f"{script}: is a folder without __main__.py; name a file of it"
    if not os.path.exists(path):  # noqa: PTH110
        return f"{script}: there is no such file in {folder}{_near_programs(path, folder, root)}"
    if run_git(["check-ignore", "--quiet", script], folder).returncode == 0:
        return f"{script}: is ignored by git, so the workers would not get it; see .gitignore"
    return _start_problem(words, path)


def _is_shipped(name: str, folder: Path) -> bool:
    """Return whether a worker has a file of this name, unless it lacks an absolute path."""
    ignored = run_git(["check-ignore", "--quiet", name], folder).returncode == 0
    return name.startswith("/") or PLACEHOLDER in name or ((folder / name).is_file() and not ignored)


def program_doubt(argv: Sequence[str], folder: Path, root: Path, *, here: bool, certain: bool = True) -> str:
    """Return why the workers may lack what the words name, or start what is no program; empty if nothing says so.

    Args:
        argv: as for `program_problem`, which finds no fault with it; so are folder and root.
        here: whether this machine's files are the workers' too.
        certain: whether no earlier words can make or fill files.
    """
    words, folder = started(argv, folder)
    script = script_of(words) or ""
    if PLACEHOLDER in script:
        return ""
    if words[0] in OF_TERMINAL:
        return f"{words[0]}: needs a terminal, and a run has none; `slipway ssh` opens a shell on a worker"
    plain = words[0] == "make" and not any(word[:1] == "-" for word in words)
    if certain and plain and (said := _make_problem(words[1:], folder)):
        return f"make: {said}"
    if script.startswith("/") and not script.startswith(SYSTEM_PLACES) and not (here and Path(script).exists()):
        return f"{script}: is outside {root}, which is what the workers get; it must be on them already"
    if Path(words[0]).name.startswith("python") and Path(script).suffix not in OF_PYTHON:
        return f"{script}: is no Python by its name; python starts files such as {Path(script).stem}.py"
    is_empty = certain and script and (folder / script).is_file() and not (folder / script).stat().st_size
    return f"{script}: is empty, so the run ends at once" if is_empty else ""


def _make_problem(words: Sequence[str], folder: Path) -> str:
    """Return that make has no Makefile, or none of its targets the name that is nearly one; empty otherwise."""
    files = [path for path in folder.glob("*[mM]akefile") if path.is_file()]
    text = files[0].read_text(errors="replace") if files else ""
    targets = " ".join(re.findall(r"^([\w./ -]+?)\s*:(?![:=])", text, re.MULTILINE)).split()
    for word in (word for word in words if word not in targets and not (folder / word).exists()):
        if near := get_close_matches(word, targets, n=1, cutoff=0.75):
            return f"{files[0].name} has no {word}; did you mean {near[0]}?"
    return "" if files else f"there is no Makefile in {folder}"


def _near_programs(path: Path, folder: Path, root: Path) -> str:
    """Say which programs are meant by one that is not there: those so called elsewhere, or with names like it."""
    listed = run_git(["ls-files", "-z", "--cached", "--others", "--exclude-standard"], root).stdout.split("\0")
    files = [root / name for name in listed if name.endswith(SCRIPT_SUFFIXES) and (root / name).is_file()]
    if same := sorted(os.path.relpath(file, folder) for file in files if file.name == path.name):
        return f"; did you mean {' or '.join(same[:3])}?"
    beside = {file.name for file in files if file.parent == path.parent.resolve()}
    near = nearest_names(path.name, beside or {os.path.relpath(file, folder) for file in files})
    return f", which has {near or 'no programs'}"


def _option_problem(words: Sequence[str]) -> str:
    """Return what is wrong with the last option of an interpreter, or with the module that it names."""
    if not _is_interpreter(words[0]):
        return ""
    option, word = _entry(words)
    if option in ("", "-") and word is None and not any(TELLS.fullmatch(each) for each in words[1:]):
        file = "train.py" if "python" in words[0] else "run.sh"
        return f"{shlex.join(words)}: has nothing to run; name a file, such as {words[0]} {file}"
    if option in ("-c", "-m") and word is None:
        return f"{option}: nothing is behind it; name {'a module' if option == '-m' else 'what to run'}"
    module = word or ""
    if option == "-m" and (module.endswith(".py") or "/" in module):
        name = module.removeprefix("./").removesuffix(".py").replace("/", ".")
        return f"-m {module}: is a file, not a module's name; use: python -m {name}"
    return ""


def _start_problem(words: Sequence[str], path: Path) -> str:
    """Return why a file cannot be started so; empty if it can."""
    first, script = Path(words[0]).name, script_of(words) or ""
    by = {".py": "python", ".sh": "bash", ".bash": "bash"}.get(path.suffix)
    if _is_interpreter(words[0]):
        if by is None or (by == "python") == first.startswith("python"):
            return ""
        return f"{script}: is not for {first}; use: {shlex.join([by, script])}"
    if path.is_dir():
        return f"{script}: is a folder, which only python starts; use: python {shlex.quote(script)}"
    cure = f"use: {shlex.join([by, *words])}" if by else f"run chmod +x {shlex.quote(script)}"
    with path.open("rb") as stream:
        head = stream.readline(256)
    if not path.stat().st_mode & 0o100:
        return f"{script}: cannot be executed, for it has no x bit; {cure}"
    if head.startswith(b"#!") and head.endswith(b"\r\n"):
        return f"{script}: its first line ends as on Windows, so its interpreter is not found; save it with LF"
    if head.startswith(b"#!") and (problem := _shebang_problem(head.decode(errors="replace")[2:].split())):
        return f"{script}: {problem}"
    if not head.startswith((b"#!", b"\x7fELF")):
        cure = cure if by else "begin it with one, such as #!/bin/bash"
        return f"{script}: cannot be executed: it is no program for Linux and has no #! line; {cure}"
    return ""


def _shebang_problem(words: Sequence[str]) -> str:
    """Return why the words behind `#!` start nothing on a worker; empty if they may."""
    if not words:
        return "its #! line names nothing; write #!/usr/bin/env python3"
    name = next((word for word in words[1:] if not word.startswith("-")), "") if words[0].endswith("/env") else ""
    if name and not _is_interpreter(name) and name not in ON_WORKERS and shutil.which(name) is None:
        return f"its #! line names {name}, and there is no such program on this machine"
    if not words[0].startswith(SYSTEM_PLACES):
        return f"its #! line names {words[0]}, which the workers lack; write #!/usr/bin/env python3"
    return ""


def _absence(words: Sequence[str], folder: Path) -> str:
    """Return that the folder and this machine lack the program or module, so that nothing installs it; else empty."""
    first = words[0]
    if not _is_interpreter(first):
        beside = Path(sys.executable).parent / first
        if "/" in first or first in ON_WORKERS or beside.exists() or shutil.which(first):
            return ""
        if (folder / first).is_file():
            by = "python" if first.endswith(".py") else "bash"
            written = [by, *words] if first.endswith(SCRIPT_SUFFIXES[:3]) else [f"./{first}", *words[1:]]
            return f"{first}: is a file here, and no program on the workers' PATH; use: {shlex.join(written)}"
        if near := get_close_matches(first, ("python", "python3", "bash", *ON_WORKERS), n=1, cutoff=0.8):
            return f"{first}: there is no such program; did you mean {near[0]}?"
        return f"{first}: {NO_PROGRAM}; {CURE}, or its path on the workers, such as /usr/bin/{first}"
    module = word_after(words, "-m") or ""
    top = module.partition(".")[0]
    if not re.fullmatch(r"\w+(\.\w+)*", module) or top in OURS or top == JOBS:
        return ""
    if not (folder / top).is_dir():
        if not (folder / f"{top}.py").is_file() and not is_importable(top):
            return f"-m {module}: {folder} has no {top}, nor have Slipway's packages; {CURE}"
        return ""
    file = _module_file(module, folder)
    return "" if file.is_file() else f"-m {module}: there is no {file.relative_to(folder)} in {folder}"


def _module_file(module: str, folder: Path) -> Path:
    target = folder.joinpath(*module.split("."))
    return target / "__main__.py" if target.is_dir() else target.with_suffix(".py")


def program_file(argv: Sequence[str], folder: Path) -> tuple[Path, Path] | None:
    """Return the file of the folder that the words start with an interpreter, and the folder where its imports begin.

    None if there is no such file.
    """
    words, folder = started(argv, folder)
    if not _is_interpreter(words[0]):
        return None
    script, module = script_of(words), word_after(words, "-m")
    if script is None and (module is None or not re.fullmatch(r"\w+(\.\w+)*", module)):
        return None
    file = folder / script if script is not None else _module_file(module or "", folder)
    file = file / "__main__.py" if file.is_dir() else file
    is_there = file.is_file() and PLACEHOLDER not in str(script)
    return (file, folder if script is None else file.parent) if is_there else None


def text_problem(argv: Sequence[str], folder: Path, *, is_run: bool) -> str:
    """Return what is wrong with the text behind `-c`; empty if this machine finds no fault.

    is_run: whether the run ends when the words do.
    """
    words = started(argv, folder)[0]
    if not _is_interpreter(words[0]):
        return ""
    if Path(words[0]).name.startswith("python"):
        try:
            ast.parse(word_after(words, "-c") or "")
        except (SyntaxError, ValueError) as error:
            return f"-c: {getattr(error, 'msg', error)}"
        return ""
    line = shell_text(words)
    if is_run and line.rstrip().endswith("&") and not line.rstrip().endswith("&&"):
        return "ends with &, so nothing waits for the program, and the run ends at once; leave it out"
    if not line or shutil.which(words[0]) is None:
        return ""
    done = subprocess.run([words[0], "-n", "-c", line], capture_output=True, check=False, text=True, errors="replace")
    return next(iter(done.stderr.strip().splitlines()), "") if done.returncode else ""


def syntax_problem(argv: Sequence[str], file: Path) -> str:
    """Return where a program is none of its language; empty if this machine finds no fault."""
    interpreter = Path(started(argv, file.parent)[0][0]).name
    if interpreter.startswith("python"):
        if file.suffix != ".py":
            return ""  # it may be a zip archive, or compiled
        try:
            syntax_tree(file)
        except SyntaxError as error:
            return f"{file.name}, line {error.lineno}: {error.msg}"
        except (ValueError, RecursionError, MemoryError) as error:  # such as a null byte; nested too deeply
            return f"{file.name} is no Python: {error}"
        return ""
    if shutil.which(interpreter) is None:
        return ""
    done = subprocess.run([interpreter, "-n", str(file)], capture_output=True, check=False, text=True, errors="replace")
    said = done.stderr.strip().splitlines()
    return said[0].replace(str(file), file.name) if done.returncode and said else ""


def begins_program(word: str) -> bool:
    """Return whether a word alone is the first of a program's, and hardly anything else."""
    name = Path(word).name
    return _is_interpreter(word) or name in LAUNCHERS or name in ("uv", "uvx") or word.endswith(SCRIPT_SUFFIXES)


def script_of(argv: Sequence[str]) -> str | None:
    """Return the file that the words start; None if they start a module, a text or a program of the worker."""
    if not _is_interpreter(argv[0]):
        return argv[0] if "/" in argv[0] else None
    option, word = _entry(argv)
    return None if option else word


def word_after(argv: Sequence[str], option: str) -> str | None:
    """Return the word after an interpreter's own option, `-m` or `-c`; one of a script or module is not its own."""
    found, word = _entry(argv)
    return word if found == option else None


def shell_text(argv: Sequence[str]) -> str:
    """Return the line that the words give to a shell, as behind `-c` and `-lc`; empty if they give none."""
    is_python = Path(argv[0]).name.startswith("python")
    return "" if is_python or not _is_interpreter(argv[0]) else word_after(argv, "-c") or ""


def _entry(argv: Sequence[str]) -> tuple[str, str | None]:
    """Return the option with which an interpreter starts something, and the word; "" and the file without an option."""
    is_python = Path(argv[0]).name.startswith("python")
    words = iter(argv[1:])
    for word in words:
        if found := (PYTHON_OPTION if is_python else SHELL_OPTION).fullmatch(word):
            option = found["option"] or ""
            if option == "c" and not is_python:  # `bash -c -e LINE`
                return "-c", next((word for word in words if not word.startswith("-")), None)
            value = found["value"] or next(words, None)
            if option in ("m", "c"):
                return f"-{option}", value
        elif word == "-":
            return "-", None
        elif not word.startswith(("-", "+")):
            return "", word
    return "", None


def _is_interpreter(word: str) -> bool:
    return INTERPRETERS.match(Path(word).name) is not None


def _is_script(word: str) -> bool:
    return "/" in word and word.endswith(SCRIPT_SUFFIXES)
