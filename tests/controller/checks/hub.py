"""A small Hugging Face Hub on loopback, and plans that download from it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.config.compose import compose
from controller.context import Context
from controller.gcp.errors import NotFoundError
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
            listed = ",".join(f'{{"rfilename": "{file}", "size": 1000000000}}' for file in files)
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


def context(*present: str) -> Context:
    """A context whose bucket has these assets."""
    return cast(Context, SimpleNamespace(google=EmptyBucket(*present)))


def build(*words: str) -> str:
    return f"{{build: [hf, download, {', '.join(words)}, --local-dir, '{{output}}']}}"
