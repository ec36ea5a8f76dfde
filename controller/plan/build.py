"""The plan of a run: the DAG of all resources that must exist before its program can start, built and previewed."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from conf.schema.cloud import HereCloud
from conf.schema.config import Config, digest
from controller.config.run_yaml import Placeholders, bucket_name, render, run_url
from controller.context import Context
from controller.core.errors import WorkersDisagreeError
from controller.core.text import object_url
from controller.gcp.google_errors import ForbiddenError, NoCredentialsError, ServiceDisabledError
from controller.inputs.code import CodeSnapshot, UnfetchedSnapshot, take_snapshot
from controller.inputs.env_inputs import Requirements, Vault
from controller.inputs.resolved_assets import ResolvedAsset, resolve_assets
from controller.plan.project_steps import bastion_resources, shared_resources, with_own_steps
from controller.plan.worker_steps import (
    WorkerInputs,
    fetched_on_pod,
    venv_requirements,
    with_bounds,
    worker_resources,
)
from controller.reconcile import Absent, Diff, NotEnabled, Pending, Resource, Unknown, topological_order
from controller.resources.bucket import Bucket
from controller.resources.machines import ThisMachine, WorkerResource
from controller.resources.pod.node import Node
from controller.resources.pod.planes import places_for, planes_for, planes_with_pod
from controller.resources.pod.provisioner import Place, SliceSpec
from controller.resources.services import Services
from controller.resources.uploads.archives import CodeArchive, Secrets, Wheels
from controller.resources.uploads.bucket_assets import AssetInBucket, UploadedAsset
from controller.resources.uploads.source_assets import SourcedAsset
from controller.ssh.fleet import WorkerError, WorkersFailedError

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
    trusted: bool = True
    """Whether this machine may execute what the plan names: its user composed it, or the record that it is from is one
    that this machine made or was told to trust."""
    own_code: bool = True
    """Whether the user's own steps are in it; else nothing of theirs was imported, and the config only names them."""

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
    config: Config,
    project: str,
    folder: Path,
    code: CodeSnapshot | None = None,
    recorded: RecordedInputs | None = None,
    *,
    own_code: bool = True,
) -> Plan:
    """Build the plan; does no I/O except reading the code and the assets.

    Raises ConfigError if code or data is missing.

    Args:
        config: validated config.
        project: resolved project id.
        folder: current folder of the user; `program=command` ships the repository around it.
        code: snapshot to ship, if the caller has one; an UnfetchedSnapshot gives a plan for display, without a run id.
        recorded: inputs of a recorded run, to plan that run again.
        own_code: import the user's own steps; without, the plan is one to look with and to end with.
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
    held = {path: with_bounds(config, asset, code) for path, asset in held.items()}
    early = tuple(_resources_before_pod(config, bucket, code, held, vault, requirements))
    if own_code:
        early = with_own_steps(config, (folder, code.root), early)
    # A billed TPU never waits for an upload or a permission: all shared resources come first.
    node = node_resource(config, tuple(r.id for r in early))
    archive = next(r for r in early if isinstance(r, CodeArchive))
    wheels = next((r for r in early if isinstance(r, Wheels)), None)
    prepared = WorkerInputs(config, node, archive, run_id, run_yaml, places, vault, requirements, wheels, held)
    if config.recovery.driver == "bastion":
        early = (*early, *bastion_resources(config, bucket, run_id, [r.id for r in early]))
    resources = (*early, node, *worker_resources(prepared))
    contents = tuple(held.values())
    return Plan(config, project, run_id, bucket, code, run_yaml, places, vault, contents, resources, own_code=own_code)


def _resources_before_pod(
    config: Config,
    bucket: str,
    code: CodeSnapshot,
    held: Mapping[str, ResolvedAsset],
    vault: Vault,
    requirements: Requirements,
) -> Iterator[Resource]:
    here = isinstance(config.cloud, HereCloud)
    if not here:
        yield from shared_resources(config, bucket)
    depends_on = () if here else (f"{Bucket.kind}/{bucket}",)
    if vault.names:
        secrets = Secrets(name="env", vault=vault, depends_on=() if here else (f"{Services.kind}/apis",))
        yield secrets
        depends_on = (*depends_on, secrets.id)
    archive = CodeArchive(name=code.sha256, bucket=bucket, snapshot=code, depends_on=depends_on)
    for asset in held.values():
        if not fetched_on_pod(config, asset):
            kind = SourcedAsset if asset.source else UploadedAsset
            yield kind(name=asset.name, bucket=bucket, content=asset, vault=vault, depends_on=depends_on)
    yield archive
    if requirements.git:
        python = config.env.python
        lines = requirements.git
        name = digest([[line.line for line in lines], python])[:16]
        yield Wheels(name=name, bucket=bucket, python=python, lines=lines, depends_on=depends_on)


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


@dataclass(frozen=True)
class ResourcePreview:
    """Preview of one resource: its observed state and the difference that `up` would apply (None: not observed)."""

    resource: Resource
    observed: Any
    diff: Diff | None

    @property
    def title(self) -> str:
        """What the resource is, and what is known of it because it exists."""
        return self.resource.title_of(self.observed) if self.action == "none" else self.resource.title

    @property
    def action(self) -> str:
        if self.diff is not None:
            return self.diff.action
        if isinstance(self.observed, NotEnabled):
            return "create"
        return "wait" if isinstance(self.observed, Pending) else "unknown"


def preview_resources(resources: tuple[Resource, ...], context: Context) -> list[ResourcePreview]:
    """Observe every resource, independent ones concurrently, and compute what would change."""
    observed: dict[str, Any] = {}
    rows: dict[str, ResourcePreview] = {}
    left = topological_order(resources)
    with ThreadPoolExecutor(max_workers=16) as pool:
        while left:
            ready = [r for r in left if set(r.depends_on) <= set(observed)]
            left = [r for r in left if r not in ready]
            for resource, current in zip(ready, pool.map(lambda r: _observe(r, context, observed), ready), strict=True):
                observed[resource.id] = current
                known = not isinstance(current, Pending | Unknown)
                rows[resource.id] = ResourcePreview(resource, current, resource.diff(current) if known else None)
    return [rows[r.id] for r in resources]


def _observe(resource: Resource, context: Context, observed: dict[str, Any]) -> Any:
    if isinstance(resource, WorkerResource):
        node = observed[resource.node]
        if isinstance(node, Absent):
            return Absent()
        if isinstance(node, Pending):
            return Unknown(f"the node is {node.why}")
        if isinstance(node, Unknown):
            return node
        if not node.is_ready:
            return Absent()  # the node will be replaced, and this resource with it
    try:
        return resource.observe(context, observed)
    except NoCredentialsError as error:
        return Unknown(str(error))
    except ServiceDisabledError as error:
        return NotEnabled(f"{error.service} is not enabled yet; `up` enables it", error.service)
    except ForbiddenError as error:
        return Unknown(error.message)  # the check of permissions says all that is missing
    except (WorkerError, WorkersFailedError, WorkersDisagreeError) as error:
        return Unknown(str(error))


def missing_assets(plan: Plan, context: Context) -> Iterator[ResolvedAsset]:
    """Yield the assets that are not in the bucket, as far as this user can see."""
    for resource in plan.resources:
        if isinstance(resource, AssetInBucket):
            try:
                seen = resource.observe(context, {})
            except (NoCredentialsError, ForbiddenError, ServiceDisabledError):
                seen = Absent()
            if isinstance(seen, Absent):
                yield resource.content
