"""Planted mistakes of sources: each is one finding of `plan`, before anything is billed."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.checks.inputs.sources import sources_can_be_read
from controller.context import Context
from controller.core.clock import Clock
from controller.gcp.errors import ForbiddenError, NotFoundError
from controller.localcloud.hub import HubFault, HubServer
from tests.controller.checks.plans import EmptyBucket, plan_of
from tests.hub import ACCEPTED, OTHER, hub

__all__ = ["hub"]


class Buckets(EmptyBucket):
    """A project with the bucket `mine`, one object in it, and a bucket of others."""

    def list_all(self, api: str, method: str, items: str, **parameters: Any) -> list[dict[str, Any]]:
        if parameters["bucket"] == "acme-slipway-us-central1":
            return super().list_all(api, method, items, **parameters)
        if parameters["bucket"] == "theirs":
            raise ForbiddenError("list", 403, "forbidden", "you may not")
        if parameters["bucket"] != "mine":
            raise NotFoundError("list", 404, "notFound", "no such bucket")
        found = {"name": "text/a.parquet", "size": "7", "md5Hash": "x", "generation": "1"}
        return [found] if found["name"].startswith(parameters["prefix"]) else []


def said(tmp_path: Path, source: str, *overrides: str, present: tuple[str, ...] = ()) -> list[str]:
    plan = plan_of(tmp_path, f"{{source: '{source}'}}", *overrides)
    context = cast(Context, SimpleNamespace(google=Buckets(*present), clock=Clock()))
    found = list(sources_can_be_read(plan, context))
    assert {f.key for f in found} <= {"assets.models.weights.source"}
    return [f"{f.severity}: {f.message}" for f in found]


@pytest.mark.parametrize(
    ("source", "token", "expected"),
    [
        ("hf://acme/open", "", "note: 3 files, 320 kB, of commit "),
        ("hf://datasets/acme/rows/data/*", "", "note: 3 files, 18 B, of commit "),
        ("hf://acme/gated", ACCEPTED, "note: 3 files, 320 kB"),
        ("hf://acme/gated", "", "error: model acme/gated is gated (401): accept its license"),
        ("hf://acme/gated", OTHER, "error: model acme/gated is gated (403): accept its"),
        ("hf://acme/opne", "", "error: Hugging Face has no model acme/opne (401), or it"),
        ("hf://acme/opne", OTHER, "error: Hugging Face has no model acme/opne (404), or"),
        ("hf://acme/open@v9", "", "error: model acme/open has no revision v9"),
        ("hf://acme/open/*.gguf", "", "error: model acme/open: no file matches '*.gguf'"),
        ("hf://acme/open", "hf_wrong", "error: Hugging Face rejects your token (401)"),
        ("gs://theirs/text/*", "", "error: gs://theirs: you may not list it (you may not)"),
        ("gs://nowhere/text/*", "", "error: gs://nowhere: there is no such bucket"),
        ("gs://mine/text/*.jsonl", "", "error: gs://mine: no object matches 'text/*.jsonl'"),
    ],
)
def test_one_finding_each(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, token: str, expected: str
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    [line] = said(tmp_path, source)
    assert line.startswith(expected)
    assert not token or token not in line


def test_what_is_in_the_bucket_is_not_asked_for(hub: HubServer, tmp_path: Path) -> None:
    assert said(tmp_path, "hf://acme/opne", present=("weights",)) == []
    assert said(tmp_path, "gs://mine/text/*.parquet") == []
    assert hub.state.requests == []


def test_a_hub_that_does_not_answer_is_a_note(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.state.faults.append(HubFault("GET /api/", status=500, times=99))
    [line] = said(tmp_path, "hf://acme/open")
    assert line.startswith("note: was not checked: model acme/open: Hugging Face answered 500")
    monkeypatch.setenv("HF_ENDPOINT", "https://nowhere.invalid")
    [line] = said(tmp_path, "hf://acme/open")
    assert line.startswith("note: was not checked: acme/open: nowhere.invalid cannot be")


def test_a_disk_that_is_too_small_is_an_error(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    assert said(tmp_path, "hf://acme/open")[0].startswith("error: its 4 largest files take 320 kB; ")


def test_a_token_is_not_sent_unencrypted(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", ACCEPTED)
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example")
    assert said(tmp_path, "hf://acme/open") == [
        "error: HF_ENDPOINT: http://mirror.example would get the token unencrypted; use https"
    ]


def test_this_machine_reaches_no_bucket(tmp_path: Path) -> None:
    [line] = said(tmp_path, "gs://mine/text/*", "cloud=here")
    assert "is in a bucket, which cloud=here does not reach" in line
