"""Access tokens of the emulated cloud: issued, refused when they have expired, refreshed."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.localcloud.http.errors import ApiError
from controller.localcloud.iam import tokens as token_module
from controller.localcloud.iam.tokens import Tokens
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state.db")


def refusal(tokens: Tokens, token: str) -> ApiError:
    with pytest.raises(ApiError) as found:
        tokens.identify(token)
    return found.value


def test_a_token_names_its_holder_until_it_expires(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(token_module.time, "time", lambda: now[0])
    tokens = Tokens(store, Settings(store), "secret")
    issued = tokens.issue("77/3")
    assert issued["expires_in"] == 3600
    assert tokens.identify(issued["access_token"]) == "77/3"
    now[0] += 3600
    late = refusal(tokens, issued["access_token"])
    assert (late.code, late.status) == (401, "UNAUTHENTICATED")
    assert late.details[0]["reason"] == "ACCESS_TOKEN_EXPIRED"
    assert tokens.identify("secret") == "laptop"


def test_a_forged_token_is_unknown(store: Store) -> None:
    tokens = Tokens(store, Settings(store), "secret")
    issued = tokens.issue("77/3")["access_token"]
    for forged in (issued.replace("77_3", "77_4"), "ya29.x", "", "wrong", "\udcff"):
        assert refusal(tokens, forged).code == 401


def test_a_refresh_token_gets_access_tokens(store: Store) -> None:
    tokens = Tokens(store, Settings(store), "secret")
    answer = tokens.refresh({"grant_type": "refresh_token", "refresh_token": "secret"})
    assert tokens.identify(answer["access_token"]) == "laptop"
    assert "cloud-platform" in answer["scope"]
    with pytest.raises(ApiError, match="invalid_grant"):
        tokens.refresh({"grant_type": "refresh_token", "refresh_token": "stale"})
    with pytest.raises(ApiError, match="unsupported_grant_type"):
        tokens.refresh({"grant_type": "password"})
