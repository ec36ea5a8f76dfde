"""Default credentials and project, read from files and the environment; only Google's own VMs ask a metadata server."""

from __future__ import annotations

import configparser
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.core.errors import ConfigError

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
NO_CREDENTIALS = "no Google credentials: run `gcloud auth application-default login`, or set cloud=local"
LOG_IN_AGAIN = "log in again: `gcloud auth application-default login`; a service account needs a right clock"

GCLOUD_PROJECT = "764086051850"
"""Number of gcloud's own project, which pays for the requests of a user whose credentials name no quota project."""
NO_QUOTA_PROJECT = (
    "{}: your credentials have no quota project; run `gcloud auth application-default set-quota-project PROJECT`. "
    "See https://cloud.google.com/docs/authentication/adc-troubleshooting/user-creds"
)

NO_PROJECT = "your-project"
"""Placeholder for the project in a plan made without one."""
PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")
SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)


def application_default_credentials(quota_project: str | None = None) -> Credentials | None:
    """Return application-default credentials from $GOOGLE_APPLICATION_CREDENTIALS or gcloud's folder, or None.

    `google.auth.default()` would also ask a metadata server, which takes seconds where there is none. A service account
    gets scopes; a user's token must keep its own, which OS Login needs. Raises ConfigError if the file holds no
    credentials.

    Args:
        quota_project: the project that a user's requests count against if the file names none, as it does after
            `gcloud auth application-default login` without a project. Some APIs refuse such requests.
    """
    named = os.environ.get(VARIABLE)
    file = Path(named) if named else _gcloud_folder() / "application_default_credentials.json"
    if (named and holds_no_path(named)) or not file.is_file():
        return _metadata_credentials() if named is None else None
    import warnings

    import google.auth
    from google.auth.credentials import with_scopes_if_required
    from google.auth.exceptions import GoogleAuthError
    from google.oauth2.credentials import Credentials as UserCredentials

    with warnings.catch_warnings():  # of a missing quota project, and of files from strangers
        warnings.simplefilter("ignore")
        try:
            loaded, _ = google.auth.load_credentials_from_file(str(file))
        except (GoogleAuthError, ValueError, OSError, AttributeError) as error:  # the last: JSON, but no object
            named_by = f"{VARIABLE}: " if named else ""
            message = str(error.args[0] if error.args else error)
            raise ConfigError(
                f"{named_by}{file} holds no usable Google credentials ({message}); "
                f"{'unset the variable, or ' if named else ''}run `gcloud auth application-default login`"
            ) from None
    credentials: Any = with_scopes_if_required(loaded, SCOPES)
    if quota_project and isinstance(credentials, UserCredentials) and not credentials.quota_project_id:
        return credentials.with_quota_project(quota_project)
    return credentials


def holds_no_path(value: str) -> bool:
    """Return whether a variable has a file's content in place of its path, as a CI's secret has."""
    return "{" in value or "\n" in value or len(value) > 1000


def absent_file() -> str:
    """Say that the file which the environment names does not exist; "" if it does, or names none."""
    named = os.environ.get(VARIABLE)
    if named and holds_no_path(named):
        message = "holds the credentials themselves, not a path; write them to a file and name that"
        return f"no Google credentials: {VARIABLE} {message} (its value is not shown)"
    if not named or Path(named).is_file():
        return ""
    return f"no Google credentials: {VARIABLE} names {named}, and there is no such file; correct or unset the variable"


def _metadata_credentials() -> Credentials | None:
    """Return the credentials of this VM or Cloud Shell, or None on any other machine.

    A file of the firmware tells the machines apart, so that no metadata server is waited for elsewhere:
    https://cloud.google.com/compute/docs/instances/detect-compute-engine
    """
    if os.environ.get("NO_GCE_CHECK", "").lower() == "true":  # google-auth's own switch
        return None
    try:
        is_google = PRODUCT_NAME.read_text().startswith("Google")
    except OSError:
        is_google = False
    if not (is_google or os.environ.get("CLOUD_SHELL")):
        return None
    from google.auth import compute_engine

    return compute_engine.Credentials(scopes=list(SCOPES))


def default_project() -> str | None:
    """Return the project from the environment or gcloud's active configuration, or None."""
    for variable in ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"):
        if os.environ.get(variable):
            return os.environ[variable]
    folder = _gcloud_folder()
    active = folder / "active_config"
    name = os.environ.get("CLOUDSDK_ACTIVE_CONFIG_NAME") or (
        active.read_text().strip() if active.is_file() else "default"
    )
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(folder / "configurations" / f"config_{name}")
    return parser.get("core", "project", fallback=None)


def missing_project(project: str) -> str:
    """Return instructions if no project is set, else ''."""
    if project != NO_PROJECT:
        return ""
    return "is not set; set it, or run `gcloud config set project ID` (`gcloud projects list` lists yours)"


def _gcloud_folder() -> Path:
    return Path(os.environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config" / "gcloud")
