"""Pictures of the terminal: what commands print in 80 columns, made by running them on the emulated cloud.

python docs/pictures.py                # all of docs/pictures/: about ten minutes on two idle cores
python docs/pictures.py plan           # only this one
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from rich.console import Console  # noqa: E402
from rich.text import Text  # noqa: E402

from controller.cli import main as command_line  # noqa: E402
from controller.cli.verbs import up  # noqa: E402
from controller.cli.view import View  # noqa: E402
from controller.core.events import Event  # noqa: E402
from controller.core.this_process import Clock  # noqa: E402
from controller.plan.build import Plan  # noqa: E402
from controller.reconcile import reconcile  # noqa: E402
from controller.run.options import RunOptions  # noqa: E402
from controller.run.session import open_session  # noqa: E402
from controller.sweep.board import load_board, render_board  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
WIDTH = 80
HEIGHT = 24
QUICKSTART = ["+experiment=quickstart"]
CHANGED = [*QUICKSTART, "loop.group_size=4", "run.seed=1"]
"""As in docs/tutorial.md."""
SWEEP = ["-m", *QUICKSTART, "scale=tiny", "optimizer.lr=3e-4,7e-4", "run.seed=0,1", "sweep.pods=2"]
STATUS_AT_STEP = 60
"""The step of GRPO at which the status of the quick start is asked for."""
FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
"""Fonts from the web, which a reader without a network does not have."""


def recorder() -> Console:
    return Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False, soft_wrap=True)


def save(name: str, console: Console) -> None:
    """Write what a console has recorded as docs/pictures/NAME.svg."""
    FOLDER.mkdir(exist_ok=True)
    picture = FONT.sub("", console.export_svg(title="", unique_id=name))
    (FOLDER / f"{name}.svg").write_text("\n".join(line.rstrip() for line in picture.splitlines()) + "\n")
    print(f"wrote docs/pictures/{name}.svg")


def prompt(console: Console, arguments: list[str]) -> None:
    words = " ".join(arguments)
    lines, line = [], "$ slipway"
    for word in words.split():
        if len(line) + len(word) > WIDTH - 3:
            lines.append(f"{line} \\")
            line = "   "
        line += f" {word}"
    console.print(Text("\n".join([*lines, line]), style="bold"))


def run(arguments: list[str]) -> str:
    """Run a command as a user does, with its output in a file; return the output."""
    command = [sys.executable, "-m", "controller", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def picture_of(name: str, arguments: list[str]) -> None:
    console = recorder()
    prompt(console, arguments)
    console.print(Text(run(arguments).rstrip()))
    save(name, console)


class RecordedView(View):
    """Records the lines that stay on a terminal, and takes a picture of `status` in the middle."""

    def __init__(self, plan: Plan, *, json_lines: bool) -> None:
        super().__init__(plan, json_lines=json_lines)
        self._console = recorder()
        prompt(self._console, QUICKSTART)
        self._redraws = True
        self._status: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        metrics: dict[str, Any] = event.data.get("metrics", {}) if event.kind == "metrics" else {}
        if metrics.get("phase") == "grpo" and metrics["step"] >= STATUS_AT_STEP and self._status is None:
            self._status = threading.Thread(target=picture_of, args=("status", ["status"]))
            self._status.start()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if self._status is not None:
            self._status.join()
        save("up", self._console)


def take_plan() -> None:
    """Plan a changed quick start in a project that has what runs share, as after a first run."""
    with open_session(RunOptions(tuple(QUICKSTART))) as session:
        reconcile(session.plan.in_scope("external", "shared"), session.context)
    picture_of("plan", ["plan", *CHANGED])


def take_up() -> None:
    """Run the quick start, and ask for its status on the way."""
    up.View = RecordedView
    code = command_line.run(QUICKSTART)
    if code:
        raise SystemExit(code)


def take_sweep() -> None:
    """Draw the live view of a sweep once some of its runs have ended and others report metrics."""
    command = [sys.executable, "-m", "controller", *SWEEP]
    running = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    boards = Path(os.environ["SLIPWAY_HOME"]) / "sweeps"
    while running.poll() is None:
        rows = [row for file in boards.glob("*.json") for row in load_board(file).rows.values()]
        states = [row.state for row in rows]
        if "finished" in states and any(row.state == "running" and row.values for row in rows):
            console = recorder()
            prompt(console, SWEEP)
            console.print(render_board(rows, Clock().now(), HEIGHT, WIDTH))
            save("sweep", console)
            break
        time.sleep(0.2)
    if running.wait():
        raise SystemExit("the sweep failed")


PICTURES = {"plan": take_plan, "up": take_up, "sweep": take_sweep}
"""In the order in which they are taken: the plan of a project in which nothing has run comes first."""


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"SLIPWAY_HOME": f"{folder}/home", "COLUMNS": str(WIDTH)}
        os.chdir(folder)
        for name in [known for known in PICTURES if known in (names or PICTURES)]:
            PICTURES[name]()
        for arguments in (["down", "--yes", *QUICKSTART], ["localcloud", "stop"]):
            run(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
