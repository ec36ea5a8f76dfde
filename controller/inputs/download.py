"""Get files onto this machine before they are copied: resumable, verified downloads, and folders made by a command."""

import errno
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.error
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from controller.core.errors import CloudError
from controller.inputs.assets import AssetFile, BuildRecipe
from controller.inputs.hub import HUGGING_FACE

CHUNK = 1 << 20
TAIL_LINES = 20


def token_for(source: AssetFile, secrets: Mapping[str, str]) -> str | None:
    """Return the bearer token for a download, if any."""
    place = urlsplit(source.url or "")
    if source.token is None and (place.scheme, place.hostname) == ("https", HUGGING_FACE):
        return secrets.get("HF_TOKEN")
    return secrets.get(source.token or "")


def part_path(local: Path) -> Path:
    """Return the file that has what is downloaded of `local` so far."""
    return local.with_suffix(".part")


def download_file(source: AssetFile, token: str | None, moved: Callable[[int], None]) -> None:
    """Download a missing file, resuming an interrupted download.

    `moved` is called with the number of bytes received.

    Raises:
        CloudError: the download failed, or the content differs from the config's hash; then nothing is kept.
    """
    if source.url is None or source.local.is_file():
        return
    from http.client import HTTPException  # with ssl; most verbs download nothing

    source.local.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = part_path(source.local)
    try:
        _download(source.url, part, token, moved)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 416:  # then the file is complete
            raise CloudError(f"{source.name}: {_refusal(error, source.url, token)}") from None
    except (OSError, HTTPException) as error:
        why = f"cannot fetch {source.url}: {error};"
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            why = f"no space left in {part.parent}; free some,"
        raise CloudError(f"{source.name}: {why} `slipway up` resumes") from None
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        part.unlink()
        raise CloudError(
            f"{source.name}: {source.url} has SHA-256 {found[:12]}…, but the config has {source.sha256[:12]}…"
        )
    part.replace(source.local)


def _refusal(error: urllib.error.HTTPError, url: str, token: str | None) -> str:
    if error.code in (401, 403):
        asked = "it requires a token: set env.secrets.HF_TOKEN, or files.….token_secret"
        return f"{url} refused access ({error.code}): {'the token does not grant access' if token else asked}"
    if 300 <= error.code < 400:
        return f"cannot fetch {url}: it is redirected in a circle, or not to http ({error.code})"
    later = "; `slipway up` resumes" if error.code >= 500 or error.code == 429 else ""
    return f"cannot fetch {url}: {error}{later}"


def _download(url: str, part: Path, token: str | None, moved: Callable[[int], None]) -> None:
    import urllib.request  # likewise

    request = urllib.request.Request(url)  # noqa: S310 - http(s) by schema
    if token:  # hosts redirect to storage, which must not get the token
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    size = part.stat().st_size if part.exists() else 0
    if size:
        request.add_header("Range", f"bytes={size}-")
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        more = size and answer.status == 206
        if more:
            moved(size)
        with part.open("ab" if more else "wb") as out:
            while chunk := answer.read(CHUNK):
                out.write(chunk)
                moved(len(chunk))
        expected = answer.headers.get("Content-Length")
    got = part.stat().st_size - (size if more else 0)
    if expected is not None and got != int(expected):
        raise OSError(f"the connection dropped after {got} of {expected} bytes")


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
