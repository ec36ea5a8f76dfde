"""The five guides' own commands, run by the real gcloud against the emulated cloud; `guides.yaml` is the list.

The controller must then see nothing to change in what they made. Scenes run side by side, since gcloud is slow.
"""

import os
import re
import shlex
import subprocess
import textwrap
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wide
from tests.controller.gcloud.conftest import STUB_COMMANDS, GcloudShell, make_context, planned_actions
from tests.controller.localcloud.harness import EmulatedCloud
from tests.groups import load_yaml
from tests.paths import SHARED

SCENES: list[dict[str, Any]] = load_yaml(Path(__file__).with_name("guides.yaml"))
LEFT_OUT: dict[str, dict[int, list[int]]] = load_yaml(Path(__file__).with_name("left_out.yaml"))
GUIDES = SHARED / "guides"
SUBSTITUTED = {
    "alpine-aspect-459819-m4": "slipway-local",
    "YOUR_BILLING_ACCOUNT_ID": "$BILLING_ACCOUNT",
    "your-bucket-name": "$BUCKET_NAME",
    "/home/dave": "~",
    "dave@": "$USER@",
    "<name>": "$TPU_NAME",
    "<zone>": "$ZONE",
    "<IP>": "$IP",
    "<old-ip>": "$IP",
    "/tmp/": "$TMP/",
}
"""Names of the guides' authors, and ours. Nothing of a test may lie in /tmp itself."""
SIDE_BY_SIDE = 3
IN_EACH_RUN = {"simply", "nash"}
"""Scenes that each run of `.ci/run` plays; the others play at night: gcloud and the emulated cloud change seldom."""
CALLS = re.compile(r"^[^#]*\b(gcloud|gsutil) \w")
"""A line that calls one of them, other than a comment."""


def run_in(scene: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The blocks of a scene that are run, under names that tell scene and line."""
    seen = 0
    for block in scene["blocks"]:
        seen += "observe" in block
        if not {"same_as", "left"} & set(block):
            yield f"{scene['scene']}-{f'observed-{seen}' if 'observe' in block else block['line']}", block


@dataclass
class Stage:
    """Where the scenes play; `came_of` holds the words and exit code, or the differences seen, of each block."""

    cloud: EmulatedCloud
    folder: Path
    came_of: dict[str, Any] = field(default_factory=dict)
    dressed: set[Path] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def play(self, scene: Mapping[str, Any]) -> None:
        """Every block of a scene, in order."""
        shell = GcloudShell(self.cloud, self.folder / scene["scene"])
        for name in ("google_compute_engine", "google_compute_engine.pub"):
            (shell.home / ".ssh" / name).write_bytes((self.folder / name).read_bytes())
        (shell.home / ".ssh" / "google_compute_engine").chmod(0o600)
        local = {"USER": os.environ.get("USER", "root"), "BILLING_ACCOUNT": "012345-6789AB-CDEF01"}
        variables = {**local, **scene.get("variables", {})}
        variables = {k: v.replace("$PWD", str(shell.home / "work")) for k, v in variables.items()}
        for name, block in run_in(scene):
            try:
                if "observe" in block:
                    self.came_of[name] = self._observe(shell, block)
                else:
                    values = {**variables, **block.get("variables", {})}
                    self.came_of[name] = self._run(shell, block, values, variables)
            except Exception as error:  # the rest of the scene tells more
                self.came_of[name] = error

    def _observe(self, shell: GcloudShell, block: Mapping[str, Any]) -> dict[str, str]:
        context = make_context(self.cloud, shell.home)
        try:
            with self.lock:  # Hydra composes one config at a time
                found = planned_actions(context, *block["observe"].split())
        finally:
            context.close()
        return {name: found[name] for name in block["same"] if found[name] != "none"}

    def _run(self, shell: GcloudShell, block: Mapping[str, Any], values: dict[str, str], scene: dict[str, str]) -> Any:
        self._dress()
        if "before" in block:
            done = shell.run(f"set -e; {block['before']}", **values)
            if done.returncode:
                return done, 0
            self._dress()
        command = block.get("corrected", block["command"])
        for theirs, ours in SUBSTITUTED.items():
            command = command.replace(theirs, ours)
        name, choices = next(iter(block.get("each", {"": [""]}).items()))
        parts = [f"{name}={shlex.quote(str(choice))}; {command}" if name else command for choice in choices]
        if keep := block.get("keep"):
            parts = [f"{command}; echo ${keep}" if command.startswith(f"{keep}=") else command]
        done = shell.run("; ".join(["set -e", *parts, *([block["after"]] if "after" in block else [])]), **values)
        if keep:
            scene[keep] = done.stdout.strip().splitlines()[-1]
        return done, self._ran(block.get("ran"))

    def _dress(self) -> None:
        """The stand-ins, once on every worker that there is: another scene may be deleting it a moment later."""
        with self.lock:
            new = set(self.cloud.state.glob("nodes/*/worker-*/home")) - self.dressed
            self.dressed |= new
        for home in new:
            with suppress(FileNotFoundError):  # it is gone already
                (home / ".stand-ins").write_text(STUB_COMMANDS)

    def _ran(self, pattern: str | None) -> int:
        """How many workers have run something like `pattern`."""
        count = 0
        for path in self.cloud.state.glob("nodes/*/worker-*/home/ran"):
            with suppress(FileNotFoundError):
                count += bool(pattern and re.search(pattern, path.read_text()))
        return count


@pytest.fixture(scope="module")
def stage(cloud: EmulatedCloud, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    made = Stage(cloud, tmp_path_factory.mktemp("homes"))
    key = made.folder / "google_compute_engine"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", str(key)], check=True, capture_output=True)
    made.play(SCENES[0])
    return made


@pytest.mark.deep
@pytest.mark.parametrize("names", [IN_EACH_RUN, *wide({scene["scene"] for scene in SCENES[1:]} - IN_EACH_RUN)], ids=len)
def test_every_block_works_as_printed_or_corrected(stage: Stage, names: set[str]) -> None:
    """One test for several scenes, which play beside each other."""
    scenes = [scene for scene in SCENES if scene["scene"] in names]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        # The longest first.
        list(pool.map(stage.play, sorted(scenes, key=lambda scene: -len(scene["blocks"]))))
    blocks = [one for scene in [SCENES[0], *scenes] for one in run_in(scene)]
    wrong = {name: words for name, block in blocks if (words := complaint(block, stage.came_of[name]))}
    assert not wrong, "\n".join(f"== {name}: {words}" for name, words in wrong.items())


def complaint(block: Mapping[str, Any], came: Any) -> str:
    """What is wrong with what came of a block; empty if nothing is."""
    if isinstance(came, Exception):
        return repr(came)
    if "observe" in block:
        return f"the controller would change {came}" if came else ""
    done, workers = came
    if done.returncode and "may_fail" not in block:
        return f"exit code {done.returncode}: {done.stdout}"
    if not re.search(str(block.get("shows", "")), done.stdout):
        return f"{block['shows']} is not in: {done.stdout}"
    wanted = block.get("workers", 0)
    return "" if workers == wanted else f"{workers} workers ran {block['ran']}, not {wanted}: {done.stdout}"


def test_what_differs_from_the_guides_has_its_reason() -> None:
    for scene in SCENES:
        lines = {block.get("line") for block in scene["blocks"]}
        for block in scene["blocks"]:
            if "corrected" in block:
                assert re.match(r"C\d+", block["because"]), block
            assert all(len(block.get(key, "in words").split()) > 1 for key in ("left", "may_fail")), block
            assert block.get("same_as", block.get("line")) in lines


def test_every_command_of_the_guides_is_there() -> None:
    if not GUIDES.exists():
        pytest.skip("the guides are not at hand")
    listed = {
        (scene["guide"], line): block["command"].split()
        for scene in SCENES
        for block in scene["blocks"]
        if "command" in block
        for line in (block["line"], *block.get("also", ()))
    }
    printed = {
        (int(path.name[0]), line): command.split()
        for path in sorted(GUIDES.glob("*.md"))
        for line, command in commands(path.read_text())
    }
    assert listed == printed


def test_every_block_of_the_guides_is_run_or_named_with_the_reason() -> None:
    if not GUIDES.exists():
        pytest.skip("the guides are not at hand")
    left = sorted(
        (guide, line) for by_guide in LEFT_OUT.values() for guide, lines in by_guide.items() for line in lines
    )
    without = [
        (int(path.name[0]), begun)
        for path in sorted(GUIDES.glob("*.md"))
        for begun, text in fenced(path.read_text())
        if not any(commands(f"```\n{text}\n```"))
    ]
    assert left == without


def test_no_command_hides_within_a_line() -> None:
    hidden = (
        "if ! gcloud compute tpus list; then",
        "X=$(gsutil ls)",
        "for z in a; do gcloud info; done",
        "(gcloud info)",
    )
    for line in hidden:
        assert unseen(f"```\ngcloud version\n{line}\n```") == [line]
    assert unseen("```\n# gcloud info\ngcloud info\nERROR: (gcloud.info) no\n```\ngcloud info") == []
    for path in sorted(GUIDES.glob("*.md")):
        assert unseen(path.read_text()) == [], path


def unseen(page: str) -> list[str]:
    """The lines of a page's code blocks that call gcloud or gsutil, but are in none of its commands."""
    found = "\n".join(command for _, command in commands(page))
    lines = (line.strip().rstrip("\\ ") for _, text in fenced(page) for line in text.splitlines())
    return [line for line in lines if CALLS.search(line) and line not in found]


def fenced(page: str) -> Iterator[tuple[int, str]]:
    """The code blocks of a page, with the line of their first fence."""
    begun, lines = 0, list[str]()
    for number, line in enumerate(page.splitlines(), 1):
        if line.strip().startswith("```"):
            if begun:
                yield begun, "\n".join(lines)
            begun, lines = 0 if begun else number, []
        else:
            lines.append(line)


def commands(page: str) -> Iterator[tuple[int, str]]:
    """The commands to the cloud in the code blocks of a page, with their line numbers, continued lines joined."""
    fenced, begun = False, None
    for number, line in enumerate(page.splitlines(), 1):
        if line.strip().startswith("```"):
            fenced = not fenced
        elif fenced:
            if begun:
                begun = (begun[0], f"{begun[1]}\n{line}")
            elif re.match(r'\s*(SA="\$\()?(gcloud|gsutil|ssh|scp|ssh-keygen)\b', line):
                begun = (number, line)
            if begun and not begun[1].endswith("\\") and begun[1].count('"') % 2 == 0:
                yield begun[0], textwrap.dedent(re.sub(r"\s*\\\n\s*", " ", begun[1])).strip()
                begun = None
