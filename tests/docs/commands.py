"""The commands that pages and help print, in their order, and what proves those that no session of a reader runs."""

import contextlib
import io
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from controller.cli import main
from controller.cli.flags import VERBS
from controller.core.errors import ConfigError
from tests.paths import ROOT

PAGES = ("README.md", "docs/tutorial.md", "docs/first-run.md", "docs/your-program.md")
PROGRAMS = ("slipway", "python", "python3", "pip", "uv", "gcloud", "gsutil", "git", "cd", "curl", "docker", ".ci/run")
"""First words of the lines of a block that are commands; the others are output or a listing."""
INLINE = ("slipway ", "python -m ", "gcloud ")
"""How a command within a sentence begins."""
STEP = re.compile(
    r"write `(?P<file>slipway/[\w/]+\.yaml)`:\n\n```yaml\n(?P<yaml>.*?)```"
    r"|^```(?P<language>\w*)\n(?P<block>.*?)^```|`(?P<inline>[^`\n]+)`",
    re.DOTALL | re.MULTILINE,
)
SESSIONS = ("docs/first-run.md", "docs/your-program.md", "docs/tutorial.md", "README.md", "--help")
"""Pages in the order of their sessions; a command of several is run in the session of the first."""
CI = ".ci/run"
CREDENTIALS = "tests/controller/gcp/test_client.py"
LAPTOP = "tests/controller/installed/test_installed.py::test_a_laptop_needs_no_jax"
REHEARSED = "tests/controller/rehearsal/test_rehearsal.py::test_an_experiment_is_preempted_and_goes_on"
WITNESSED = (
    "tests/scenarios/witness/test_witness.py::"
    "test_a_first_contact_is_recorded_leaves_nothing_and_is_replayed_without_a_difference"
)
DOCTOR = "tests/controller/cli/verbs/test_doctor.py::test_what_it_says_of_a_new_project_and_of_one_in_use"
ELSEWHERE = {
    # the first with the tools of development
    **dict.fromkeys(("python -m pip install -e .", "python -m pip install -e '.[dev]'", "python -m pytest"), CI),
    **dict.fromkeys(("python -m pip install --no-deps -e .", "python -m pip install -r conf/laptop.txt"), LAPTOP),
    "python -m pip install 'slipway-tpu[docs]'": "tests/docs/test_docs.py::test_a_reader_needs_no_network",
    "gcloud config set project YOUR-PROJECT": f"{CREDENTIALS}::test_the_project_is_that_of_the_named_configuration",
    "gcloud auth application-default login": f"{CREDENTIALS}::test_a_user_has_a_quota_project",
    "slipway rehearse +experiment=gemma2b_gsm8k": REHEARSED,
    "slipway rehearse +experiment=quickstart": REHEARSED,
    "slipway witness": WITNESSED,
    "slipway witness cloud=mine": WITNESSED,  # the session of the first run plays one on another type
    "slipway witness --max-dollars 2 --minutes 20 --plane tpu_api cloud=mine": WITNESSED,
    "slipway doctor": DOCTOR,
    "slipway doctor cloud=mine tpu=mine": DOCTOR,
    "slipway doctor +experiment=quickstart cloud=mine tpu=mine": DOCTOR,
    "slipway report --sweep trm_width --x params --fit power --level 0.8": (
        "tests/controller/report/test_comparison.py::test_the_verb_prints_the_fit_and_writes_the_section"
    ),
}
"""Commands that no session runs, and the file that does or the test that proves what comes nearest."""
PLACEHOLDERS = {
    "slipway run": "slipway run cloud=local -- python train.py --steps 100",
    "slipway plan …": "slipway plan +experiment=quickstart",
    "slipway plan -m …": "slipway plan -m +experiment=quickstart run.seed=0,1",
    "slipway … --queue": "slipway +experiment=quickstart --queue",
    "slipway generate --prompt …": "slipway generate --prompt 1+2=",
}
"""Commands that leave something out, and one that does not."""


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
            found += [Step(words) for words in _commands(step["inline"]) if step["inline"].startswith(INLINE)]
        elif step["language"] in ("", "sh", "bash", "console"):
            lines = step["block"].replace("\\\n", " ").splitlines()
            typed = [line[2:] for line in lines if line.startswith("$ ")] or lines
            found += [Step(words) for line in typed for words in _commands(line)]
    return found


def _commands(line: str) -> Iterator[str]:
    """Yield the commands of a line, without its comment; `python -m controller` is `slipway`."""
    for part in re.sub(r"\s+#\s.*", "", line).split("&&"):
        words = part.strip()
        if words.partition(" ")[0] in PROGRAMS:
            yield re.sub(r"^python -m controller\b", "slipway", words)


def steps_of_help() -> list[Step]:
    """Return the first steps of `slipway --help`, then the examples of `slipway VERB --help`."""
    lines: list[str] = []
    for words in (["--help"], *([verb, "--help"] for verb in VERBS)):
        with contextlib.redirect_stdout(io.StringIO()) as page:
            assert main.run(words) == 0
        for section in page.getvalue().split("\n\n"):
            title, *rows = section.splitlines()
            if title in ("first steps", "examples"):  # a row goes on in lines that begin further right
                lines += [re.split(r"\s{2,}", row.strip())[0] for row in rows if row[2:3].strip()]
    return [Step(words) for words in lines]


@cache
def steps_on(page: str) -> list[Step]:
    return steps_of_help() if page == "--help" else steps_of((ROOT / page).read_text())


def commands_on(page: str) -> list[str]:
    return [step.words for step in steps_on(page) if not step.file]


def session_of(page: str) -> list[Step]:
    """Return what the session of a page does: what none before it does and nothing else proves."""
    done = {words for other in SESSIONS[: SESSIONS.index(page)] for words in commands_on(other)}
    there = dict.fromkeys(step for step in steps_on(page) if PLACEHOLDERS.get(step.words) not in commands_on(page))
    return [step for step in there if step.words not in {*done, *ELSEWHERE}]


def verb_of(words: str) -> str:
    """Return the verb of a command of Slipway's; '' of another program, and of what Slipway does not understand."""
    program, *arguments = shlex.split(PLACEHOLDERS.get(words, words))
    if program != "slipway" or "…" in arguments:
        return ""
    with contextlib.suppress(ConfigError):
        return main.parse(arguments).verb
    return ""


def unproven(commands: Iterable[str]) -> list[str]:
    """Return the commands that nothing proves: of another program, or of a verb that does not exist."""
    return [words for words in commands if not (words in ELSEWHERE or words.startswith("cd ") or verb_of(words))]
