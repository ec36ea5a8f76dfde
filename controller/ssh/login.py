"""How this machine and the workers know each other: an account on the workers, and their pinned host keys.

The account is an SSH key in the VMs' metadata, or in the user's OS Login profile. Host keys are read from Google once
and kept for the pod's lifetime, in a file of OpenSSH's format (`worker-3 ssh-ed25519 AAAA…`), below a comment that
names the incarnation.
"""

import os
import re
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from controller.core.errors import ConfigError, SlipwayError
from controller.core.this_process import Clock
from controller.gcp.answers import Caller
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import ConflictError, ForbiddenError, NotFoundError


class WorkerVms(Protocol):
    """The VMs of one pod. Every method may raise GoogleError; NotFoundError if the pod is gone."""

    def ssh_keys(self, google: GoogleClient) -> str:
        """Return the lines of `ssh-keys` that every VM has in its metadata."""
        ...

    def add_ssh_key(self, caller: Caller, line: str) -> None:
        """Add a line to the VMs' `ssh-keys`; other lines stay.

        Raises ConflictError if another client changes a VM at this moment.
        """
        ...

    def guest_attributes(self, google: GoogleClient) -> Sequence[Sequence[dict[str, str]]]:
        """Return what each VM has published, in the order of the workers: items with namespace, key and value."""
        ...


KEY_FILE_NAME = "id_ed25519"
CONFLICT_SECONDS = 120.0
"""How long a node may be busy with another change before our key cannot be added."""


def private_key(folder: Path) -> Path:
    """Return the private key's file (OpenSSH format, mode 0600). Of several processes, the first creates the key."""
    path = folder / KEY_FILE_NAME
    if not path.exists():
        try:
            _generate(path)
        except OSError as error:
            raise ConfigError(f"run.state_dir: cannot write {path}: {error.strerror}") from None
    return path


def public_key_line(folder: Path, comment: str) -> str:
    """Return `ssh-ed25519 AAAA… comment`, as in `authorized_keys` or, after `user:`, in `ssh-keys` metadata."""
    from cryptography.hazmat.primitives import serialization

    file = private_key(folder)
    try:
        key = serialization.load_ssh_private_key(file.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}): `rm -r {file}`, and another is made") from None
    except ValueError as error:
        raise ConfigError(f"{file} is damaged ({error}): `rm {file}`, and the next command makes another") from None
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return f"{key.public_key().public_bytes(encoding, form).decode()} {comment}"


def _generate(path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    text = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{KEY_FILE_NAME}.") as draft:  # 0600
        draft.write(text)
        draft.flush()
        try:
            os.link(draft.name, path)
        except FileExistsError:  # another controller created the key first
            return


class OsLogin:
    """The caller's OS Login profile in a project.

    Where a project enforces OS Login, our SSH key goes into our Google profile, not into a node's metadata
    (https://cloud.google.com/compute/docs/oslogin).
    """

    def __init__(self, google: GoogleClient, project: str) -> None:
        self._google, self._project = google, project

    @cached_property
    def is_enforced(self) -> bool:
        """Return whether the project's metadata enforces OS Login; False without permission to read it."""
        try:
            answer = self._google.call("compute", "projects.get", project=self._project)
        except ForbiddenError:
            return False
        items = answer.get("commonInstanceMetadata", {}).get("items", [])
        return any(i["key"] == "enable-oslogin" and i.get("value", "").upper() == "TRUE" for i in items)

    def login(self, public_key: str) -> str | None:
        """Return our user name on the VMs, or None until this key is in our profile."""
        name = f"users/{self._email}"
        try:
            profile = self._google.call("oslogin", "users.getLoginProfile", name=name, projectId=self._project)
        except NotFoundError:
            return None
        keys = [key.get("key", "").split()[:2] for key in profile.get("sshPublicKeys", {}).values()]
        accounts = sorted(profile.get("posixAccounts", []), key=lambda account: not account.get("primary", False))
        return accounts[0]["username"] if accounts and public_key.split()[:2] in keys else None

    def add_key(self, public_key: str) -> None:
        """Add a key to our profile, which also creates the account."""
        self._google.call(
            "oslogin",
            "users.importSshPublicKey",
            parent=f"users/{self._email}",
            projectId=self._project,
            body={"key": public_key},
        )

    @cached_property
    def _email(self) -> str:
        if known := self._google.service_account:
            return known
        email = self._google.call("oauth2", "userinfo.get").get("email")
        if not email:
            raise SlipwayError(
                "OS Login needs your email address, which these credentials do not include; run `gcloud auth "
                "application-default login` again, or set ssh.os_login=false if the project allows it"
            )
        return email


@dataclass
class Login:
    """SSH key of a project, and its access to the workers.

    Attributes:
        user: name on the workers, unless OS Login assigns another.
        state: folder that holds the keys.
        os_login: whether Google manages the logins; None: ask the project.
        poll_seconds: seconds between polls of a running operation.
    """

    google: GoogleClient
    clock: Clock
    project: str
    user: str
    state: Path
    os_login: bool | None = False
    poll_seconds: float = 5.0

    @property
    def key_dir(self) -> Path:
        """Return the folder of the project's SSH key."""
        return self.state / "keys" / self.project.replace(":", "_")

    def key_line(self) -> str:
        """Return the public key as a line of `ssh-keys` metadata; the key is created on first use."""
        return f"{self.user}:{public_key_line(self.key_dir, self.user)}"

    @cached_property
    def uses_os_login(self) -> bool:
        """Return whether the key belongs in the OS Login profile, not in the VMs' metadata."""
        return self._os_login.is_enforced if self.os_login is None else self.os_login

    def user_name(self) -> str:
        """Return the user name on the workers. Raises SlipwayError if the OS Login profile lacks the key."""
        if not self.uses_os_login:
            return self.user
        if (name := self._os_login.login(self._public_key)) is None:
            raise SlipwayError("your OS Login profile does not have Slipway's SSH key; `slipway up` adds it")
        return name

    def is_authorized(self, vms: WorkerVms, known_keys: str = "") -> bool:
        """Return whether the workers accept the key.

        Args:
            vms: the workers' VMs.
            known_keys: their `ssh-keys` when last observed; the key may have been added since.
        """
        if self.uses_os_login:
            return self._os_login.login(self._public_key) is not None
        line = self.key_line()
        if line in known_keys.splitlines():
            return True
        try:
            return line in vms.ssh_keys(self.google).splitlines()
        except NotFoundError:
            return False

    def authorize(self, vms: WorkerVms) -> None:
        """Make the workers accept the key, as `gcloud compute tpus tpu-vm ssh` does; other keys stay."""
        if self.uses_os_login:
            self._os_login.add_key(self._public_key)
            return
        late = self.clock.deadline(CONFLICT_SECONDS)
        while not self.is_authorized(vms):
            try:
                vms.add_ssh_key(self, self.key_line())
            except ConflictError:  # another client changes a VM at this moment, maybe for a key too
                if late():
                    raise
                self.clock.sleep(self.poll_seconds)
            else:
                return

    @cached_property
    def _os_login(self) -> OsLogin:
        return OsLogin(self.google, self.project)

    @property
    def _public_key(self) -> str:
        return self.key_line().partition(":")[2]


KnownKeys = dict[str, str]
"""Keys of one worker in base64, by type."""
_HEADER = "# incarnation "
KEY = re.compile(r"((?:ssh-ed25519|ecdsa-|ssh-rsa)\S*) +([A-Za-z0-9+/]+=*)( .*)?")


class HostKeys:
    """Pinned host keys. A known key changes only by `replace`; keys of further types may be added. Thread-safe."""

    def __init__(self, read: Callable[[], Sequence[str]], file: Path | None = None, incarnation: str = "") -> None:
        """Store the parameters; nothing is read before the first use.

        Args:
            read: returns the keys that Google publishes now, per worker: lines of `TYPE KEY`.
            file: stores the keys; those of another incarnation are dropped. None: they are not stored.
            incarnation: uid of the pod.
        """
        self._read, self._file, self._incarnation = read, file, incarnation
        self._lock = threading.Lock()
        self._known: dict[int, KnownKeys] | None = None

    def keys_of(self, worker: int) -> KnownKeys:
        """Return the pinned keys of a worker; the first call reads them from Google. Empty if none are published."""
        with self._lock:
            if not self._all().get(worker):
                self._merge(dict(enumerate(_parse(lines) for lines in self._read())))
            return dict(self._all().get(worker, {}))

    def cached(self, worker: int) -> KnownKeys:
        """Return the pinned keys of a worker without asking Google."""
        with self._lock:
            return dict(self._all().get(worker, {}))

    def published(self, worker: int) -> KnownKeys:
        """Return the keys that Google publishes now, whether pinned or not."""
        lines = self._read()
        return _parse(lines[worker]) if worker < len(lines) else {}

    def pin(self, worker: int, kind: str, text: str) -> None:
        """Pin a key of a worker."""
        with self._lock:
            self._merge({worker: {kind: text}})

    def replace(self, worker: int, kind: str, text: str) -> None:
        """Forget the pinned keys of a worker, whose VM was rebuilt, and pin this one."""
        with self._lock:
            self._known = {**self._all(), worker: {kind: text}}
            self._save(self._known)

    def _all(self) -> dict[int, KnownKeys]:
        if self._known is None:
            self._known = self._load()
        return self._known

    def _merge(self, found: dict[int, KnownKeys]) -> None:
        known = self._all()
        merged = {w: found.get(w, {}) | known.get(w, {}) for w in sorted({*known, *found})}
        merged = {worker: keys for worker, keys in merged.items() if keys}
        if merged != known:
            self._known = merged
            self._save(merged)

    def _load(self) -> dict[int, KnownKeys]:
        known: dict[int, KnownKeys] = {}
        if self._file is None or not self._file.is_file():
            return known
        header, *lines = self._file.read_text(errors="replace").splitlines() or [""]
        if header != _HEADER + self._incarnation:
            return known
        with suppress(ValueError):  # of a damaged file; Google publishes the keys again
            for line in lines:
                name, kind, text = line.split()
                known.setdefault(int(name.removeprefix("worker-")), {})[kind] = text
        return known

    def _save(self, known: dict[int, KnownKeys]) -> None:
        if self._file is None:
            return
        lines = [f"worker-{worker} {kind} {text}" for worker, keys in known.items() for kind, text in keys.items()]
        with suppress(OSError):  # the next command asks Google again
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False) as draft:
                draft.write("\n".join([_HEADER + self._incarnation, *lines, ""]))
            Path(draft.name).replace(self._file)


def _parse(lines: str) -> KnownKeys:
    """Return the well-formed keys; a program on a worker may publish anything."""
    found = map(KEY.fullmatch, lines.splitlines())
    return {match[1]: match[2] for match in found if match}
