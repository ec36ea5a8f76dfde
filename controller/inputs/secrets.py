"""Secrets: read from the sources in `env.secrets`, kept in memory, and sent only to the workers, over SSH's stdin.

They never enter the plan, a log, an argument list, the bucket, run.yaml or a run's identity.
docs/assets-and-secrets.md
"""

import base64
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from controller.core.errors import ConfigError
from controller.gcp.client import GoogleClient
from controller.gcp.errors import ForbiddenError, NotFoundError

MANAGER = "secretmanager:"
NETRC = "NETRC"
"""Programs expect this secret as a file: the value is its content, and on a worker the variable names the file."""


class Vault:
    """Secrets of one run. It has no repr of its values, so that nothing can print them by accident."""

    def __init__(
        self,
        sources: Mapping[str, str | None],
        environment: Mapping[str, str] | None = None,
        *,
        section: str = "env.secrets",
    ) -> None:
        """Store `sources`, by name as in `section` of the config, without reading them.

        `environment` is that of this process.
        """
        self._section = section
        self._environment = os.environ if environment is None else environment
        self._sources = {
            name: source for name, source in sources.items() if source and self._is_available(name, source)
        }
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        """Sorted names of the secrets that the workers will get."""
        return sorted(self._sources)

    @property
    def apis(self) -> list[str]:
        """APIs that must be enabled to read them."""
        asks = any(source.startswith(MANAGER) for source in self._sources.values())
        return ["secretmanager.googleapis.com"] if asks else []

    def load(self, google: GoogleClient) -> None:
        """Read all secrets that have not been read yet.

        Raises:
            ConfigError: a secret is not where the config says.
            ServiceDisabledError: Secret Manager is not enabled, or not everywhere yet.
        """
        with self._lock:
            for name, source in self._sources.items():
                if name not in self._values:
                    self._values[name] = self._read(name, source, google)

    def values(self) -> dict[str, str]:
        """Return the secrets that `load` has read, by name."""
        return dict(self._values)

    def _is_available(self, name: str, source: str) -> bool:
        """Return whether to deliver a secret. Only a variable passed on under its own name is optional."""
        value = self._environment.get(name)
        if source != "env" or not value:
            return source != "env"
        return name != NETRC or Path(value).expanduser().is_file()

    def _read(self, name: str, source: str, google: GoogleClient) -> str:
        key = f"{self._section}.{name}"
        if source.startswith(MANAGER):
            return _from_manager(key, source.removeprefix(MANAGER), google)
        if source.startswith("file:"):
            return _from_file(key, source.removeprefix("file:"), name)
        variable = source.removeprefix("env:") if source != "env" else name
        value = self._environment.get(variable, "")
        if not value:
            raise ConfigError(f"{key}: environment variable {variable} is not set; set it, or remove the key")
        return _from_file(key, value, name) if name == NETRC else value


def address_problem(url: str) -> str:
    """Return why an address is none of a webhook, without repeating it; empty if it is one."""
    if not url.isascii() or not url.isprintable() or " " in url:
        return "the address holds a space, a line break or a letter that no address has"
    try:
        parts = urlsplit(url)
        _ = parts.port  # is parsed only now
    except ValueError:
        return "the address has no valid host and port"
    if parts.scheme == "https" and parts.hostname:
        return ""
    if parts.scheme == "http" and parts.hostname in ("127.0.0.1", "::1", "localhost"):
        return ""
    return "the address must begin with https://"


def _from_file(key: str, path: str, name: str) -> str:
    try:
        text = Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: cannot read {path}: {getattr(error, 'strerror', None) or 'not text'}") from None
    return text if name == NETRC else text.strip()


def _from_manager(key: str, name: str, google: GoogleClient) -> str:
    """Read a secret from Secret Manager.

    https://cloud.google.com/secret-manager/docs/reference/rest/v1/projects.secrets.versions/access
    """
    version = name if "/versions/" in name else f"{name}/versions/latest"
    try:
        answer = google.call("secretmanager", "projects.secrets.versions.access", name=version)
    except NotFoundError:
        message = f"{version} does not exist; create it with `gcloud secrets create`, or name another"
        raise ConfigError(f"{key}: {message}") from None
    except ForbiddenError as error:
        message = f"you may not read {version}; this requires roles/secretmanager.secretAccessor ({error.message})"
        raise ConfigError(f"{key}: {message}") from None
    try:
        return base64.b64decode(answer["payload"]["data"]).decode()
    except (KeyError, ValueError):
        raise ConfigError(f"{key}: {version} is not text") from None
