"""Steps on the workers that must be done before the program starts; and who fetches or builds an asset.

How long that takes and what it costs is told as far as it is known before. A build can run on the pod if it needs
nothing of this machine but the shipped code.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import conf
from conf.schema.assets import HUB
from conf.schema.cloud import HereCloud
from conf.schema.config import Config, digest
from controller.agent.protocol import ObserveRequest
from controller.config.run_yaml import Placeholders
from controller.config.run_yaml import backend as expected_backend
from controller.core.errors import ConfigError
from controller.gcp.prices import hourly_price, load_prices
from controller.inputs.code import CodeSnapshot, NamedCode, UnfetchedSnapshot
from controller.inputs.env_inputs import Requirements, Vault, read_requirements
from controller.inputs.resolved_assets import BuildRecipe, ResolvedAsset, files_below, path_exists
from controller.reconcile import Resource
from controller.resources.devices import FREE, DeviceProbe, FreeChips
from controller.resources.machines import TIDY_STATE, SshAccess, Watchdog, WorkerHygiene
from controller.resources.pod.node import Node
from controller.resources.software import RunConfig, Setup, Venv, WorkerCode, fingerprint
from controller.resources.uploads.archives import CodeArchive, Wheels
from controller.resources.uploads.bucket_assets import OWN, PodBuiltAsset, PodFetchedAsset
from controller.resources.uploads.source_assets import PodFetchedSource

OUTSIDE = re.compile(r"(?:^|[\s\"'=])(~[^\s\"':;]*|\.\./[^\s\"':;]*|/(?!dev/|usr/|bin/|tmp/|proc/)[^\s\"':;]+)")
"""A path of this machine in a word, which may be a script for a shell."""
MODULES = "trainer."


def with_bounds(config: Config, asset: ResolvedAsset, code: CodeSnapshot) -> ResolvedAsset:
    """Return the asset with what binds its build to this machine."""
    if asset.recipe is None:
        return asset
    bound = next(_bounds(config, asset.recipe, code), "")
    return replace(asset, recipe=replace(asset.recipe, bound=bound))


def _bounds(config: Config, recipe: BuildRecipe, code: CodeSnapshot) -> Iterator[str]:
    """Yield why a build can run on this machine only."""
    if recipe.argv[0] == OWN:
        if not recipe.argv[1:2] or not recipe.argv[1].startswith(MODULES):
            yield f"`{' '.join(recipe.argv[:2])}` is a verb of this machine"
        elif config.program.kind != "trainer":
            yield f"{recipe.argv[1]} is not in the code that program=command ships"
    for word in (*recipe.argv, *recipe.inputs):
        if found := OUTSIDE.search(word):
            yield f"it names {found[1]}, a path of this machine"
    if isinstance(code, UnfetchedSnapshot):
        return
    named = [
        word for word in dict.fromkeys((*recipe.argv[1:], *recipe.inputs)) if word and not Path(word).is_absolute()
    ]
    for word in named:
        path = recipe.root / word
        if path_exists(path) and path.resolve() != recipe.root.resolve():
            shipped = {file.resolve() for file in code.paths.values()}
            left = next((file for file in files_below(path) if file.resolve() not in shipped), None)
            if left is not None:
                yield f"it reads {left.relative_to(recipe.root)}, which is not among the shipped files"


LAPTOP_BYTES_PER_SECOND = 12.5e6
"""Of an office's 100 Mbit/s, down and up at once; assumed."""
POD_BYTES_PER_SECOND = 50e6
"""From the Hub to the bucket; assumed, not measured."""
GB = 1e9


def fetched_on_pod(config: Config, asset: ResolvedAsset) -> bool:
    """Return whether the pod fetches or builds the asset; local files are sent from this machine."""
    if config.assets.fetch_on_of(asset.kind, asset.name) != "pod":
        return False
    if asset.recipe is not None:
        return not asset.recipe.bound
    return (asset.source or "").startswith(HUB) or any(file.url for file in asset.files)


def describe_fetch(config: Config, asset: ResolvedAsset, size: int, now: float) -> str:
    """Return who fetches an asset, about how many minutes that takes, and for how many dollars; `now` as for prices.

    From 1 GB on, the pod is named beside this machine, where it may fetch.
    """
    if fetched_on_pod(config, asset):
        return _fetch_by_pod(config, size, now)
    here = f"through this machine, about {_minutes(size / LAPTOP_BYTES_PER_SECOND)} at 100 Mbit/s"
    if size < GB or config.cloud.kind == "here" or config.recovery.driver == "bastion":
        return here
    return f"{here}; with assets.{asset.path}.fetch_on=pod {_fetch_by_pod(config, size, now)}"


def _fetch_by_pod(config: Config, size: int, now: float) -> str:
    seconds, per_hour = size / POD_BYTES_PER_SECOND, hourly_price(config, now).total
    words = f"by worker 0 of the pod, about {_minutes(seconds)}"
    if config.cloud.kind == "local" or per_hour is None:
        return words
    nat = config.network.nat and not config.external_ip
    traffic = size / GB * load_prices()["nat"]["usd_per_gb"] if nat else 0.0
    share = f", of which ${traffic:.2f} for NAT" if traffic >= 0.005 else ""
    return f"{words} and ${seconds / 3600 * per_hour + traffic:.2f}{share}"


def describe_build(config: Config, asset: ResolvedAsset, now: float) -> str:
    """Return who builds an asset, and for how many dollars per hour."""
    if not fetched_on_pod(config, asset):
        return "built on this machine"
    per_hour = hourly_price(config, now).total
    price = "" if config.cloud.kind == "local" or per_hour is None else f", ${per_hour:.2f} per hour until it is done"
    return f"built on worker 0 of the pod{price}"


def _minutes(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))} min"


LOCK_FILE = Path(conf.__file__).with_name("requirements.txt")
WANDB_LOCK_FILE = Path(conf.__file__).with_name("wandb.txt")
EVALS_LOCK_FILE = Path(conf.__file__).with_name("evals.txt")
PIN = re.compile(r"^(?P<name>[\w.-]+)(\[.*?\])?==.*?(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
"""One package of a lock file, with its hashes."""


def venv_requirements(config: Config, code: CodeSnapshot) -> Requirements:
    """Return the packages that the venv must contain. Raises ConfigError if the requirements file is unusable."""
    config = with_own_python(config)
    if config.env.packages == "lock":
        return Requirements(_lock(config))
    if config.env.packages != "requirements" or config.env.requirements is None:
        return Requirements("")
    if isinstance(code, UnfetchedSnapshot | NamedCode):
        return Requirements("")
    name = Path(config.env.requirements).as_posix()
    links = dict(code.links)
    if name not in code.files and not any(str(place) in links for place in (Path(name), *Path(name).parents)):
        raise ConfigError(f"env.requirements: {name} is not among the files shipped from {code.root}")
    return read_requirements(code.root, name)


def with_own_python(config: Config) -> Config:
    """Return the config with the packages that the program gets, with `cloud.python=current` those of Slipway itself.

    Setup commands may install packages, so they get a venv on top of it.
    """
    cloud = config.cloud
    if not isinstance(cloud, HereCloud) or cloud.python != "current":
        return config
    packages = "image" if config.program.setup else "none"
    return config.model_copy(update={"env": config.env.model_copy(update={"packages": packages})})


def _lock(config: Config) -> str:
    """Return the pinned packages, plus those that the tracker wandb and the evaluation lm_eval need."""
    text = LOCK_FILE.read_text()
    more = [WANDB_LOCK_FILE] if "wandb" in config.logging.all_trackers else []
    evaluations = getattr(config.loop, "evaluations", {}).values()
    for file in [*more, EVALS_LOCK_FILE] if any(wanted.run == "lm_eval" for wanted in evaluations) else more:
        there = {match["name"] for match in PIN.finditer(text)}
        text += "".join(match[0] for match in PIN.finditer(file.read_text()) if match["name"] not in there)
    return text


@dataclass(frozen=True)
class WorkerInputs:
    config: Config
    node: Node
    code: CodeArchive
    run_id: str
    run_yaml: str
    placeholders: Placeholders
    vault: Vault
    requirements: Requirements
    wheels: Wheels | None
    assets: Mapping[str, ResolvedAsset]


def _pod_fetched_assets(run: WorkerInputs, tidied: str, venv: Venv, code: WorkerCode) -> Iterator[PodFetchedAsset]:
    where: dict[str, Any] = {"node": run.node.id, "bucket": run.code.bucket, "vault": run.vault}
    for asset in run.assets.values():
        if not fetched_on_pod(run.config, asset):
            continue
        place = {"name": asset.name, "content": asset, **where}
        if asset.recipe is not None:
            yield PodBuiltAsset(**place, code=code.name, venv=venv.name, depends_on=(tidied, venv.id, code.id))
        else:
            yield (PodFetchedSource if asset.source else PodFetchedAsset)(**place, depends_on=(tidied,))


def worker_resources(run: WorkerInputs) -> Iterator[Resource]:
    """Yield the resources of the workers in the order of creation."""
    config, node, code = with_own_python(run.config), run.node, run.code
    here = isinstance(config.cloud, HereCloud)
    needs_chips = config.program.needs_chips and not here
    workers = node.spec.workers
    setup = config.program.setup
    tidied = WorkerHygiene(
        name=node.name,
        node=node.id,
        min_free_gb=config.env.min_free_gb,
        here=here,
        state=(TIDY_STATE,) * workers,
        depends_on=(f"{SshAccess.kind}/{node.name}",),
    )
    venv = _venv(run, tidied.id)
    asks: ObserveRequest = {"venv": venv.name, "code": code.name, "run_id": run.run_id}
    if needs_chips:
        asks["chips"] = True
    ssh = SshAccess(
        name=node.name, node=node.id, probe_payload=asks, reachable=("yes",) * workers,
        here=here, depends_on=(node.id,),
    )  # fmt: skip
    yield ssh
    # Without any limit, its heartbeat keeps the pod's dead man's switch from acting.
    if not config.tpu.adopt and not here:
        minutes = config.cleanup.idle_minutes
        idle = None if minutes is None else 60 * minutes
        yield Watchdog(name=node.name, node=node.id, bucket=code.bucket, idle_seconds=idle, depends_on=(ssh.id,))
    yield tidied
    ready: list[str] = []
    if needs_chips:
        chips = FreeChips(
            name=node.name,
            node=node.id,
            expected=config.topology.chips // workers,
            state=(FREE,) * workers,
            depends_on=(tidied.id,),
        )
        yield chips
        ready.append(chips.id)
    yield venv
    tree = (code.name,) * workers
    shipped = WorkerCode(name=code.name, node=node.id, archive=code, tree=tree, depends_on=(tidied.id, code.id))
    yield shipped
    placed = RunConfig(
        name=run.run_id,
        node=node.id,
        text=run.run_yaml,
        variables=tuple(sorted(run.placeholders.environment(config.env.vars).items())),
        sha256=(hashlib.sha256(run.run_yaml.encode()).hexdigest(),) * workers,
        depends_on=(ssh.id,),
    )
    yield placed
    ready += [venv.id, shipped.id, placed.id]
    for asset in _pod_fetched_assets(run, tidied.id, venv, shipped):
        yield asset
        ready.append(asset.id)
    if setup:
        commands = tuple(run.placeholders.fill_all(argv, "program.setup") for argv in setup)
        prepared = Setup(
            name=run.run_id,
            node=node.id,
            commands=commands,
            code=code.name,
            venv=venv.name,
            vault=run.vault,
            done=(digest([commands, code.name, venv.name]),) * workers,
            depends_on=tuple(ready),
        )
        yield prepared
        ready = [prepared.id]
    yield _device_probe(config, node, venv, ready)


def _venv(run: WorkerInputs, tidied: str) -> Venv:
    env, requirements = with_own_python(run.config).env, run.requirements.text
    wheels = run.wheels.id if run.wheels else None
    return Venv(
        name=fingerprint(env.packages, env.python, requirements, run.config.program, wheels),
        node=run.node.id,
        packages=env.packages,
        python=env.python,
        requirements=requirements,
        bucket=run.code.bucket,
        vault=run.vault,
        wheels=wheels,
        intact=(True,) * run.node.spec.workers,
        depends_on=(tidied, *((wheels,) if wheels else ())),
    )


def _device_probe(config: Config, node: Node, venv: Venv, depends_on: Sequence[str]) -> DeviceProbe:
    workers, needs_chips = node.spec.workers, config.program.needs_chips
    backend = expected_backend(config)
    return DeviceProbe(
        name=node.name,
        node=node.id,
        venv=venv.name,
        backend=backend,
        devices=(config.topology.devices_per_worker,) * workers,
        reach_worker_0=(True,) * workers,
        healthy=(True,) * workers,
        libtpu=(True,) * workers,
        probe_devices=config.program.kind == "trainer",
        health_check=config.cloud.health_check and needs_chips,
        needs_libtpu=backend == "tpu" and needs_chips and "TPU_LIBRARY_PATH" not in config.env.vars,
        devices_per_chip=config.topology.devices // config.topology.chips,
        depends_on=tuple(depends_on),
    )
