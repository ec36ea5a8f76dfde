"""Planted mistakes of files of the web, and builds that cannot run where they should: one finding each."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from controller.checks.inputs.downloads import builds_run_where_they_can, files_can_be_fetched
from controller.localcloud.hub import HubFault, HubServer
from controller.plan import fetching
from tests.controller.checks.plans import context, plan_of
from tests.hub import ACCEPTED, hub

__all__ = ["hub"]
KEY = "assets.models.weights.files"


def files(place: str, **more: str) -> str:
    fields = {"url": place, "sha256": "0" * 64, **more}
    return f"{{files: {{w.bin: {{{', '.join(f'{key}: {value!r}' for key, value in fields.items())}}}}}}}"


def said(tmp_path: Path, asset: str, *overrides: str) -> list[str]:
    return [f"{f.severity} {f}" for f in files_can_be_fetched(plan_of(tmp_path, asset, *overrides), context())]


def url_of(hub: HubServer, repository: str = "open") -> str:
    """An address that is not known to be the Hub's."""
    return f"http://localhost:{hub.server_port}/acme/{repository}/resolve/main/model.safetensors"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (None, f"note {KEY}: 1 file, 320 kB: through this machine, about 1 min at 100 Mbit/s"),
        (HubFault("/acme/", times=9, status=404), "error {url}: cannot fetch {place}: HTTP Error 404: Not Found"),
        (HubFault("/acme/", times=9, status=403), "error {url}: {place} refused access (403): it requires a token"),
        (HubFault("/acme/", times=9, loop=True), "error {url}: cannot fetch {place}: it is redirected in a circle"),
        (HubFault("/acme/", times=9, status=503), "note {url}: was not checked: cannot fetch {place}: HTTP Error 503"),
    ],
)
def test_one_finding_each(hub: HubServer, tmp_path: Path, fault: HubFault | None, expected: str) -> None:
    hub.state.faults += [fault] if fault else []
    [line] = said(tmp_path, files(f"{url_of(hub)}?key=planted"))
    assert line.startswith(expected.format(url=f"{KEY}.w.bin.url", place=url_of(hub)))
    assert "planted" not in line


def test_a_server_that_is_not_found_is_a_note(tmp_path: Path) -> None:
    [line] = said(tmp_path, files("https://no-such-host.invalid/w"))
    assert line.startswith(f"note {KEY}.w.bin.url: was not checked: no-such-host.invalid cannot be looked up (")


def test_what_does_not_fit_on_this_machine_is_an_error(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    assert said(tmp_path, files(url_of(hub)))[0].startswith(f"error {KEY}.w.bin.url: 320 kB are downloaded to ")
    [note] = said(tmp_path, files(url_of(hub)), "assets.fetch_on=vm")
    assert note.startswith(f"note {KEY}: 1 file, 320 kB: by an e2-standard-2 in us-central1-a, about 2 min and $0.00")


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("auto", "note {key}: through this machine: {place} is sent only to those with a token, which stays on this"),
        ("vm", "error {key}.w.bin.url: {place} is sent only to those with a token, which stays on this machine;"),
        ("laptop", "note {key}: 1 file, 320 kB: through this machine"),
    ],
)
def test_a_token_stays_on_this_machine(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, expected: str
) -> None:
    monkeypatch.setenv("MINE", ACCEPTED)
    asset = files(url_of(hub, "gated"), token_secret="MINE")
    [line] = said(tmp_path, asset, f"assets.fetch_on={where}", "+env.secrets.MINE=env")
    assert line.startswith(expected.format(key=KEY, place=url_of(hub, "gated")))


@pytest.mark.parametrize(
    ("words", "overrides", "limit", "expected"),
    [
        ("make, '{output}'", (), 0, "note {key}: built on this machine: its command names nothing of the Hub"),
        ("make, 'hf://acme/open', '{output}'", (), 10**6, "note {key}: built on this machine: it reads 320 kB of the"),
        ("make, 'hf://acme/open', '{output}'", (), 1, "note {key}: built on an e2-standard-2 in us-central1-a, after"),
        ("make, 'hf://acme/gated', '{output}'", (), 1, "note {key}: built on this machine: a VM has no token, and"),
        ("make, 'hf://acme/gated', '{output}'", ("assets.fetch_on=vm",), 1, "error {key}: a VM has no token, and"),
        ("make, /home/x, '{output}'", ("assets.fetch_on=vm",), 1, "error {key}: cannot run on the vm: it names"),
        ("make, /home/x, '{output}'", ("assets.fetch_on=pod",), 1, "error {key}: cannot run on the pod: it names"),
        ("make, 'hf://acme/open', /home/x, '{output}'", (), 1, "note {key}: built on this machine: it names /home/x"),
        ("make, 'hf://acme/opne', '{output}'", ("assets.fetch_on=vm",), 1, "error {key}: a VM has no token, and"),
    ],
)
def test_where_a_build_runs_is_told(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, overrides: tuple[str, ...],
    limit: int, expected: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(fetching, "LARGE_BYTES", limit)
    plan = plan_of(tmp_path, f"{{build: [{words}]}}", "env.packages=none", *overrides)
    [line] = [f"{f.severity} {f}" for f in builds_run_where_they_can(plan, context())]
    assert line.startswith(expected.format(key="assets.models.weights.build"))
