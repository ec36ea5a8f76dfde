"""From a config to the resources that must exist before its program can start: one DAG."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from conf.schema import Config
from controller.plan.pod import node_resource
from controller.plan.shared import bucket_name, shared_resources
from controller.plan.workers import requirements_of, worker_resources
from controller.resource import Resource
from controller.resources.code import CodeArchive
from controller.resources.dataset import DatasetCopy, manifest, prefix
from controller.resources.node import Node
from controller.resources.wheels import Wheels
from controller.runfile import render
from controller.snapshot import Snapshot, snapshot


@dataclass(frozen=True)
class Plan:
    """Everything decided: what must exist, under which names, and what the program will read."""

    config: Config
    project: str
    run_id: str
    bucket: str
    snapshot: Snapshot
    run_yaml: str
    resources: tuple[Resource, ...]

    @property
    def node(self) -> Node:
        return next(r for r in self.resources if isinstance(r, Node))

    @property
    def argv(self) -> list[str]:
        """The program's argument list, the same on every worker; run.yaml is in $SLIPWAY_RUN_DIR, one folder up."""
        if self.config.program.kind == "trainer":
            return ["python", "-m", "trainer", "../run.yaml"]
        return list(self.config.program.command)

    def of_scope(self, *scopes: str) -> list[Resource]:
        return [r for r in self.resources if r.scope in scopes]


def build(config: Config, project: str, folder: Path) -> Plan:
    """Pure but for reading the code and the datasets.

    Args:
        project: the resolved project id.
        folder: where the user stands; `program=command` ships the repository around it.

    Raises:
        ConfigError: code or data that is not there.
    """
    code = snapshot(config, folder)
    bucket = bucket_name(config, project)
    cache = Path(config.run.state_dir).expanduser() / "downloads"
    manifests = {name: manifest(name, data, cache) for name, data in config.assets.datasets.items()}
    run_id = config.run_id(code.sha256, {name: m.sha256 for name, m in manifests.items()})
    datasets = tuple(
        DatasetCopy(name=name, bucket=bucket, manifest=m, needs=(f"bucket/{bucket}",)) for name, m in manifests.items()
    )
    run_yaml = render(config, run_id, bucket, {name: prefix(name, m) for name, m in manifests.items()})
    shared = tuple(shared_resources(config, bucket))
    archive = CodeArchive(name=code.sha256, bucket=bucket, snapshot=code, needs=(f"bucket/{bucket}",))
    # A billed TPU never waits for an upload or a permission: everything shared comes before it.
    requirements = requirements_of(config, code)
    needs = (f"bucket/{bucket}",)
    wheels = Wheels.of(requirements.git, config.env.python, bucket, needs) if requirements.git else None
    early = (*shared, *datasets, archive, *((wheels,) if wheels else ()))
    node = node_resource(config, tuple(r.id for r in early))
    workers = tuple(worker_resources(config, node, archive, run_id, run_yaml, requirements, wheels))
    return Plan(config, project, run_id, bucket, code, run_yaml, (*early, node, *workers))
