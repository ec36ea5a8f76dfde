"""Get files onto this machine before they are copied: resumable, verified downloads, and folders made by a command.

Before a file of the web is fetched, its server is asked; its refusals are explained in a line.
"""

import errno
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from controller.core.errors import CloudError
from controller.inputs.hub_sources import ATTEMPTS, HUGGING_FACE, PAUSE_SECONDS, SourceError
from controller.inputs.resolved_assets import AssetFile, BuildRecipe

TIMEOUT_SECONDS = 60.0
CHECK_SECONDS = 10.0
"""Of a request of `plan`."""


class DownloadError(SourceError):
    """A server does not give a file of the web."""


def token_for(source: AssetFile, secrets: Mapping[str, str]) -> str | None:
    """Return the bearer token for a download, if any."""
    place = urlsplit(source.url or "")
    if source.token is None and (place.scheme, place.hostname) == ("https", HUGGING_FACE):
        return secrets.get("HF_TOKEN")
    return secrets.get(source.token or "")


def place_of(url: str) -> str:
    """Return an address without its query, which may be a key to the file."""
    return url.partition("?")[0]


def explain(error: Exception, url: str, token: str | None) -> DownloadError:
    """Return what a failed request means, in a line."""
    place = place_of(url)
    if not isinstance(error, urllib.error.HTTPError):
        reason = getattr(error, "reason", None) or error
        return DownloadError(f"cannot fetch {place}: {reason}", permanent=False)
    error.close()
    if error.code in (401, 403):
        asked = "it requires a token: set env.secrets.HF_TOKEN, or files.….token_secret"
        why = "the token does not grant access" if token else asked
        return DownloadError(f"{place} refused access ({error.code}): {why}")
    if 300 <= error.code < 400:
        return DownloadError(f"cannot fetch {place}: it is redirected in a circle, or not to http ({error.code})")
    permanent = error.code < 500 and error.code not in (408, 429)
    return DownloadError(f"cannot fetch {place}: {error}", permanent)


def _ask(url: str, token: str | None, part: str, timeout: float) -> Any:
    """Open a file of the web, or a part of its bytes. Raises OSError, HTTPException and ValueError."""
    from urllib.request import Request, urlopen  # with ssl; most verbs ask nobody

    request = Request(url, headers={"Range": f"bytes={part}"} if part else {})  # noqa: S310 - http(s) by schema
    if token:  # hosts redirect to storage, which must not get the token
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    return urlopen(request, timeout=timeout)  # noqa: S310


def find_file(url: str, token: str | None) -> int | None:
    """Ask for the first byte of a file, as its download will; return its size, None if that is not told.

    Raises:
        DownloadError: the server refuses it, or does not answer.
    """
    from http.client import HTTPException

    try:
        with _ask(url, token, "0-0", CHECK_SECONDS) as answer:
            told = answer.headers.get("Content-Length")
            if answer.status == 206:
                told = (answer.headers.get("Content-Range") or "").rpartition("/")[2]
            return int(told) if told and told.isdigit() else None
    except urllib.error.HTTPError as error:
        if error.code == 416:  # it is empty
            error.close()
            return 0
        raise explain(error, url, token) from None
    except (OSError, HTTPException, ValueError) as error:
        raise explain(error, url, token) from None


CHUNK = 1 << 20
TAIL_LINES = 20


def part_path(local: Path) -> Path:
    """Return the file that has what is downloaded of `local` so far."""
    return local.with_suffix(".part")


def download_file(
    source: AssetFile, token: str | None, moved: Callable[[int], None], sleep: Callable[[float], None] = time.sleep
) -> None:
    """Download a missing file, resuming an interrupted download.

    `moved` is called with the number of bytes received, negative where some have to be received again.

    Raises:
        CloudError: the download failed, or the content differs from the config's hash; then nothing is kept.
    """
    if source.url is None or source.local.is_file():
        return
    source.local.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = part_path(source.local)
    moved(_size(part))
    in_pieces = _fill(source, source.url, part, token, moved, sleep)
    found = _hash(part)
    if found != source.sha256 and in_pieces:  # the server's file may have changed between two pieces
        moved(-_size(part))
        part.unlink()
        _fill(source, source.url, part, token, moved, sleep)
        found = _hash(part)
    if found != source.sha256:
        part.unlink()
        place = place_of(source.url)
        raise CloudError(f"{source.name}: {place} has SHA-256 {found[:12]}…, but the config has {source.sha256[:12]}…")
    part.replace(source.local)


def _fill(
    source: AssetFile,
    url: str,
    part: Path,
    token: str | None,
    moved: Callable[[int], None],
    sleep: Callable[[float], None],
) -> bool:
    """Download what is missing of a file; only tries without progress count. Returns whether it came in pieces."""
    failures, had, in_pieces = 0, -1, _size(part) > 0
    while True:
        have = _size(part)
        failures, had = (0, have) if have > had else (failures + 1, had)
        try:
            _download(url, part, token, moved)
        except DownloadError as error:
            if error.permanent or failures + 1 >= ATTEMPTS:
                more = "" if error.permanent else "; `slipway up` resumes"
                raise CloudError(f"{source.name}: {error}{more}") from None
        else:
            return in_pieces
        in_pieces = True
        sleep(PAUSE_SECONDS * 2**failures)


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _hash(part: Path) -> str:
    with part.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(url: str, part: Path, token: str | None, moved: Callable[[int], None]) -> None:
    """Download the rest of a file, or all of it from a server that sends no ranges. Raises DownloadError."""
    from http.client import HTTPException

    size = _size(part)
    try:
        with _ask(url, token, f"{size}-" if size else "", TIMEOUT_SECONDS) as answer:
            if answer.status != 206:
                moved(-size)
                size = 0
            with part.open("ab" if size else "wb") as out:
                while chunk := answer.read(CHUNK):
                    out.write(chunk)
                    moved(len(chunk))
            expected = answer.headers.get("Content-Length")
        if expected is not None and (got := _size(part) - size) != int(expected):
            raise OSError(f"the connection dropped after {got} of {expected} bytes")
    except urllib.error.HTTPError as error:
        if error.code != 416:  # then the file is complete
            raise explain(error, url, token) from None
        error.close()
    except (OSError, HTTPException) as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            message = f"no space left in {part.parent}; free some, `slipway up` resumes"
            raise DownloadError(message, permanent=True) from None
        raise explain(error, url, token) from None


def search_path() -> str:
    """Return PATH, then the folder of this Python: `hf` is installed there, even if the venv is not activated."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


def run_recipe(recipe: BuildRecipe, key: str) -> Path:
    """Run a recipe once; return the folder that it fills. Raises CloudError with the end of its output."""
    if recipe.output.is_dir():
        return recipe.output
    recipe.output.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{recipe.output.name}-", dir=recipe.output.parent))
    argv = [word.replace("{output}", str(draft)) for word in recipe.argv]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PATH": search_path()}
    try:
        done = subprocess.run(
            argv, cwd=recipe.root, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        message = f"{key}: `{shlex.join(recipe.argv)}`"
        if done.returncode:
            tail = "\n".join(done.stdout.decode(errors="replace").splitlines()[-TAIL_LINES:])
            raise CloudError(f"{message} ended with code {done.returncode}:\n{tail}")
        if not any(draft.iterdir()):
            raise CloudError(f"{message} wrote no file to {{output}}")
        draft.rename(recipe.output)
    except FileNotFoundError:
        raise CloudError(f"{key}: program {recipe.argv[0]!r} is not installed on this machine") from None
    except OSError:
        if not recipe.output.is_dir():  # another process may have been faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return recipe.output
