"""What Hugging Face refuses is found by asking a small Hub on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.checks.inputs.hugging_face import hub_sources_can_be_read
from controller.checks.preflight import probe_plan
from controller.config.compose import compose
from controller.context import Context
from controller.gcp.client import NotFoundError
from controller.inputs.code import UnfetchedSnapshot
from controller.plan.build import Plan, build_plan

ACCEPTED, OTHER = "hf_accepted", "hf_other"
FILES = {
    "acme/open": ("main", ["README.md", "config.json", "model.safetensors"]),
    "acme/gated": ("main", ["README.md", "model.safetensors"]),
    "datasets/acme/rows": ("v1", ["rows.jsonl"]),
}


class Hub(BaseHTTPRequestHandler):
    """The answers of the Hub, with the headers by which its client tells refusals apart."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, status: int, code: str = "", body: bytes = b"", message: str = "") -> None:
        self.send_response(status)
        for name, value in {"X-Error-Code": code, "X-Error-Message": message}.items():
            if value:
                self.send_header(name, value)
        self.send_header("ETag", '"abc"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        path = self.path.partition("?")[0].strip("/")
        if token and token not in (ACCEPTED, OTHER):
            return self._answer(401, message="Invalid credentials in Authorization header")
        is_api = path.startswith("api/")
        path = path.removeprefix("api/").removeprefix("models/")
        name = next((name for name in FILES if path == name or path.startswith(f"{name}/")), None)
        if path.startswith("acme/broken"):
            return self._answer(500)
        if name is None:
            return self._answer(404 if token else 401, "RepoNotFound")
        revision, files = FILES[name]
        rest = path.removeprefix(name).strip("/").split("/", 2)
        if (rest[1] if len(rest) > 1 else "main") != revision:
            return self._answer(404, "RevisionNotFound")
        if is_api:
            listed = ",".join(f'{{"rfilename": "{file}"}}' for file in files)
            return self._answer(200, body=f'{{"id": "{name}", "siblings": [{listed}]}}'.encode())
        if name == "acme/gated" and token != ACCEPTED:
            return self._answer(403 if token else 401, "GatedRepo")
        return self._answer(200) if rest[2] in files else self._answer(404, "EntryNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def hub(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    import huggingface_hub.constants

    monkeypatch.setenv("HF_ENDPOINT", server)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    return server


class EmptyBucket:
    def __init__(self, *present: str) -> None:
        self.present = present

    def call(self, api: str, method: str, **parameters: Any) -> dict[str, Any]:
        if any(parameters["object"].startswith(f"assets/{name}-") for name in self.present):
            return {}
        raise NotFoundError("get", 404, "notFound", "no such object")


def plan_of(tmp_path: Path, asset: str, *overrides: str) -> Plan:
    words = ["cloud.project=acme", "program=command", "program.command=[a]", f"run.state_dir={tmp_path}"]
    config, problems = compose([*words, f"+assets.models.weights={asset}", *overrides])
    assert config is not None, problems
    return build_plan(config, "acme", tmp_path, UnfetchedSnapshot(tmp_path, (), "0" * 40))


def said(tmp_path: Path, asset: str, *overrides: str, present: tuple[str, ...] = ()) -> list[str]:
    context = cast(Context, SimpleNamespace(google=EmptyBucket(*present)))
    return [f"{f.severity} {f}" for f in hub_sources_can_be_read(plan_of(tmp_path, asset, *overrides), context)]


def build(*words: str) -> str:
    return f"{{build: [hf, download, {', '.join(words)}, --local-dir, '{{output}}']}}"


def url(address: str) -> str:
    return f"{{files: {{f: {{url: '{address}', sha256: {'a' * 64}}}}}}}"


@pytest.mark.parametrize(
    ("words", "token", "expected"),
    [
        (("acme/open",), "", []),
        (("acme/open", "config.json"), "", []),
        (("acme/rows", "--repo-type", "dataset", "--revision", "v1"), "", []),
        (("acme/gated",), ACCEPTED, []),
        (
            ("acme/gated",),
            "",
            ["model acme/gated is gated (401): accept its license at HUB/acme/gated, then `hf auth login`"],
        ),
        (
            ("acme/gated",),
            OTHER,
            ["model acme/gated is gated (403): accept its license at HUB/acme/gated, with the account of your token"],
        ),
        (
            ("acme/opne",),
            "",
            [
                "Hugging Face has no model acme/opne (401), or it is private and needs a token: `hf auth login`; "
                "look at HUB/acme/opne"
            ],
        ),
        (
            ("acme/opne",),
            ACCEPTED,
            ["Hugging Face has no model acme/opne (404), or your token has no access to it; look at HUB/acme/opne"],
        ),
        (
            ("acme/open", "--revision", "v9"),
            "",
            ["model acme/open has no revision v9; HUB/acme/open/tree/main lists its branches and tags"],
        ),
        (
            ("acme/open", "weights.bin"),
            "",
            ["model acme/open has no file weights.bin in revision main; see HUB/acme/open/tree/main"],
        ),
        (
            ("acme/open",),
            "hf_expired",
            [
                "Hugging Face rejects your token (401); make a new one at HUB/settings/tokens, and `hf auth login`",
            ],
        ),
    ],
)
def test_each_refusal_names_the_page_to_open(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], token: str, expected: list[str]
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    lines = [f"error assets.models.weights.build: {line.replace('HUB', hub)}" for line in expected]
    assert said(tmp_path, build(*words)) == lines


def test_a_line_for_a_shell_is_read_too(hub: str, tmp_path: Path) -> None:
    line = "{build: [sh, -c, 'mkdir {output} && hf download acme/gated --local-dir {output} && ls']}"
    [error] = said(tmp_path, line)
    assert "acme/gated is gated" in error


@pytest.mark.parametrize("where", ["laptop", "pod"])
def test_files_are_asked_for_with_the_token_that_fetches_them(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    gated, on = url(f"{hub}/acme/gated/resolve/main/model.safetensors"), f"assets.fetch_on={where}"
    [error] = said(tmp_path, gated, on)
    assert error.startswith("error assets.models.weights.files.f.url: model acme/gated is gated (401): accept its lic")
    assert error.endswith("then export HF_TOKEN, which env.secrets.HF_TOKEN passes on")
    monkeypatch.setenv("MINE", ACCEPTED)
    named = gated.replace("sha256", "token_secret: MINE, sha256")
    assert said(tmp_path, named, on, "+env.secrets.MINE=env") == []
    [absent] = said(tmp_path, url(f"{hub}/datasets/acme/rows/resolve/v1/row.jsonl"), on)
    assert absent.endswith(f"has no file row.jsonl in revision v1; see {hub}/datasets/acme/rows/tree/v1")


def test_what_is_there_already_is_not_asked_for(hub: str, tmp_path: Path) -> None:
    assert said(tmp_path, build("acme/gated"), present=("weights",)) == []
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / ("a" * 64)).touch()
    assert said(tmp_path, url(f"{hub}/acme/gated/resolve/main/f")) == []
    [recipe] = [asset.recipe for asset in plan_of(tmp_path, build("acme/gated")).assets]
    assert recipe is not None
    recipe.output.mkdir(parents=True)
    assert said(tmp_path, build("acme/gated")) == []


def test_a_hub_that_does_not_answer_is_a_note(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [broken] = said(tmp_path, build("acme/broken"))
    assert broken.endswith("was not checked: Hugging Face answered 500")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    context = cast(Context, SimpleNamespace(google=EmptyBucket()))
    [note] = [f for f in probe_plan(plan_of(tmp_path, build("acme/open")), context) if f.check == "hugging_face"]
    assert note.severity == "note"
    assert note.message.startswith("http://127.0.0.1:1/acme/open was not checked: ConnectError")
