"""Files of the Hugging Face Hub: which ones a source has at a commit, and their resumable, verified download."""

import errno
import hashlib
import logging
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

from conf.proxies import unusable_proxy
from conf.schema.assets import SourceAddress
from controller.core.errors import CloudError
from controller.inputs.resolved_assets import Digests, hash_file

HUGGING_FACE = "huggingface.co"
TIMEOUT_SECONDS = 30.0
ATTEMPTS = 6
"""Tries of a request in a row without a byte more."""
PAUSE_SECONDS = 1.0
"""Pause before the second try; each further one takes twice as long."""
REFUSALS = (400, 401, 403, 404)
LOG_IN = "export HF_TOKEN, which env.secrets.HF_TOKEN passes on"
NO_NETWORK = "check this machine's network"
"""Ends what is said of a host that cannot be looked up."""
PUBLIC_FILES = (".gitattributes", "README.md")
"""Files that even a gated repository shows."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
"""Environment variables that name a proxy, which looks names up itself. On macOS the system's settings do so too."""


class SourceError(CloudError):
    """The files of a source cannot be listed or fetched. `permanent`: not for want of a network or of patience."""

    def __init__(self, message: str, permanent: bool = True) -> None:
        super().__init__(message)
        self.permanent = permanent


class SourceFile(NamedTuple):
    """A file of a source: its name in the asset, and its path there.

    `sha256` is known for files in LFS, the large ones; the others have `blob`, git's id of their content.
    """

    name: str
    path: str
    size: int
    sha256: str | None
    blob: str


@dataclass(frozen=True)
class HubAccess:
    """Where the Hub is, and as whom to ask; the token is shown to nobody else."""

    endpoint: str
    token: str | None

    def __repr__(self) -> str:
        return f"HubAccess({self.endpoint!r})"

    @property
    def auth(self) -> str | bool:
        """The token as the library takes it: False is none, not the one that `hf auth login` stored."""
        return self.token or False


def hub_endpoint() -> str:
    """Return the address of the Hub, or of what HF_ENDPOINT names in its place."""
    return (os.environ.get("HF_ENDPOINT") or f"https://{HUGGING_FACE}").rstrip("/")


def lookup_problem(endpoint: str) -> str:
    """Return why the Hub's name cannot be looked up; empty if it can, or if a proxy does so, unless of another kind.

    Without a network this saves the import of the Hub's library, which takes longer than all other checks together.
    """
    host = urlsplit(endpoint).hostname
    if problem := unusable_proxy():
        from urllib.request import proxy_bypass  # with ssl; most verbs ask nobody

        if not proxy_bypass(str(host)):
            return problem
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        proxied = sys.platform == "darwin" or any(name.lower() in PROXIES for name in os.environ)
        return "" if proxied else f"{host} cannot be looked up ({error.strerror}); {NO_NETWORK}"
    return ""


def list_source(address: SourceAddress, access: HubAccess) -> tuple[str, tuple[SourceFile, ...]]:
    """Return the commit of a source's revision, and its files that match the pattern.

    Raises:
        SourceError: the repository or its revision cannot be read, or no file matches.
    """
    if problem := lookup_problem(access.endpoint):
        raise SourceError(f"{address.repository}: {problem}", permanent=False)
    from fsspec.utils import glob_translate
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage] - httpx's
    from huggingface_hub.hf_api import RepoFile

    api = HfApi(endpoint=access.endpoint, token=access.auth)
    where: dict[str, Any] = {"repo_type": address.kind}
    try:
        commit = api.repo_info(address.repository, revision=address.revision, timeout=TIMEOUT_SECONDS, **where).sha
        assert commit, "the Hub names the commit of every revision"
        entries = api.list_repo_tree(address.repository, recursive=True, revision=commit, **where)
        found = [entry for entry in entries if isinstance(entry, RepoFile)]
    except (HTTPError, OSError, ValueError) as error:
        raise _refusal(address, access, error) from None
    matches = re.compile(glob_translate(address.pattern)).match
    files = tuple(
        SourceFile(f.path.removeprefix(address.folder), f.path, f.size, f.lfs.sha256 if f.lfs else None, f.blob_id)
        for f in found
        if matches(f.path)
    )
    if not files:
        message = f"no file matches {address.pattern!r} at revision {address.revision or 'main'}"
        raise SourceError(f"{address.kind} {address.repository}: {message}; see {question(address, access).page}")
    return commit, files


class HubQuestion(NamedTuple):
    """What was asked of the Hub, as far as a message about its refusal needs it; `log_in` says how to give a token."""

    kind: str
    repository: str
    revision: str | None
    file: str | None
    endpoint: str
    has_token: bool
    log_in: str = LOG_IN

    @property
    def page(self) -> str:
        """Address of the repository's page."""
        return f"{self.endpoint}/{'' if self.kind == 'model' else f'{self.kind}s/'}{self.repository}"


def question(address: SourceAddress, access: HubAccess, file: SourceFile | None = None) -> HubQuestion:
    """Return the question about a source, or about one of its files."""
    path, has_token = file and file.path, bool(access.token)
    return HubQuestion(address.kind, address.repository, address.revision, path, access.endpoint, has_token)


def explain(asked: HubQuestion, error: Exception) -> str:
    """Return what the Hub refused, and what to do about it."""
    from huggingface_hub import errors

    name, place = f"{asked.kind} {asked.repository}", asked.page
    status, revision, tokens = error_status(error), asked.revision or "main", f"{asked.endpoint}/settings/tokens"
    if isinstance(error, errors.GatedRepoError):
        remedy = "with the account of your token" if asked.has_token else f"then {asked.log_in}"
        return f"{name} is gated ({status}): accept its license at {place}, {remedy}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} has no revision {revision}; {place}/tree/main lists its branches and tags"
    if isinstance(error, errors.EntryNotFoundError):
        return f"{name} has no file {asked.file} in revision {revision}; see {place}/tree/{revision}"
    if isinstance(error, errors.RepositoryNotFoundError):
        remedy = f"it is private and needs a token: {asked.log_in}"
        remedy = "your token has no access to it" if asked.has_token else remedy
        return f"Hugging Face has no {name} ({status}), or {remedy}; look at {place}"
    if status == 401:
        return f"Hugging Face rejects your token (401); make a new one at {tokens}, and {asked.log_in}"
    if status == 403 and asked.has_token:
        return f"your token may not read {name} (403); see {place} and its permissions at {tokens}"
    if status == 403:
        return f"{name} may not be read without a token (403): {asked.log_in}; see {place}"
    if status:
        return f"{name}: Hugging Face answered {status}; try again later"
    return f"{name}: {_described(error)}"


def _refusal(
    address: SourceAddress, access: HubAccess, error: Exception, file: SourceFile | None = None
) -> SourceError:
    return SourceError(explain(question(address, access, file), error), error_status(error) in REFUSALS)


def error_status(error: Exception) -> int:
    """Return the status of the answer that a request ended with; 0 if there was none."""
    return getattr(getattr(error, "response", None), "status_code", 0)


def require_readable(address: SourceAddress, commit: str, files: Sequence[SourceFile], access: HubAccess) -> None:
    """Raise SourceError if the files cannot be read with this token: the list of a gated repository is public."""
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage] - httpx's

    file = next((file for file in files if file.path not in PUBLIC_FILES), files[0])
    try:
        _metadata(address, commit, file, access)
    except (HTTPError, OSError) as error:
        raise _refusal(address, access, error, file) from None


def fetch_file(
    address: SourceAddress,
    commit: str,
    file: SourceFile,
    target: Path,
    access: HubAccess,
    moved: Callable[[int], None],
    sleep: Callable[[float], None],
) -> Digests:
    """Download a file and return its hashes. What an earlier process left in `target` with `.part` is continued.

    Raises:
        SourceError: it cannot be read, its content is not what the Hub lists, or the disk is full.
    """
    part = target.with_name(f"{target.name}.part")
    if not target.is_file():
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _fill(address, commit, file, part, access, moved, sleep)
        part.replace(target)
    digests = hash_file(target)
    if problem := _content_problem(file, target, digests):
        target.unlink()
        raise SourceError(
            f"{address.repository}: {file.path} {problem}; it was not kept, `slipway up` fetches it again"
        )
    return digests


def _fill(
    address: SourceAddress,
    commit: str,
    file: SourceFile,
    part: Path,
    access: HubAccess,
    moved: Callable[[int], None],
    sleep: Callable[[float], None],
) -> None:
    """Download what is missing of a file; only tries without progress count."""
    failures, had = 0, -1
    while (have := part.stat().st_size if part.is_file() else 0) != file.size or not part.is_file():
        if have > file.size:  # of another content
            part.unlink()
            continue
        require_space(part.parent, file.size - have, file.path)
        failures, had = (0, have) if have > had else (failures + 1, had)
        problem = _download(address, commit, file, part, have, access, moved)
        if problem and failures + 1 >= ATTEMPTS:
            raise SourceError(f"{address.repository}: {file.path}: {problem}; `slipway up` resumes", permanent=False)
        if problem:
            sleep(PAUSE_SECONDS * 2**failures)


def _download(
    address: SourceAddress,
    commit: str,
    file: SourceFile,
    part: Path,
    have: int,
    access: HubAccess,
    moved: Callable[[int], None],
) -> str:
    """Let the library download the rest of a file; return what went wrong if a retry may help."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # pyright: ignore[reportPrivateImportUsage] - httpx's
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its warnings repeat signed addresses
    try:
        found = _metadata(address, commit, file, access)
        same_host = urlsplit(found.location).netloc == urlsplit(access.endpoint).netloc
        headers = build_hf_headers(token=access.auth if same_host else False)  # a signed address needs no token
        headers["Accept-Encoding"] = "identity"  # bytes of the file are counted
        with part.open("r+b" if have else "wb") as stream:
            stream.seek(have)
            counted: Any = _CountedFile(stream, moved)
            http_get(
                found.location,
                counted,
                resume_size=have,
                headers=headers,
                expected_size=file.size,
                tqdm_class=_silent_bar(),
            )
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in REFUSALS and status != 403:  # a signed address expires with a 403
            raise _refusal(address, access, error, file) from None
        return f"answered {status}"
    except (HTTPError, OSError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise SourceError(f"{file.path}: no space left in {part.parent}; free some, `slipway up` resumes") from None
        if type(error).__name__ == "TooManyRedirects":
            message = f"{file.path} is redirected in a circle; see {question(address, access).page}"
            raise SourceError(f"{address.repository}: {message}") from None
        return _described(error)
    return ""


def _described(error: Exception) -> str:
    """Describe an error in a line, without the query of an address: a signed one is a key to the file."""
    return f"{type(error).__name__}: {re.sub(r'[?][^ ]*', '', ' '.join(str(error).split()))[:200]}"


def _metadata(address: SourceAddress, commit: str, file: SourceFile, access: HubAccess) -> Any:
    """Ask where the content is. Raises SourceError for refusals that last; others are the library's errors."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    where = {"repo_type": address.kind, "revision": commit, "endpoint": access.endpoint}
    url = hf_hub_url(address.repository, file.path, **where)
    try:
        found = get_hf_file_metadata(url, token=access.auth, timeout=TIMEOUT_SECONDS, endpoint=access.endpoint)
    except HfHubHTTPError as error:
        if error_status(error) in REFUSALS:
            raise _refusal(address, access, error, file) from None
        raise
    if found.size not in (None, file.size):
        told = f"has {found.size} bytes, but {file.size} in the list of its commit"
        raise SourceError(f"{address.repository}: {file.path} {told}")
    return found


def require_space(folder: Path, size: int, what: str) -> None:
    """Raise SourceError if a disk has no room for so many bytes more."""
    free = shutil.disk_usage(folder).free
    if size > free:
        message = f"needs {size / 1e9:.1f} GB in {folder}, which has {free / 1e9:.1f} GB free"
        raise SourceError(f"{what} {message}; free some, or set run.state_dir to another disk")


def _content_problem(file: SourceFile, target: Path, digests: Digests) -> str:
    """Return how a file differs from what the Hub lists; empty if it does not."""
    found, expected, name = digests.sha256, file.sha256, "SHA-256"
    if expected is None:  # small enough for git
        content = target.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        expected, name = file.blob, "git id"
    return "" if found == expected else f"has {name} {found[:12]}…, but the Hub lists {expected[:12]}…"


def _silent_bar() -> type[Any]:
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):  # pyright: ignore[reportUntypedBaseClass, reportMissingTypeArgument]
        """The library's bar, which Slipway's own progress replaces."""

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **{**more, "disable": True})

    return Silent


class _CountedFile:
    """A file whose written bytes are counted."""

    def __init__(self, stream: IO[bytes], moved: Callable[[int], None]) -> None:
        self._stream, self._moved = stream, moved

    def write(self, data: bytes) -> int:
        size = self._stream.write(data)
        self._moved(size)
        return size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
