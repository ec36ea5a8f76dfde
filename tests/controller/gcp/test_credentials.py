"""Credential files as gcloud and the Google Cloud console write them."""

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from google.auth.compute_engine import Credentials as ComputeCredentials

from controller.core.errors import ConfigError
from controller.gcp import credentials
from controller.gcp.credentials import SCOPES, application_default_credentials, default_project

USER = {"type": "authorized_user", "client_id": "id", "client_secret": "secret", "refresh_token": "token"}


def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any], project: str | None) -> Any:
    (file := tmp_path / "adc.json").write_text(json.dumps(content))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    return application_default_credentials(project)


@pytest.mark.parametrize(
    ("stored", "project", "expected"), [(None, "p1", "p1"), ("other", "p1", "other"), (None, None, None)]
)
def test_a_user_has_a_quota_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str | None, project: str | None, expected: str | None
) -> None:
    content = USER | ({"quota_project_id": stored} if stored else {})
    loaded = load(tmp_path, monkeypatch, content, project)
    assert loaded.quota_project_id == expected
    assert loaded.scopes is None, "a refresh that names cloud-platform alone loses the user's address"


def test_a_service_account_gets_scopes_and_no_quota_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = rsa.generate_private_key(65537, 2048)
    content = {
        "type": "service_account",
        "client_email": "a@p.iam.gserviceaccount.com",
        "token_uri": "https://oauth2.googleapis.com/token",
        "private_key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
    }
    found = load(tmp_path, monkeypatch, content, "p1")
    assert (tuple(found.scopes), found.quota_project_id) == (SCOPES, None)


@pytest.mark.parametrize(
    ("product", "variables", "found"),
    [
        ("Google Compute Engine\n", {}, True),
        ("Google Compute Engine\n", {"NO_GCE_CHECK": "true"}, False),
        ("HP Laptop\n", {}, False),
        ("HP Laptop\n", {"CLOUD_SHELL": "true"}, True),
        (None, {}, False),
    ],
)
def test_a_google_vm_has_its_own_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, product: str | None, variables: dict[str, str], found: bool
) -> None:
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "NO_GCE_CHECK", "CLOUD_SHELL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"CLOUDSDK_CONFIG": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(credentials, "PRODUCT_NAME", tmp_path / "product_name")
    if product is not None:
        (tmp_path / "product_name").write_text(product)
    own = application_default_credentials("p1")
    assert type(own) is ComputeCredentials if found else own is None
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    assert application_default_credentials("p1") is None, "the named file decides"


def test_the_project_is_that_of_the_named_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT", "CLOUDSDK_ACTIVE_CONFIG_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    (tmp_path / "configurations").mkdir()
    for name in ("work", "home"):
        (tmp_path / "configurations" / f"config_{name}").write_text(f"[core]\nproject = p-{name}\n")
    (tmp_path / "active_config").write_text("work\n")
    assert default_project() == "p-work"
    monkeypatch.setenv("CLOUDSDK_ACTIVE_CONFIG_NAME", "home")
    assert default_project() == "p-home"


@pytest.mark.parametrize("content", ["no JSON", "{}", '{"type": "authorized_user"}', "[1]"])
def test_a_file_that_holds_no_credentials_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    (file := tmp_path / "adc.json").write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    with pytest.raises(ConfigError) as caught:
        application_default_credentials()
    assert str(caught.value).startswith(f"GOOGLE_APPLICATION_CREDENTIALS: {file} holds no usable Google credentials (")
    assert "\n" not in str(caught.value)
