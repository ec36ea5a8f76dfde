"""A fresh project has few APIs enabled, and one just enabled is not enabled everywhere at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.localcloud.http.enabled_apis import EnabledApis
from controller.localcloud.http.errors import ApiError
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store

DEFAULTS = ("storage", "logging", "serviceusage", "oauth2")
OTHERS = ("tpu", "compute", "iam", "cloudresourcemanager", "cloudbilling")


def answers(apis: EnabledApis, api: str) -> bool:
    try:
        apis.check(api)
    except ApiError as error:
        told = (error.code, error.reason, error.details[0]["reason"])
        assert told == (403, "accessNotConfigured", "SERVICE_DISABLED")
        return False
    return True


def test_a_fresh_project_has_googles_defaults_and_nothing_else(tmp_path: Path) -> None:
    apis = EnabledApis(store := Store(tmp_path / "s"), Settings(store))
    found = {api: answers(apis, api) for api in (*DEFAULTS, *OTHERS)}
    assert found == dict.fromkeys(DEFAULTS, True) | dict.fromkeys(OTHERS, False)


def test_an_api_just_enabled_refuses_every_other_request_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    store = Store(tmp_path / "s")
    apis = EnabledApis(store, Settings(store, operation_seconds=10))
    apis.set_enabled("tpu.googleapis.com", True)
    assert [answers(apis, "tpu") for _ in range(4)] == [False, True, False, True]
    now[0] += 25
    apis.set_enabled("tpu.googleapis.com", True)  # it is enabled already
    assert [answers(apis, "tpu") for _ in range(4)] == [True] * 4
    Settings(store, realism="relaxed")
    relaxed = EnabledApis(store, Settings(store))
    relaxed.set_enabled("iam.googleapis.com", True)
    assert answers(relaxed, "iam")
