"""Runs one job of a Hydra app on a worker: `python -m slipway_job.multirun.job [--in FOLDER] APP.py|-m MODULE WORD…`.

It is shipped beside the app with the agent's modules that it uses, and runs in the app's own Python. It starts the app
as `python APP.py WORD… hydra.run.dir=…` would, and uploads the output folder when the app has ended.
"""

import json
import os
import runpy
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback

from ..agent.fs import parse_object
from ..agent.transfers import TransferError, upload_file, with_retries

LAUNCHER, SWEEPER = "hydra/launcher", "hydra/sweeper"


def main(argv: Sequence[str]) -> int:
    """Run the app and upload its output; return its exit code."""
    words = list(argv)
    if words[0] == "--in":
        os.chdir(words[1])
        del words[:2]
    own = Path(os.environ["SLIPWAY_RUN_DIR"])
    output = own / "output"
    # Let a config select Slipway's launcher, and set keys of it, where Slipway is not installed.
    from hydra.core.config_store import ConfigStore

    target = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
    ConfigStore.instance().store(group=LAUNCHER, name="slipway", node={"_target_": target})
    code = _run_app(words, output)
    if output.is_dir():
        try:
            _upload(output, own)
        except (TransferError, OSError) as error:
            print(f"slipway: cannot keep the job's output: {error}", file=sys.stderr, flush=True)
            code = code or 1
    return code


def _run_app(words: list[str], output: Path) -> int:
    module = words[0] == "-m"
    app, *rest = words[1:] if module else words
    quoted = str(output).replace("'", "\\'")
    recorder = f"{__package__}.job.Recorder"
    # The mode may be set in the app's config, and `hydra.callbacks` may have entries of its own.
    own = [f"hydra.run.dir='{quoted}'", "hydra.mode=RUN", f"++hydra.callbacks.slipway._target_={recorder}"]
    sys.argv = [app, *rest, *own]
    sys.path[0] = str(Path.cwd() if module else Path(app).resolve().parent)
    try:
        if module:
            runpy.run_module(app, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(app, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def _upload(output: Path, own: Path) -> None:
    worker = os.environ.get("SLIPWAY_WORKER", "0")
    archive = own / f"output-worker-{worker}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(output, arcname=".")
    bucket = os.environ["SLIPWAY_BUCKET"].removeprefix("gs://")
    name = f"runs/{os.environ['SLIPWAY_RUN_ID']}/output/worker-{worker}.tar.gz"
    with_retries(lambda: upload_file(archive, bucket, name))
    archive.unlink()


def _distributed_is_up() -> bool:
    """Return whether JAX waits for the other workers at exit, which takes minutes after a failure of this one."""
    known: Any = sys.modules.get("jax._src.distributed")
    return known is not None and known.global_state.client is not None


RETURN_VALUE = "return_value"
"""Key of the app's return value in summary.json."""


class Recorder(Callback):
    """Adds the return value of the app to `$SLIPWAY_RUN_DIR/summary.json`, which becomes a part of the run's result."""

    def on_job_end(self, config: Any, job_return: Any, **kwargs: Any) -> None:
        if job_return.status.name != "COMPLETED" or job_return.return_value is None:
            return
        try:
            value = plain_value(job_return.return_value)
            parse_object(json.dumps({RETURN_VALUE: value}).encode())
        except (TypeError, ValueError, RecursionError) as error:
            what = error if isinstance(error, TypeError) else "a value that is too large or nested too deeply"
            print(f"slipway: the app returned {what}, which JSON cannot hold; its multirun gets None", flush=True)
            return
        file = Path(os.environ["SLIPWAY_RUN_DIR"]) / "summary.json"
        try:
            summary = parse_object(file.read_bytes()) if file.is_file() else {}
        except ValueError as error:
            print(f"slipway: summary.json {error}: what the app returned takes its place", flush=True)
            summary = {}
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps({**summary, RETURN_VALUE: value}))
        draft.replace(file)


def plain_value(value: Any) -> Any:
    """Return a value as JSON holds it; arrays of one number, as of NumPy and JAX, become that number.

    Raises TypeError, which names its type, if JSON cannot hold it.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain_value(entry) for entry in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain_value(entry) for key, entry in value.items()}
    item = getattr(value, "item", None)
    if getattr(value, "size", None) == 1 and item is not None:
        return plain_value(item())
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    if ended and _distributed_is_up():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended)
    sys.exit(ended)
