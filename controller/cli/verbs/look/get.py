"""`slipway get RUN [PATH]`: download results, checkpoints and logs of a run from its bucket."""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

from controller.cli.main import Command
from controller.core.errors import ConfigError
from controller.core.printable import printable
from controller.core.text import plural
from controller.progress import format_size
from controller.records import recorder
from controller.records.fetch import RemoteFile, fetch_file, is_complete, list_files, local_path
from controller.run.session import Session, open_session

RUN_ID = re.compile(r"-[0-9a-f]{8}(-r\d+)?$")


def run(command: Command) -> int:
    _raise_if_path(command)
    with open_session(command.options) as session:
        folder = Path(command.flags.to or session.plan.run_id)
        with command.options.showing("listing the files of the run"):
            path = command.flags.path or ""
            files = list_files(session.context.google, session.plan.bucket, session.ledger.prefix, path)
        if command.flags.list:
            _print_listing(files, as_json=command.flags.json)
            return 0
        fetched = _download(session, files, folder, quiet=command.flags.json)
    if command.flags.json:
        print(json.dumps({"folder": str(folder), "files": [f.path for f in files], "downloaded": fetched}))
    else:
        same = f", {len(files) - fetched} of them unchanged" if fetched < len(files) else ""
        print(f"{plural(len(files), 'file')} in {folder}/{same}")
    return 0


def _raise_if_path(command: Command) -> None:
    """Raise ConfigError for `get logs`: the first word is the run."""
    word = command.flags.run
    if not word or command.flags.path or RUN_ID.search(word) or recorder.load_record(command.options.state_dir, word):
        return
    raise ConfigError(
        f"get: {word!r} is not the id of a run; name the run before the path: `slipway get RUN {word}` "
        "(`slipway runs` lists runs)"
    )


def _download(session: Session, files: list[RemoteFile], folder: Path, *, quiet: bool) -> int:
    """Download the files that the folder does not have; return how many. A failure keeps what is complete."""
    if not folder.exists():
        _create_ignored(folder)
    missing = [file for file in files if not is_complete(file, local_path(folder, file.path))]
    line = _ProgressLine(sum(file.size for file in missing), quiet=quiet)
    for number, file in enumerate(missing, 1):
        line.label = f"{number}/{len(missing)}  {file.path}"
        target = local_path(folder, file.path)
        try:
            fetch_file(session.context.google, session.plan.bucket, file, target, line.advance)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ConfigError(f"get: cannot write {target}: {reason}; choose another folder with --to") from None
    line.clear()
    return len(missing)


def _create_ignored(folder: Path) -> None:
    """Create the folder so that git, and therefore the code that runs ship, leaves it out: else their ids change."""
    try:
        folder.mkdir(parents=True)
        (folder / ".gitignore").write_text("*\n")
    except OSError as error:
        raise ConfigError(f"get: cannot create {folder}: {error.strerror}; choose another folder with --to") from None


class _ProgressLine:
    """Progress of all downloads, on one line of a terminal; elsewhere nothing is shown."""

    WIDTH = 79

    def __init__(self, total: int, *, quiet: bool) -> None:
        self._total, self._moved = total, 0
        self._shown = sys.stderr.isatty() and not quiet
        self.label = ""

    def advance(self, size: int) -> None:
        self._moved += size
        text = f"{format_size(self._moved)} of {format_size(self._total)}  {self.label}"
        self._show(printable(text))

    def clear(self) -> None:
        self._show("")

    def _show(self, text: str) -> None:
        if self._shown:
            print(f"\r{text[: self.WIDTH]:<{self.WIDTH}}", end="\r", file=sys.stderr, flush=True)


def _print_listing(files: list[RemoteFile], *, as_json: bool) -> None:
    """Print the files, folder by folder from the top, with their sizes."""
    if as_json:
        print(json.dumps([{"path": file.path, "size": file.size} for file in files]))
        return
    folders: dict[str, list[int]] = defaultdict(list)
    for file in files:
        parts = file.path.split("/")
        folders["/".join(parts[:2]) + ("/" if len(parts) > 2 else "")].append(file.size)
    for name, sizes in sorted(folders.items()):
        print(f"{format_size(sum(sizes)):>10}  {name}{f'  {len(sizes)} files' if len(sizes) > 1 else ''}")
