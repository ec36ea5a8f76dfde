"""What a run leaves, on this machine: `slipway get`, `export`, `chat` and `generate` (docs/use-weights.md)."""

import errno
import importlib.util
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from conf.strict_json import dumps
from controller.cli.flags import SAMPLING
from controller.cli.main import Command
from controller.cli.words import RUN_ID
from controller.context import format_size
from controller.core.errors import CloudError, ConfigError
from controller.core.text import object_url, one_line, plural, printable
from controller.core.this_process import run_program
from controller.gcp.google_errors import GoogleError
from controller.inputs.modules import references
from controller.plan.build import Plan
from controller.records import recorder
from controller.records.fetch import (
    BEST,
    LATEST,
    RemoteFile,
    choose_step,
    fetch_checkpoint,
    fetch_file,
    is_complete,
    list_files,
    local_files,
)
from controller.records.local_names import top_problem
from controller.run.session import Session, open_session

WIDTH = 79
BUCKET = "gs://"
OF_ONE_FILE = (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL, errno.EISDIR, errno.ENOTDIR, errno.EEXIST)
"""What the name of one file can be the cause of: another file system than the names were checked for."""


def run_get(command: Command) -> int:
    """`slipway get RUN [PATH]`: download results, checkpoints and logs of a run from its bucket."""
    _raise_if_path(command)
    if command.flags.to and command.flags.list:
        raise ConfigError("get: --list downloads nothing; leave out --list or --to")
    if command.flags.to and Path(command.flags.to).is_file():
        raise ConfigError(f"get: --to {command.flags.to} is a file; name a folder")
    with open_session(command.options, only_results=True) as session:
        folder = Path(command.flags.to or session.plan.run_id)
        with command.options.showing("listing the files of the run"):
            path = command.flags.path or ""
            files = list_files(session.context.google, session.plan.bucket, session.ledger.prefix, path)
        if command.flags.list:
            _print_listing(files, as_json=command.flags.json)
            return 0
        there, fetched, skipped = _download(session, files, folder, quiet=command.flags.json)
    aside = {path: place for path, place in there.items() if place != path}
    for path, place in aside.items():
        print(
            f"{one_line(path)} is in {one_line(str(folder / place))}: at the top it {top_problem(path)}",
            file=sys.stderr,
        )
    for path, why in skipped.items():
        print(f"warning: skipped {one_line(path)}: {why}", file=sys.stderr)
    if skipped:
        stays = object_url(session.plan.bucket, session.ledger.prefix)
        print(f"warning: what was skipped stays in {stays}", file=sys.stderr)
    if command.flags.json:
        rows = [{"path": path, "why": why} for path, why in skipped.items()]
        written = {"folder": str(folder), "files": [*there.values()], "downloaded": fetched}
        print(dumps({**written, "skipped": rows, "aside": aside}))
    else:
        same = f", {len(there) - fetched} of them unchanged" if fetched < len(there) else ""
        left = f"; {len(skipped)} skipped" if skipped else ""
        print(f"{plural(len(there), 'file')} in {folder}/{same}{left}")
    return 1 if skipped else 0


def _raise_if_path(command: Command) -> None:
    """Raise ConfigError for `get logs`: the first word is the run."""
    word = command.flags.run
    if not word or command.flags.path or RUN_ID.search(word) or recorder.load_record(command.options.state_dir, word):
        return
    raise ConfigError(
        f"get: {word!r} is not the id of a run; name the run before the path: `slipway get RUN {word}` "
        "(`slipway runs` lists runs)"
    )


def _download(
    session: Session, files: list[RemoteFile], folder: Path, *, quiet: bool
) -> tuple[dict[str, str], int, dict[str, str]]:
    """Download the files that the folder does not have. A failure keeps what is complete.

    Returns:
        Where each file is in the folder, how many were downloaded, and why each skipped one is not there.
    """
    if not folder.exists():
        _create_ignored(folder)
    targets, skipped = local_files(files, folder)
    missing = {target: file for target, file in targets.items() if not is_complete(file, target)}
    line, total = _ProgressLine(quiet=quiet), sum(file.size for file in missing.values())
    written = {_identity(target): file.path for target, file in targets.items() if target not in missing}
    for number, (target, file) in enumerate(missing.items(), 1):
        if (same := written.get(_identity(target))) is not None:  # on a disk without case, or with one form of letters
            skipped[file.path] = f"is the same file as {same} on this disk"
            continue
        show = partial(line.show, f"{number}/{len(missing)}  {file.path}", total)
        try:
            fetch_file(session.context.google, session.plan.bucket, file, target, show)
        except GoogleError:
            raise
        except CloudError as error:  # of this object alone
            skipped[file.path] = str(error)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            if error.errno not in OF_ONE_FILE:
                raise ConfigError(f"get: cannot write {target}: {reason}; choose another folder with --to") from None
            skipped[file.path] = f"cannot be written: {reason}"
        else:
            written[_identity(target)] = file.path
    line.clear()
    places = {file.path: target.relative_to(folder).as_posix() for target, file in targets.items()}
    there = {path: place for path, place in places.items() if path not in skipped}
    return there, len([file for file in missing.values() if file.path not in skipped]), skipped


def _identity(file: Path) -> tuple[int, int] | Path:
    """Return what two names of one file have in common; of a file that does not exist yet, its path."""
    try:
        found = file.stat()
    except OSError:
        return file
    return found.st_dev, found.st_ino


def _create_ignored(folder: Path) -> None:
    """Create the folder so that git, and therefore the code that runs ship, leaves it out: else their ids change."""
    try:
        folder.mkdir(parents=True)
        (folder / ".gitignore").write_text("*\n")
    except OSError as error:
        raise ConfigError(f"get: cannot create {folder}: {error.strerror}; choose another folder with --to") from None


class _ProgressLine:
    """Progress of downloads, on one line of a terminal; elsewhere nothing is shown."""

    def __init__(self, *, quiet: bool) -> None:
        self.shown = sys.stderr.isatty() and not quiet
        self._moved = 0
        self._drawn = False

    def show(self, label: str, total: int, size: int) -> None:
        """Say what has been moved after `size` more of `total` bytes."""
        self._moved += size
        self._print(printable(f"{format_size(self._moved)} of {format_size(total)}  {label}"))

    def clear(self) -> None:
        if self._drawn:
            self._print("")

    def _print(self, text: str) -> None:
        if self.shown:
            self._drawn = True
            print(f"\r{text[:WIDTH]:<{WIDTH}}", end="\r", file=sys.stderr, flush=True)


def _print_listing(files: list[RemoteFile], *, as_json: bool) -> None:
    """Print the files, folder by folder from the top, with their sizes."""
    if as_json:
        print(dumps([{"path": file.path, "size": file.size} for file in files]))
        return
    folders: dict[str, list[int]] = defaultdict(list)
    for file in files:
        parts = file.path.split("/")
        folders["/".join(parts[:2]) + ("/" if len(parts) > 2 else "")].append(file.size)
    for name, sizes in sorted(folders.items()):
        print(f"{format_size(sum(sizes)):>10}  {one_line(name)}{f'  {len(sizes)} files' if len(sizes) > 1 else ''}")


@dataclass(frozen=True)
class RunWeights:
    """A checkpoint of a run on this machine."""

    run_id: str
    step: int
    folder: Path


@contextmanager
def open_weights(command: Command) -> Iterator[tuple[Session, RunWeights]]:
    """Open the run that a command names, with a copy of the checkpoint that it wants.

    Raises:
        ConfigError: this installation only launches, there is no such run or checkpoint, or the bundled trainer did not
            make it.
    """
    flags = command.flags
    missing = [name for name in ("jax", "orbax", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{command.verb}: needs {', '.join(missing)}, which an installation from conf/laptop.txt leaves out; "
            "`python -m pip install -e .` in its clone adds them"
        )
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
        line = _ProgressLine(quiet=flags.json)

        def moved(path: str, size: int, total: int) -> None:
            line.show(path, total, size)

        folder = fetch_checkpoint(google, plan.bucket, plan.run_id, step, session.context.state_dir, moved)
        line.clear()
        if line.shown:
            print(f"{plan.run_id}, step {step}: starting JAX and reading the weights …", file=sys.stderr)
        yield session, RunWeights(plan.run_id, step, folder)


def importable(plan: Plan) -> dict[str, Sequence[str]]:
    """Return what a program on this machine may import of the user's own, as arguments of `run_program`.

    run.yaml comes from the bucket: only what the config names too is imported, and nothing that only a record of
    somebody else names.
    """
    if not plan.trusted:
        return {"modules": (), "imports": ()}
    return {"modules": plan.config.code.modules, "imports": [use.reference for use in references(plan.config)]}


def sampling_arguments(command: Command) -> list[str]:
    """Return the flags of `chat` and `generate` that the trainer's programs take too."""
    names = [name for flag in SAMPLING for name in flag.names] + ["--tokenizer"]
    given = {name: getattr(command.flags, name.lstrip("-").replace("-", "_")) for name in names}
    return [f"{name}={value}" for name, value in given.items() if value is not None]


def run_export(command: Command) -> int:
    """`slipway export [RUN] --to FOLDER|gs://…`: the weights of a run for use elsewhere."""
    flags = command.flags
    if not flags.to:
        raise ConfigError("export: where to? add --to FOLDER or --to gs://BUCKET/FOLDER")
    remote = flags.to.startswith(BUCKET)
    if remote and not _split_url(flags.to)[1]:
        raise ConfigError(f"export: --to {flags.to} names no folder in the bucket; e.g. {BUCKET}BUCKET/models/mine")
    target = Path(flags.to).expanduser()
    if not remote and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"export: {target} exists and is not an empty folder; choose another one with --to")
    more = [word for name in ("dtype", "tokenizer") if (v := getattr(flags, name)) for word in (f"--{name}", v)]
    with open_weights(command) as (session, weights), tempfile.TemporaryDirectory() as scratch:
        if remote:
            _raise_unless_empty(session, flags.to)
        folder = Path(scratch) / "export" if remote else target
        code = run_program(
            "trainer.convert", "export", str(weights.folder), str(folder), "--format", flags.format, *more,
            **importable(session.plan),
        )  # fmt: skip
        if code:
            return code
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        if remote:
            with command.options.showing(f"uploading to {flags.to}"):
                _upload(session, folder, files, flags.to)
    if flags.json:
        names = [path.relative_to(folder).as_posix() for path in files]
        print(dumps({"run": weights.run_id, "step": weights.step, "to": flags.to, "files": names}))
    else:
        print(f"{weights.run_id}, step {weights.step}: {len(files)} files in {flags.to.rstrip('/')}/")
    return 0


def _raise_unless_empty(session: Session, url: str) -> None:
    """Raise ConfigError if the folder in the bucket has objects, or cannot be listed."""
    if session.plan.config.cloud.kind == "here":
        raise ConfigError(
            f"export: --to {url}: cloud=here asks nothing of Google; export to a folder, then `gcloud storage cp -r` it"
        )
    bucket, path = _split_url(url)
    where = {"bucket": bucket, "prefix": f"{path}/", "fields": "items(name)", "maxResults": 1}
    try:
        found = session.context.google.call("storage", "objects.list", **where).get("items", [])
    except GoogleError as error:
        raise ConfigError(f"export: --to {url}: {error}") from None
    if found:
        raise ConfigError(f"export: {url} exists and is not empty; choose another folder with --to")


def _split_url(url: str) -> tuple[str, str]:
    bucket, _, path = url.removeprefix(BUCKET).strip("/").partition("/")
    return bucket, path


def _upload(session: Session, folder: Path, files: list[Path], url: str) -> None:
    """Copy the exported files to a bucket, those that describe the model last."""
    bucket, path = _split_url(url)
    uploads = session.context.state_dir / "uploads"
    for file in sorted(files, key=lambda file: file.name in ("config.json", "model.yaml")):
        name = f"{path}/{file.relative_to(folder).as_posix()}"
        marker = uploads / f"export-{bucket}-{name.replace('/', '-')}"[-200:]
        session.context.google.upload_file(bucket, name, file, marker, lambda _: None)


def run_chat(command: Command) -> int:
    """`slipway chat [RUN]`: chat with a run's policy on this machine."""
    with open_weights(command) as (session, weights):
        own = importable(session.plan)
    return run_program("trainer.chat", str(weights.folder), *sampling_arguments(command), **own)


def run_generate(command: Command) -> int:
    """`slipway generate [RUN] --prompt TEXT`: responses of a run's policy, on this machine."""
    flags = command.flags
    if bool(flags.prompt) == bool(flags.prompts):
        raise ConfigError("generate: give either --prompt TEXT or --prompts FILE.jsonl")
    asked = [word for text in flags.prompt for word in ("--prompt", text)]
    if flags.prompts:
        asked = ["--prompts", flags.prompts, "--column", flags.column]
    more = [*(["--out", flags.out] if flags.out else []), *(["--raw"] if flags.raw else [])]
    more += ["--json"] if flags.json else []
    with open_weights(command) as (session, weights):
        own = importable(session.plan)
    words = (*asked, "--samples", str(flags.samples), *more, *sampling_arguments(command))
    return run_program("trainer.generate", str(weights.folder), *words, **own)
