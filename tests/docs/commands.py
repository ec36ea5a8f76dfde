"""The commands that pages and help print, in their order, and what proves those that no reader types."""

import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from controller.cli import main
from controller.cli.flags import FLAGSHIP, QUICKSTART, VERBS
from controller.core.errors import ConfigError
from tests.groups import load_yaml
from tests.paths import ROOT

HELP = "--help"
"""The page that `slipway --help`, and the examples of each `slipway VERB --help`, are together."""
OUR_PAGES = ("README.md", "CONTRIBUTING.md", "SKILL.md", "CHANGELOG.md")
PAGES = (HELP, *OUR_PAGES, *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md")))
PROGRAMS = (
    *("slipway", "python", "python3", "pip", "uv", "cd", "export", "eval", "git", "gcloud", "gsutil", "curl", "docker"),
    *("ssh", "hf", "wandb", "tensorboard", "sky", "ruff", "basedpyright", "lint-imports", ".ci/run"),
)
"""First words of what is a command within a sentence; in a block every line is one."""
SHELL = ("", "sh", "bash", "console")
"""Languages of blocks of commands; a block of what a program prints is `text`, or has a line that begins with `$ `."""
STEP = re.compile(
    r"write `(?P<file>slipway/[\w/]+\.yaml)`:\n\n```yaml\n(?P<yaml>.*?)```"
    r"|^ *```(?P<language>\w*)\n(?P<block>.*?)^ *```|(?<!`)`(?P<inline>[^`]+)`(?!`)",
    re.DOTALL | re.MULTILINE,
)
SESSIONS = ("docs/first-run.md", "docs/your-program.md", "docs/tutorial.md", "README.md", HELP)
"""Pages in the order of their sessions; a command of several is run in the session of the first."""
LAUNCHES = ("up", "run", "rehearse", "fit", "witness", "doctor")
OF_A_POLICY = ("export", "chat", "generate")
OTHERS = tuple(page for page in PAGES if page not in SESSIONS)
TABLE: dict[str, dict[str, Any]] = load_yaml(ROOT / "tests" / "docs" / "commands.yaml")
PLACEHOLDERS: dict[str, str] = TABLE["means"]
"""What is typed for a command that leaves something out."""
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
ELSEWHERE: dict[str, str] = {words: test for test, commands in TABLE["elsewhere"].items() for words in commands}
"""Commands that no reader types, and the test or the script that runs them."""
CANNOT: dict[str, str] = {words: why for why, commands in TABLE["cannot"].items() for words in commands}
"""Commands that no test can run, and why."""


@dataclass(frozen=True)
class Step:
    """A command, or a file that the page tells the reader to write."""

    words: str
    file: str = ""


def steps_of(text: str) -> list[Step]:
    """Return what a page tells its reader to do, in its order and as often as it says so."""
    found: list[Step] = []
    for step in STEP.finditer(text):
        if step["file"]:
            found.append(Step(step["yaml"], step["file"]))
        elif step["inline"]:
            words = " ".join(step["inline"].split())
            if words.partition(" ")[0] in PROGRAMS and words not in PROGRAMS:
                found += map(Step, _commands(words))
        elif step["language"] in SHELL:
            lines = re.sub(r" *\\\n *", " ", step["block"]).splitlines()
            typed = [line[2:] for line in lines if line.startswith("$ ")] or lines
            found += [Step(words) for line in typed for words in _commands(line)]
    return found


def _commands(line: str) -> Iterator[str]:
    """Yield the commands of a line, without its comment; `python -m controller` is `slipway`."""
    for part in re.sub(r"\s+#\s.*", "", line).split("&&"):
        if words := part.strip():
            yield re.sub(r"^python -m controller(?![.\w])", "slipway", words)


def steps_of_help() -> list[Step]:
    """Return the first steps of `slipway --help`, then the examples of `slipway VERB --help`."""
    lines: list[str] = []
    for words in ([HELP], *([verb, HELP] for verb in VERBS)):
        with contextlib.redirect_stdout(io.StringIO()) as page:
            assert main.run(words) == 0
        for section in page.getvalue().split("\n\n"):
            title, *rows = section.splitlines()
            if title in ("first steps", "examples"):  # a row goes on in lines that begin further right
                lines += [re.split(r"\s{2,}", row.strip())[0] for row in rows if row[2:3].strip()]
    return [Step(words) for words in lines]


@cache
def steps_on(page: str) -> list[Step]:
    return steps_of_help() if page == HELP else steps_of((ROOT / page).read_text())


def commands_on(*pages: str) -> list[str]:
    """Return the commands of pages, each once."""
    return [*dict.fromkeys(step.words for page in pages for step in steps_on(page) if not step.file)]


def session_of(page: str) -> list[Step]:
    """Return what the session of a page does: what none before it does and nothing else proves."""
    done = {words for other in SESSIONS[: SESSIONS.index(page)] for words in commands_on(other)}
    whole = {*commands_on(page)}
    there = dict.fromkeys(step for step in steps_on(page) if meant_by(step.words) not in whole - {step.words})
    proven = {*done, *ELSEWHERE, *CANNOT}
    return [step for step in there if step.words not in proven and not extra_of(step.words)]


def of_the_others() -> list[str]:
    """Return the commands of Slipway that only pages without a session have, and that nothing else proves."""
    done = {*commands_on(*SESSIONS), *ELSEWHERE, *CANNOT}
    return [words for words in commands_on(*OTHERS) if words not in done and verb_of(words)]


def is_typed(words: str) -> bool:
    """Return whether a command of the other pages is typed as it is in each run of the tests.

    One that trains, rents or samples many runs is only composed, and so is one whose plan asks the Hugging Face Hub;
    one that needs a policy is typed in the session of README.
    """
    costly = verb_of(words) in (*LAUNCHES, *OF_A_POLICY) or FLAGSHIP in words
    return not costly and not meant_by(words).startswith("slipway plan -m ")


def meant_by(words: str) -> str:
    """Return the whole command that a command of a page stands for."""
    if words in PLACEHOLDERS or not words.startswith("slipway "):
        return PLACEHOLDERS.get(words, words)
    return re.sub(r"(?<=\s)…(?=\s|$)", QUICKSTART, words.replace("+experiment=…", QUICKSTART))


def verb_of(words: str) -> str:
    """Return the verb of a command of Slipway's; '' of another program, and of what Slipway does not understand."""
    program, *arguments = shlex.split(meant_by(words))
    if program != "slipway":
        return ""
    with contextlib.suppress(ConfigError):
        return main.parse(arguments).verb
    return ""


def module_of(words: str) -> list[str]:
    """Return module and arguments of a program of ours beside `slipway`; empty of another command."""
    arguments = shlex.split(meant_by(words).partition(" > ")[0])
    arguments = arguments[1 + (arguments[:2] == ["python", "-m"]) :]
    is_ours = arguments and arguments[0].startswith(("trainer.", "controller.", "tests."))
    return arguments if is_ours else []


def extra_of(words: str) -> str:
    """Return the extra of Slipway that a command installs; '' of another command."""
    named = re.fullmatch(r"(?:python -m )?pip install (?:'slipway-tpu|-e '\.)\[(\w+)\]'", words)
    return named[1] if named and named[1] in EXTRAS else ""


def unproven(*pages: str) -> list[str]:
    """Return the commands of pages that nothing proves: of another program, or of a verb that does not exist."""
    left = [words for words in commands_on(*pages) if words not in {*ELSEWHERE, *CANNOT}]
    return [words for words in left if not (words.startswith("cd ") or extra_of(words) or verb_of(words))]


def said_by(words: str) -> list[str]:
    """Return what the test of a command has to say as well: its verb or module, and its flags."""
    program, *arguments = shlex.split(meant_by(words))
    if program == "gcloud":
        return re.findall(r"^gcloud(?: [a-z][a-z-]*(?= ))+", words)
    flags = [word for word in arguments if word.startswith("--")]
    if verb := verb_of(words):
        return [verb, *flags]
    if own := module_of(words):
        return [own[0].rpartition(".")[2], *flags]
    return flags
