"""Build the plan of a run: the DAG of all resources that must exist before its program can start."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from conf.schema.config import Config, digest
from conf.schema.infra.cloud import HereCloud
from controller.config.run_yaml import Placeholders, render, run_url
from controller.context import Context
from controller.core.text import object_url
from controller.inputs.assets import ResolvedAsset, resolve_assets
from controller.inputs.code import CodeSnapshot, UnfetchedSnapshot, take_snapshot
from controller.inputs.requirements import Requirements
from controller.inputs.secrets import Vault
from controller.plan.fetching import fetched_nearby, fetched_on_pod, with_bounds
from controller.plan.own_steps import with_own_steps
from controller.plan.project import bastion_resources, bucket_name, shared_resources
from controller.plan.workers import WorkerInputs, venv_requirements, worker_resources
from controller.reconcile.resource import Absent, Pending, Resource
from controller.resources.bucket import Bucket
from controller.resources.pod.node import Node
from controller.resources.pod.planes import places_for, planes_for, planes_with_pod
from controller.resources.pod.provisioner import Place, SliceSpec
from controller.resources.pod.this_machine import ThisMachine
from controller.resources.services import Services
from controller.resources.uploads.archives import CodeArchive, Secrets, Wheels
from controller.resources.uploads.assets import UploadedAsset
from controller.resources.uploads.errands import NearbyBuild, NearbyFiles, NearbySource, VmVenv
from controller.resources.uploads.nearby import NearbyAsset, fetch_vm
from controller.resources.uploads.sources import SourcedAsset

R = TypeVar("R", bound=Resource)
UNKNOWN_HASH = "????????"


@dataclass(frozen=True)
class RecordedInputs:
    """Inputs taken from the record of a run instead of being resolved again, so that the run stays the same.

    Attributes:
        assets: resolved assets by key (`datasets.NAME` and so on); their copies are in the bucket.
        lock: text of the lock that env.packages=lock installs.
    """

    run_id: str
    run_yaml: str
    assets: Mapping[str, ResolvedAsset]
    lock: str


@dataclass(frozen=True)
class Plan:
    """Plan of a run: every resource that must exist, their names, and the run.yaml that the program reads."""

    config: Config
    project: str
    run_id: str
    bucket: str
    snapshot: CodeSnapshot
    run_yaml: str
    placeholders: Placeholders
    vault: Vault
    assets: tuple[ResolvedAsset, ...]
    resources: tuple[Resource, ...]

    def get(self, kind: type[R]) -> R:
        """Return the plan's only resource of a kind. Raises LookupError if the plan has none."""
        for resource in self.resources:
            if isinstance(resource, kind):
                return resource
        raise LookupError(f"the plan has no {kind.__name__}")

    @property
    def node(self) -> Node:
        return self.get(Node)

    def observe_pod(self, context: Context) -> Absent | Pending | Node:
        return self.node.observe(context, {})

    @property
    def argv(self) -> list[str]:
        """Return the program's argument list, equal on every worker; run.yaml is in $SLIPWAY_RUN_DIR, one folder up."""
        if self.config.program.kind == "trainer":
            return ["python", "-m", "trainer", "../run.yaml"]
        return list(self.placeholders.fill_all(self.config.program.command, "program.command"))

    @property
    def notice(self) -> str | None:
        """Return the signal that warns the program before its VM is taken away."""
        return "SIGTERM" if self.config.program.kind == "trainer" else self.config.recovery.preemption_signal

    @property
    def before_pod(self) -> tuple[Resource, ...]:
        """Resources that exist before the pod does, whatever their scope: each has all that it depends on in here."""
        return self.resources[: self.resources.index(self.node)]


def build_plan(
    config: Config, project: str, folder: Path, code: CodeSnapshot | None = None, recorded: RecordedInputs | None = None
) -> Plan:
    """Build the plan; does no I/O except reading the code and the assets.

    Args:
        config: validated config.
        project: resolved project id.
        folder: current folder of the user; `program=command` ships the repository around it.
        code: snapshot to ship, if the caller has one; an UnfetchedSnapshot gives a plan for display, without a run id.
        recorded: inputs of a recorded run, to plan that run again.

    Raises:
        ConfigError: code or data is missing.
    """
    code = code or take_snapshot(config, folder)
    bucket = bucket_name(config, project)
    held = resolve_assets(config, code.root) if recorded is None else recorded.assets
    run_id = config.run_id(code.sha256, {c.name if c.kind == "dataset" else c.path: c.identity for c in held.values()})
    if recorded is not None:
        run_id = recorded.run_id
    if isinstance(code, UnfetchedSnapshot):
        run_id = f"{config.run.name}-{UNKNOWN_HASH}"
    urls = {path: object_url(bucket, c.prefix) for path, c in held.items()}
    places = Placeholders(bucket, run_id, run_url(config, bucket, run_id), urls)
    prefixes = {c.name: c.prefix for c in held.values()}
    run_yaml = recorded.run_yaml if recorded is not None else render(config, run_id, bucket, prefixes)
    vault = Vault(config.env.secrets)
    requirements = venv_requirements(config, code)
    if recorded is not None and requirements.text and config.env.packages == "lock":
        requirements = Requirements(recorded.lock)
    held = {path: with_bounds(config, asset, code, requirements) for path, asset in held.items()}
    early = tuple(_resources_before_pod(config, bucket, code, held, vault, requirements))
    early = with_own_steps(config, (folder, code.root), early)
    # A billed TPU never waits for an upload or a permission: all shared resources come first.
    node = node_resource(config, tuple(r.id for r in early))
    archive = next(r for r in early if isinstance(r, CodeArchive))
    wheels = next((r for r in early if isinstance(r, Wheels)), None)
    prepared = WorkerInputs(config, node, archive, run_id, run_yaml, places, vault, requirements, wheels, held)
    if config.recovery.driver == "bastion":
        early = (*early, *bastion_resources(config, bucket, run_id, [r.id for r in early]))
    resources = (*early, node, *worker_resources(prepared))
    return Plan(config, project, run_id, bucket, code, run_yaml, places, vault, tuple(held.values()), resources)


def _resources_before_pod(
    config: Config,
    bucket: str,
    code: CodeSnapshot,
    held: Mapping[str, ResolvedAsset],
    vault: Vault,
    requirements: Requirements,
) -> Iterator[Resource]:
    here = isinstance(config.cloud, HereCloud)
    shared = [] if here else list(shared_resources(config, bucket))
    yield from shared
    depends_on = () if here else (f"{Bucket.kind}/{bucket}",)
    if vault.names:
        secrets = Secrets(name="env", vault=vault, depends_on=() if here else (f"{Services.kind}/apis",))
        yield secrets
        depends_on = (*depends_on, secrets.id)
    archive = CodeArchive(name=code.sha256, bucket=bucket, snapshot=code, depends_on=depends_on)
    needs = tuple(dict.fromkeys((*depends_on, *(r.id for r in shared))))
    for asset in held.values():
        where: dict[str, Any] = {"name": asset.name, "bucket": bucket, "content": asset, "vault": vault}
        if fetched_nearby(config, asset):
            yield _nearby_asset(config, asset, where, needs, archive, requirements)
        elif not fetched_on_pod(config, asset):
            yield (SourcedAsset if asset.source else UploadedAsset)(**where, depends_on=depends_on)
    yield archive
    if requirements.git:
        python, lines = config.env.python, requirements.git
        name = digest([[line.line for line in lines], python])[:16]
        yield Wheels(name=name, bucket=bucket, python=python, lines=lines, depends_on=depends_on)


def _nearby_asset(
    config: Config,
    asset: ResolvedAsset,
    where: Mapping[str, Any],
    needs: tuple[str, ...],
    archive: CodeArchive,
    requirements: Requirements,
) -> NearbyAsset:
    wanted = config.assets.fetch_on_of(asset.kind, asset.name)
    on_vm: dict[str, Any] = {
        **where, "machine": fetch_vm(config, archive.bucket, asset), "always": wanted == "vm", "depends_on": needs
    }  # fmt: skip
    if asset.recipe is None:
        return (NearbySource if asset.source else NearbyFiles)(**on_vm)
    on_vm["depends_on"] = (*needs, archive.id)
    return NearbyBuild(**on_vm, code=archive, venv=VmVenv.of(config, requirements.text))


def node_resource(config: Config, depends_on: tuple[str, ...]) -> Node:
    """Return the pod of a config; `depends_on` are the ids of the resources that must exist first."""
    tpu = config.tpu
    if isinstance(config.cloud, HereCloud):
        return ThisMachine(
            name=config.pod_name,
            spec=SliceSpec.of(config, ""),
            places=(Place("here", "on_demand", ""),),
            max_create_attempts=0,
            create_seconds=0.0,
            adopt=True,
            depends_on=depends_on,
        )
    places = places_for(config)
    planes = planes_with_pod(config) or planes_for(config)
    specs = {way: plane.spec(config) for plane in planes for way in plane.provisioners(0.0)}
    return Node(
        name=config.pod_name,
        spec=specs[places[0].provisioner],
        specs=specs,
        places=places,
        max_create_attempts=config.recovery.max_create_attempts,
        create_seconds=60 * tpu.create_timeout_minutes,
        adopt=tpu.adopt,
        depends_on=depends_on,
    )
