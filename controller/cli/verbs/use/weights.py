"""What `export`, `chat` and `generate` share: the weights of a run on this machine, and the trainer as a child."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from controller.cli.main import Command
from controller.core.errors import ConfigError
from controller.core.programs import own_program
from controller.progress import format_size
from controller.records.checkpoints import BEST, LATEST, choose_step, fetch_checkpoint
from controller.run.session import Session, open_session

WIDTH = 79


@dataclass(frozen=True)
class RunWeights:
    """A checkpoint of a run on this machine."""

    run_id: str
    step: int
    folder: Path


def require_jax(verb: str) -> None:
    """Raise ConfigError if this installation only launches."""
    missing = [name for name in ("jax", "orbax", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{verb}: needs {', '.join(missing)}, which an installation from conf/laptop.txt leaves out; "
            "`python -m pip install slipway`, or `.` in a clone, adds them"
        )


@contextmanager
def open_weights(command: Command) -> Iterator[tuple[Session, RunWeights]]:
    """Open the run that a command names, with a copy of the checkpoint that it wants.

    Raises:
        ConfigError: there is no such run or checkpoint, or the run is not one of the bundled trainer.
    """
    flags = command.flags
    require_jax(command.verb)
    if flags.best and flags.step is not None:
        raise ConfigError(f"{command.verb}: give either --best or --step")
    wanted = BEST if flags.best else LATEST if flags.step is None else str(flags.step)
    with open_session(command.options) as session:
        plan, google = session.plan, session.context.google
        if plan.config.program.kind != "trainer":
            raise ConfigError(
                f"{command.verb}: {plan.run_id} ran a program of its own, whose checkpoints only it can read; "
                "`slipway get` downloads them"
            )
        with command.options.showing("looking for checkpoints"):
            step = choose_step(google, plan.bucket, plan.run_id, wanted, command.verb)
        shown = sys.stderr.isatty() and not flags.json
        total_moved = 0

        def moved(path: str, size: int, total: int) -> None:
            nonlocal total_moved
            total_moved += size
            if shown:
                text = f"{format_size(total_moved)} of {format_size(total)}  {path}"
                print(f"\r{text[:WIDTH]:<{WIDTH}}", end="\r", file=sys.stderr, flush=True)

        folder = fetch_checkpoint(google, plan.bucket, plan.run_id, step, session.context.state_dir, moved)
        if shown and total_moved:
            print(f"\r{'':<{WIDTH}}", end="\r", file=sys.stderr, flush=True)
        if shown:
            print(f"{plan.run_id}, step {step}: starting JAX and reading the weights …", file=sys.stderr)
        yield session, RunWeights(plan.run_id, step, folder)


def run_trainer(module: str, *arguments: str, modules: Sequence[str] = ()) -> int:
    """Run a module of the trainer, with the terminal of this process; return its exit code."""
    places = [*(str(Path.cwd() / name) for name in modules), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    return subprocess.run(own_program(module, *arguments), env=environment, check=False).returncode


def sampling_arguments(command: Command) -> list[str]:
    """Return the flags of `chat` and `generate` that the trainer's programs take too."""
    names = ("temperature", "top_k", "top_p", "max_new_tokens", "seed", "dtype", "tokenizer")
    given = {name: getattr(command.flags, name) for name in names}
    return [word for name, v in given.items() if v is not None for word in (f"--{name.replace('_', '-')}", str(v))]
