"""Plans that download, and a project whose bucket has some assets."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from conf.schema.config import Config
from controller.config.compose import compose
from controller.context import Context
from controller.core.clock import Clock
from controller.gcp.errors import NotFoundError
from controller.inputs.code import UnfetchedSnapshot
from controller.plan.build import Plan, build_plan


def config(*overrides: str) -> Config:
    found, problems = compose(overrides)
    assert found is not None, problems
    assert not problems
    return found


class EmptyBucket:
    """A bucket with nothing but assets without files."""

    def __init__(self, *present: str) -> None:
        self.present = present

    def call(self, api: str, method: str, **parameters: Any) -> dict[str, Any]:
        if any(parameters["object"].startswith(f"assets/{name}-") for name in self.present):
            return {}
        raise NotFoundError("get", 404, "notFound", "no such object")

    def download(self, bucket: str, name: str) -> bytes:
        self.call("storage", "objects.get", bucket=bucket, object=name)
        return b"{}"

    def list_all(self, api: str, method: str, items: str, **parameters: Any) -> list[dict[str, Any]]:
        return [{"name": f"{parameters['prefix']}manifest.json", "timeCreated": "2026-01-01T00:00:00Z"}]


def plan_of(tmp_path: Path, asset: str, *overrides: str) -> Plan:
    words = ["cloud.project=acme", "program=command", "program.command=[a]", f"run.state_dir={tmp_path}"]
    made = config(*words, f"+assets.models.weights={asset}", *overrides)
    return build_plan(made, "acme", tmp_path, UnfetchedSnapshot(tmp_path, (), "0" * 40))


def context(*present: str) -> Context:
    """A context whose bucket has these assets."""
    return cast(Context, SimpleNamespace(google=EmptyBucket(*present), clock=Clock()))


def build(*words: str) -> str:
    return f"{{build: [hf, download, {', '.join(words)}, --local-dir, '{{output}}']}}"
