"""Compute Engine and a bucket in memory and in a folder: the VM does its work when its serial port is read."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from controller.agent.commands.asset import build_asset, failure, fetch_asset
from controller.agent.fs import AgentError, dump
from controller.context import Context
from controller.core.this_process import Clock
from controller.gcp.folder_store import FolderClient
from controller.gcp.google_errors import ConflictError, ForbiddenError, GoogleError, NotFoundError
from controller.inputs.env_inputs import Vault
from controller.inputs.resolved_assets import AssetFile, ResolvedAsset
from controller.reconcile import Absent
from controller.resources.accounts import ServiceAccount
from controller.resources.uploads.errands import NearbyFiles, NearbySource
from controller.resources.uploads.nearby import (
    ASSET_LABEL,
    HASH_LABEL,
    MIN_BUILD_SECONDS,
    MIN_SECONDS,
    FetchVm,
    NearbyAsset,
)
from tests.fakes.clock import ManualClock
from tests.fakes.context import make_context
from tests.fakes.google import KilledError
from tests.hub import hub

__all__ = ["hub"]


@dataclass
class Project(FolderClient):
    """What the controller asks of Google.

    Attributes:
        kill_at: number of the changing request at which the process dies, `before` it or after; 0: never.
        refuse: raised instead of creating a VM.
        hidden: whether the caller may not read VMs.
        work: what a VM does at each look at its serial port; returns whether it has ended itself.
    """

    folder: Path
    kill_at: int = 0
    before: bool = False
    refuse: GoogleError | None = None
    hidden: bool = False
    work: Callable[["Project"], bool] = field(default=lambda project: project.let_fetch())
    machines: dict[str, dict[str, Any]] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    serial: str = ""
    orders: str = ""
    """What a VM has read last."""

    def __post_init__(self) -> None:
        super().__init__(Clock())

    @property
    def bucket(self) -> str:
        return str(self.folder / "bucket")

    def call(self, api: str, method: str, **parameters: Any) -> dict[str, Any]:
        if method.endswith((".insert", ".delete", ".wait")):
            return self._changing(f"{api} {method}", lambda: self._answer(api, method, parameters))
        self._require_life()
        return self._answer(api, method, parameters)

    def upload(self, bucket: str, name: str, content: bytes, **more: Any) -> dict[str, Any]:
        return self._changing(f"upload {name}", lambda: FolderClient.upload(self, bucket, name, content, **more))

    def upload_file(
        self, bucket: str, name: str, path: Path, session: Path, moved: Callable[[int], None]
    ) -> dict[str, Any]:
        act = partial(FolderClient.upload_file, self, bucket, name, path, session, moved)
        return self._changing(f"upload {name}", act)

    def let_fetch(self) -> bool:
        """Do what the agent does with the VM's orders, which may have gone."""
        [vm] = self.machines.values()
        [text] = [item["value"] for item in vm["metadata"]["items"] if item["key"] == "slipway"]
        request = json.loads(text)["request"]
        self.orders = self.download(request["bucket"], request["orders"]).decode()
        orders = {key: value for key, value in json.loads(self.orders).items() if key != "format"}
        try:
            (build_asset if "argv" in orders else fetch_asset)(**orders)
        except AgentError as error:
            self.say(**failure(error))
        return False

    def say(self, **line: Any) -> None:
        self.serial += f"Nov 1 startup-script: {dump(line).decode()}\n"

    def _require_life(self) -> None:
        if self.kill_at and len(self.changes) >= self.kill_at:
            raise KilledError

    def _changing(self, what: str, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self._require_life()
        self.changes.append(what)
        if self.before:
            self._require_life()
        answer = act()
        self._require_life()
        return answer

    def _answer(self, api: str, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        if api == "storage":
            return super().call(api, method, **parameters)
        assert api == "compute", method
        name = parameters.get("instance", "")
        if method == "instances.insert":
            return self._insert(parameters["body"])
        if method == "zoneOperations.wait":
            return {"status": "DONE"}
        if self.hidden:
            raise ForbiddenError(method, 403, "forbidden", f"Required 'compute.{method}' permission")
        if name not in self.machines:
            raise NotFoundError(method, 404, "notFound", name)
        if method == "instances.get":
            return self.machines[name]
        if method == "instances.delete":
            del self.machines[name]
            return {"name": "operation", "zone": parameters["zone"]}
        assert method == "instances.getSerialPortOutput"
        if self.work(self):
            del self.machines[name]
        return {"contents": self.serial}

    def _insert(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.refuse is not None:
            raise self.refuse
        if body["name"] in self.machines:
            raise ConflictError("insert", 409, "alreadyExists", body["name"])
        self.machines[body["name"]] = {**body, "status": "RUNNING"}
        self.bodies.append(body)
        return {"name": "operation", "zone": "us-central1-a"}


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("SLIPWAY_AGENT_ROOT", str(tmp_path / "vm"))
    return Project(tmp_path / "google")


def context_of(project: Project, clock: Clock | None = None) -> tuple[Context, list[str]]:
    """Return a context of this machine, and the notes that it gets."""
    notes = list[str]()
    clock = clock or ManualClock(time.time())
    return make_context(project, project.folder / "home", clock=clock, notes=notes, poll_seconds=1.0), notes


def nearby(project: Project, source: str, always: bool = True) -> NearbySource:
    """Return an asset as the plan has it."""
    content = ResolvedAsset("model", "w", "0123456789abcdef", source=source)
    return NearbySource(**placed(project, content), vault=Vault({}), always=always)


def placed(project: Project, content: ResolvedAsset) -> dict[str, Any]:
    """The fields of an asset that a VM fetches."""
    machine = FetchVm(
        name="slipway-fetch-0", zone="us-central1-a", machine_type="e2-standard-2", network="n", subnetwork="s",
        external_ip=False, account=ServiceAccount(name="runner"), bucket=project.bucket,
        orders_object=f"{content.prefix}/fetch.json",
        labels={ASSET_LABEL: "w", HASH_LABEL: content.prefix.rpartition("-")[2]},
        max_seconds=MIN_SECONDS if content.recipe is None else MIN_BUILD_SECONDS,
    )  # fmt: skip
    return {"name": "w", "bucket": project.bucket, "content": content, "machine": machine}


def web_files(
    project: Project,
    endpoint: str,
    sha256: str,
    repository: str = "open",
    token: str | None = None,
    always: bool = True,
) -> NearbyFiles:
    """Return an asset of one file of the web, which may need a token."""
    url, name = f"{endpoint}/acme/{repository}/resolve/main/model.safetensors", "MINE" if token else None
    file = AssetFile("w.bin", project.folder / "home/downloads" / sha256, sha256, url, name)
    vault = Vault({"MINE": "env:MINE"} if token else {}, {"MINE": token or ""})
    vault.load(project)
    content = ResolvedAsset("model", "w", "0123456789abcdef", files=(file,))
    return NearbyFiles(**placed(project, content), vault=vault, always=always)


def run(project: Project, asset: NearbyAsset, clock: Clock | None = None) -> list[str]:
    """Apply the asset as `up` does, unless it is there; return the notes."""
    context, notes = context_of(project, clock)
    if isinstance(current := asset.observe(context, {}), Absent):
        asset.apply(context, {}, asset.diff(current))
    assert not isinstance(asset.observe(context, {}), Absent)
    return notes
