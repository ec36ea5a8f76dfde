"""Credential files as gcloud and the Google Cloud console write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from controller.gcp.credentials import SCOPES, application_default_credentials

USER = {"type": "authorized_user", "client_id": "id", "client_secret": "secret", "refresh_token": "token"}


def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any], project: str | None) -> Any:
    (file := tmp_path / "adc.json").write_text(json.dumps(content))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    return application_default_credentials(project)


def test_a_users_token_keeps_its_own_scopes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh that names cloud-platform alone gives a token without the address of the user."""
    assert load(tmp_path, monkeypatch, USER, "p1").scopes is None


@pytest.mark.parametrize(
    ("stored", "project", "expected"), [(None, "p1", "p1"), ("other", "p1", "other"), (None, None, None)]
)
def test_a_user_has_a_quota_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str | None, project: str | None, expected: str | None
) -> None:
    content = USER | ({"quota_project_id": stored} if stored else {})
    assert load(tmp_path, monkeypatch, content, project).quota_project_id == expected


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


def test_without_a_file_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    assert application_default_credentials("p1") is None
