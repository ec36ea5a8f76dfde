"""Plans that download, and a project whose bucket has some assets."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from controller.context import Context
from controller.core.this_process import Clock
from controller.inputs.code import UnfetchedSnapshot
from controller.plan.build import Plan, build_plan
from tests.composed import config_of
from tests.fakes.google import UPDATED, MemoryStorage


class AssetBucket(MemoryStorage):
    """A project whose own bucket has nothing but these assets, without files."""

    def __init__(self, *present: str, refused: tuple[str, ...] = (), **others: dict[str, bytes]) -> None:
        super().__init__(*refused, **others)
        self.assets = tuple(f"assets/{name}-" for name in present)

    def call(self, api: str, method: str, **parameters: Any) -> dict[str, Any]:
        if parameters["bucket"] != "acme-slipway-us-central1":
            return super().call(api, method, **parameters)
        if method == "objects.list":
            return {"items": [{"name": f"{parameters['prefix']}manifest.json", "timeCreated": UPDATED}]}
        return {"manifest": self.download(parameters["bucket"], parameters["object"])}

    def download(self, bucket: str, name: str) -> bytes:
        return b"{}" if self.assets and name.startswith(self.assets) else super().download(bucket, name)


def plan_of(tmp_path: Path, asset: str, *overrides: str) -> Plan:
    words = ["cloud.project=acme", "program=command", "program.command=[a]", f"run.state_dir={tmp_path}"]
    made = config_of(*words, f"+assets.models.weights={asset}", *overrides)
    return build_plan(made, "acme", tmp_path, UnfetchedSnapshot(tmp_path, (), "0" * 40))


def context(*present: str) -> Context:
    """A context whose bucket has these assets."""
    return cast(Context, SimpleNamespace(google=AssetBucket(*present), clock=Clock()))


def build(*words: str) -> str:
    return f"{{build: [hf, download, {', '.join(words)}, --local-dir, '{{output}}']}}"
