"""Program and project: the program is complete, can be shipped and fits the slice; the project has what it needs.

You have permission to use the project, and it has billing and quota.
"""

import math
import os
import platform
import shlex
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from conf.schema.config import Config
from conf.schema.topology import Topology, find_topology, tpu_type_table
from controller.agent.commands.run_inputs import MAX_BYTES
from controller.checks.training import mesh_axes, meshes, trainer_devices
from controller.context import Context
from controller.core.errors import ConfigError
from controller.core.finding import Issue, UncheckedError, check
from controller.core.text import plural
from controller.gcp.google_errors import ForbiddenError, NotFoundError, ServiceDisabledError
from controller.inputs import program_words
from controller.inputs.code import CodeSnapshot
from controller.inputs.code_files import first_few
from controller.inputs.git import repository_root
from controller.inputs.modules import lacking_imports
from controller.inputs.own_program import HERE_CLOUDS, may_be_newer, other_python, python_text, quote_words
from controller.inputs.resolved_assets import path_exists
from controller.inputs.setup_words import named_file_problem
from controller.plan.build import Plan
from controller.plan.project_steps import bastion_name
from controller.plan.samplers import describe_samplers, num_sampler_pods, sampler_config
from controller.resources.pod.plane import is_of_run
from controller.resources.pod.planes import PLANES, ask_planes, planes_for
from controller.resources.pod.provisioner import disk_type


@check("stand_in", "error", "code.stand_in")
def stand_in_runs_locally(config: Config) -> Iterator[Issue]:
    """A stand-in only imitates the program: on a real pod it would be billed for nothing."""
    if config.code.stand_in and config.cloud.kind != "local":
        cure = "(`slipway rehearse`, cloud=local); use scale=full for the real program"
        yield Issue(f"stand-ins need the emulated cloud {cure}")


@check("complete", "error", "model", "data", "loop", "optimizer")
def trainer_is_complete(config: Config) -> Iterator[Issue]:
    """The bundled trainer has no default model, data, loop or optimizer."""
    if config.program.kind != "trainer":
        return
    absent = [group for group in ("model", "data", "loop", "optimizer") if getattr(config, group) is None]
    if len(absent) == 4:
        if not config.program.command:  # which `command` reports
            yield Issue("nothing says what to run; give +experiment=NAME, -- PROGRAM …, or a run's name", "program")
        return
    yield from (Issue(f"program=trainer needs one; choose {group}=… or +experiment=…", group) for group in absent)


@check("command", "error", "program.command", "program.setup", also="warning")
def command_can_start(config: Config) -> Iterator[Issue]:
    """Without a command, or with one that the workers lack or cannot read, there is nothing to run."""
    argv, setup, own = config.program.command, config.program.setup, config.program.kind == "command"
    if own and not argv:
        yield Issue("is empty; set it, e.g. 'program.command=[python, train.py]'")
    elif argv and not own:
        said = "program=trainer does not run it; add program=command, or leave it out"
        yield Issue(said, severity="warning" if config.model else None)
    makes = [Words("program.setup", words, "[{}]", certain=not i) for i, words in enumerate(setup)]
    for words in [*makes, *([Words("program.command", argv, "{}", certain=not setup)] if own and argv else [])]:
        yield from _start_issues(config, words)


class Words(NamedTuple):
    """Words of a config that start a program. certain: whether no earlier ones can make what they name."""

    key: str
    argv: tuple[str, ...]
    form: str
    certain: bool


def _start_issues(config: Config, words: Words) -> Iterator[Issue]:
    """Yield why the workers could not start a program."""
    if meant := program_words.shell_line(words.argv):
        written = words.form.format(quote_words(shlex.split(meant[1])))
        yield Issue(f"{meant[0]}; use {words.key}={written}", words.key)
        return
    if config.code.stand_in or config.code.repository or config.program.kind != "command":
        return
    try:
        root = repository_root(Path.cwd()).resolve()
    except ConfigError:
        return  # it is reported when the code is read
    here = config.cloud.kind in HERE_CLOUDS
    bare = words.key == "program.command" and _has_slipways_packages(config)
    lock, own = config.env.packages == "lock", config.env.packages in ("lock", "requirements")
    certain = None if words.certain else "warning"
    newer = "warning" if own and may_be_newer(words.argv, config.env.python) else None
    if (own or here) and (problem := other_python(words.argv, config.env.python if own else platform.python_version())):
        yield Issue(problem, words.key, "warning")
    if words.key == "program.setup" and (problem := named_file_problem(words.argv, root)):
        yield Issue(problem, words.key, certain)
    if problem := program_words.program_problem(words.argv, root, root, bare=bare):
        yield Issue(problem, words.key, certain)
    elif problem := program_words.text_problem(words.argv, root, is_run=words.key == "program.command"):
        yield Issue(problem, words.key, newer)
    elif problem := program_words.program_doubt(words.argv, root, root, here=here, certain=words.certain):
        yield Issue(problem, words.key, "warning")
    elif (found := program_words.program_file(words.argv, root)) is not None:
        file, imports_begin = found
        if problem := program_words.syntax_problem(words.argv, file):
            yield Issue(problem, words.key, newer)
        elif bare and file.suffix == ".py" and b"sys.path" not in file.read_bytes():
            yield from (Issue(said, words.key, "warning") for said in lacking_imports(file, imports_begin, locked=lock))
    elif bare and (found := python_text(words.argv, root)):
        yield from (Issue(said, words.key, "warning") for said in lacking_imports(*found, locked=lock))


def _has_slipways_packages(config: Config) -> bool:
    """Return whether the workers have nothing but the packages of the lock, or of this machine."""
    if config.program.setup or {"PATH", "PYTHONPATH"} & config.env.vars.keys():
        return False
    here = config.cloud.kind in HERE_CLOUDS
    return config.env.packages == "lock" or (here and config.env.packages == "image")


@check("sweep_unused", "warning", "sweep")
def a_sweep_is_started(config: Config) -> Iterator[Issue]:
    """Without `-m`, one run is made of what says which runs are wanted."""
    sweep = config.sweep
    if sweep.params or sweep.cases or sweep.search or sweep.pods != 1:
        yield Issue("has an effect with -m only, and this is one run; add -m, or leave it out")


@check("caution", "warning", "program.caution")
def program_may_not_finish(config: Config) -> Iterator[Issue]:
    """Its source shows that it stops, never ends or loses its checkpoints. `up` asks before it starts."""
    if config.program.caution and not config.code.stand_in:
        yield Issue(config.program.caution)


@check("mesh", "error", "mesh", "loop.sampler.mesh")
def mesh_covers_devices(config: Config) -> Iterator[Issue]:
    """JAX rejects a mesh whose product is not the number of devices, but only on a billed pod."""
    if config.program.kind != "trainer":
        return
    devices = trainer_devices(config)
    for key, mesh in meshes(config):
        if mesh_axes(config, mesh) is not None:
            continue
        product, free = math.prod(size for size in mesh.sizes.values() if size > 0), -1 in mesh.sizes.values()
        fitting = f"choose sizes whose product {'divides' if free else 'is'} {devices}, or {key}.data=-1"
        slices = fitting_types(config.topology, lambda t: t.devices % product == 0 if free else t.devices == product)  # noqa: B023 - called here
        message = f"{mesh.shape(mesh.sizes)} does not match the {plural(devices, 'device')} of "
        message += config.topology.accelerator_type
        message += " that train" if devices != config.topology.devices else ""
        other = "" if config.cloud.kind == "here" else f"; or a slice that fits: {slices}"
        yield Issue(f"{message}; {fitting}{other}", key)


@check("devices", "error", "tpu.accelerator_type", of_pods=True)
def slice_has_devices(config: Config) -> Iterator[Issue]:
    """A program that is written for a number of devices fails on another, but only on a billed pod."""
    devices, slice_ = config.program.devices, config.topology
    if devices is not None and (needs := devices.misfit(slice_)):
        has = f"{slice_.accelerator_type} is {slice_.generation}, {plural(slice_.devices, 'device')} on "
        fitting = fitting_types(slice_, lambda other: not devices.misfit(other))
        yield Issue(
            f"the program needs {needs} (program.devices), and {has}{plural(slice_.workers, 'VM')}; types that fit: "
            f"{fitting}"
        )


def fitting_types(wanted: Topology, fits: Callable[[Topology], bool]) -> str:
    """Return the nearest types that Slipway can create, those of the same generation first."""
    types = [find_topology(name) for name in tpu_type_table()["types"]]
    found = [other for other in types if other.zones and fits(other)]
    found.sort(key=lambda other: (other.generation != wanted.generation, abs(other.devices - wanted.devices)))
    return ", ".join(other.accelerator_type for other in found[:4]) or "none"


@check("repository_unused", "error", "code.repository")
def repository_is_shipped(config: Config) -> Iterator[Issue]:
    """`program=trainer` ships slipway's own trainer and ignores the repository."""
    if config.code.repository is not None and config.program.kind == "trainer":
        yield Issue("program=trainer ignores it; choose program=command, or remove the repository")


@check("exclude", "error", "code.exclude")
def exclusions_can_be_read(config: Config) -> Iterator[Issue]:
    """An invalid pattern would silently exclude nothing: https://git-scm.com/docs/gitignore."""
    import pathspec

    for pattern in config.code.exclude:
        try:
            pathspec.GitIgnoreSpec.from_lines([pattern])
        except ValueError:
            yield Issue(f"{pattern!r} is not a valid .gitignore pattern")


@check("code_limit", "error", "code.max_mb")
def archive_limit_is_allowed(config: Config) -> Iterator[Issue]:
    """Workers unpack a limited amount of code, so that a mistake cannot fill their disks."""
    if config.code.max_mb > MAX_BYTES / 1e6:
        yield Issue(f"workers unpack at most {MAX_BYTES / 1e6:.0f} MB of code; ship larger files as assets")


@check("left_out", "warning", "code.exclude", "program.command", "program.setup", also=("error", "note"), of_plan=True)
def all_code_is_shipped(plan: Plan, context: Context) -> Iterator[Issue]:
    """A billed pod misses a submodule not checked out, a link that leads outside and an ignored file that a command
    names.
    """
    yield from missed_code(plan.config, plan.snapshot)


def missed_code(config: Config, code: CodeSnapshot) -> Iterator[Issue]:
    """Yield what is left out of the code although the program may need it."""
    if missed := [f"{name} ({why})" for name, why in code.unexpected.items()]:
        yield Issue(f"not shipped: {first_few(missed)}; name there what is not needed, to silence this")
    commands = [("setup", argv) for argv in config.program.setup] + [("command", config.program.command)]
    for place, (key, argv) in enumerate(commands):
        start = program_words.program_file(argv, code.root) if argv else None
        name = os.path.relpath(start[0], code.root) if start else ""
        if why := _why_left_out(code, name):
            severity = "warning" if place else "error"  # an earlier command may make it
            if config.code.repository or not program_words.program_problem(argv, code.root, code.root, bare=False):
                yield Issue(f"starts {name}, which is not shipped: {why}", f"program.{key}", severity)
            continue  # else the check `command` says it
        folders = ["", *(word for word in argv if path_exists(code.root / word))]
        for name in sorted({os.path.normpath(Path(folder, word)) for folder in folders for word in argv if word}):
            if (why := _why_left_out(code, name)) and path_exists(code.root / name):
                severity = "warning" if (code.root / name).is_file() else "note"
                yield Issue(f"names {name}, which is not shipped: {why}", f"program.{key}", severity)


def _why_left_out(code: CodeSnapshot, name: str) -> str:
    places = (name, f"{name}/", *(f"{place}/" for place in Path(name).parents))
    return next((code.left_out[place] for place in places if place in code.left_out), "")


@check("billing", "error", "cloud.project", live=True, of_pods=True)
def billing_is_enabled(config: Config, context: Context) -> Iterator[Issue]:
    """A project without billing rejects every TPU, and the error does not mention billing."""
    name = f"projects/{context.project}"
    try:
        answer = context.google.call("cloudbilling", "projects.getBillingInfo", name=name)
    except (ForbiddenError, ServiceDisabledError) as error:  # few users can see billing, and none need to
        command = f"gcloud billing projects describe {context.project}"
        raise UncheckedError(f"billing was not checked ({error.message}); `{command}` shows it") from None
    if not answer.get("billingEnabled"):
        yield Issue(
            f"{context.project} has no billing account; run `gcloud billing projects link {context.project} "
            "--billing-account=ACCOUNT` (`gcloud billing accounts list` shows yours)"
        )


@check("tpu_permission", "error", "tpu.zone", also="warning", live=True, of_pods=True)
def tpus_may_be_listed(config: Config, context: Context) -> Iterator[Issue]:
    """Without permission to list TPUs in a zone you cannot create one."""
    yield from ask_planes(config, lambda checks: checks.listing(config, context))


@check("quota", "error", "tpu.zone", "loop.sampler.pods", also=("warning", "note"), live=True, of_pods=True)
def quota_suffices(config: Config, context: Context) -> Iterator[Issue]:
    """TPU quota is set per generation, zone and capacity tier, and starts at 0 almost everywhere. Compute Engine has
    another pool, per region.
    """
    yield from ask_planes(config, lambda checks: checks.quota(config, context))
    if sampler := sampler_config(config):
        is_alike = sampler.topology.generation == config.topology.generation
        chips = num_sampler_pods(config) * sampler.topology.chips + (config.topology.chips if is_alike else 0)
        tpu = sampler.tpu.model_copy(update={"name": config.pod_name})  # all pods of the run are its own
        sampler = sampler.model_copy(update={"tpu": tpu})
        for issue in ask_planes(sampler, lambda checks: checks.quota(sampler, context, chips)):
            yield issue._replace(message=f"with the pods of samplers: {issue.message}", key="loop.sampler.pods")


class Draw(NamedTuple):
    """What a plan draws on a quota of Compute Engine.

    Attributes:
        needed: how much.
        who: who needs it.
        remedy: what else to do than to request more.
        certain: whether the plan fails without it, however it goes.
    """

    needed: int
    who: str
    remedy: str = ""
    certain: bool = True


DISK_QUOTAS = {"hyperdisk-balanced": "HDB_TOTAL_GB", "pd-balanced": "SSD_TOTAL_GB"}
"""Quota of each type of disk: https://cloud.google.com/compute/resource-usage."""
N1_SERIES = frozenset({"n1", "f1", "g1", "e2"})
"""Machine series that draw on CPUS; E2 where the region lists no E2_CPUS."""
EVERYWHERE = "all regions"


@check("compute_quota", "error", "tpu.external_ip", also="warning", live=True, of_pods=True)
def compute_quota_suffices(config: Config, context: Context) -> Iterator[Issue]:
    """Workers and the bastion draw on a region's VMs, addresses, disks and CPUs. New projects have 4 to 8 addresses.
    What others use of them is a warning: Google shows late that they have ended. VMs with TPUs draw on no CPU quota.
    """
    if config.tpu.adopt:
        return
    cpus = cpus_of_bastion(config, context)
    request = "request more (https://console.cloud.google.com/iam-admin/quotas)"
    more = "raise cloud.quotas" if config.cloud.kind == "local" else request
    for place in (*config.regions, *([EVERYWHERE] if cpus else [])):
        where = {} if place == EVERYWHERE else {"region": place}
        shown = context.google.call(
            "compute", "regions.get" if where else "projects.get", project=context.project, **where
        )
        quotas = {quota.get("metric", ""): quota for quota in shown.get("quotas", [])}
        for metric, draw in draws(config, place, cpus, quotas).items():
            limit, used = quotas[metric].get("limit", 0.0), quotas[metric].get("usage", 0.0)
            what = f"{draw.who} needs {draw.needed} of Compute quota {metric} in {place}, which is {limit:.0f}"
            remedy, sure = f"{draw.remedy}{more}", draw.certain and len(config.regions) == 1
            if draw.needed > limit:
                yield Issue(f"{what}; {remedy}", severity="error" if sure else "warning")
            elif draw.needed > limit - used:
                others = used - own_use(config, context, place, cpus, quotas)[metric]
                if others > limit - draw.needed:
                    yield Issue(f"{what}, and others use {others:.0f} of it; {remedy}", severity="warning")


def draws(config: Config, place: str, cpus: int, listed: Container[str]) -> dict[str, Draw]:
    """Return what a plan draws on those quotas of a region, or of all regions, that are listed there."""
    has_bastion = int(config.recovery.driver == "bastion" and place in (config.region, EVERYWHERE))
    machine = config.bastion_machine
    found: dict[str, Draw] = {}
    if has_bastion and cpus and (metric := cpu_quota(machine, place, listed)):
        found[metric] = Draw(cpus, f"the bastion ({machine})", "choose a smaller cloud.driver_machine, or ")
    if place != EVERYWHERE:
        samplers, sampler = num_sampler_pods(config), sampler_config(config)
        workers = config.topology.workers + samplers
        who = f"{config.tpu.accelerator_type}{describe_samplers(config, ' with ')}"
        addresses = workers * config.external_ip + has_bastion * (not config.network.nat)
        found["INSTANCES"] = Draw(workers + has_bastion, who)
        found["IN_USE_ADDRESSES"] = Draw(addresses, who, "set tpu.external_ip=false, or ")
        sizes = Counter[str]()
        for one, vms in ((config, config.topology.workers), (sampler, samplers)):
            if one is not None:
                sizes += disk_gigabytes(one, vms)
        certain = planes_for(config) == (PLANES["compute_engine"],)
        for metric, gigabytes in sizes.items():
            found[metric] = Draw(gigabytes, who, "lower tpu.boot_disk_gb or tpu.data_disk_gb, or ", certain)
    return {metric: draw for metric, draw in found.items() if metric in listed and draw.needed}


def disk_gigabytes(config: Config, vms: int) -> Counter[str]:
    """Return what the disks of a pod draw on each quota; Google makes the boot disks of the TPU API elsewhere."""
    on_compute = PLANES["compute_engine"] in planes_for(config)
    size = vms * config.tpu.boot_disk_gb * on_compute + (config.tpu.data_disk_gb or 0)
    return Counter({DISK_QUOTAS[disk_type(config.topology.generation)]: size})


def cpu_quota(machine: str, place: str, listed: Container[str]) -> str:
    """Return the quota that the CPUs of a machine draw on; "" for a series whose quota is not shown there."""
    series = machine.partition("-")[0]
    own = "CPUS_ALL_REGIONS" if place == EVERYWHERE else f"{series.upper()}_CPUS"
    return own if own in listed else "CPUS" * (series in N1_SERIES)


def cpus_of_bastion(config: Config, context: Context) -> int:
    """Return how many CPUs the bastion's machine has; 0 without one, or if nobody may tell: `bastion_machine` does."""
    if config.recovery.driver != "bastion":
        return 0
    where = {"project": context.project, "zone": config.tpu.zone, "machineType": config.bastion_machine}
    try:
        return context.google.call("compute", "machineTypes.get", **where).get("guestCpus", 0)
    except (ForbiddenError, NotFoundError, ServiceDisabledError):
        return 0


def own_use(config: Config, context: Context, place: str, cpus: int, listed: Container[str]) -> Counter[str]:
    """Return what a run's own VMs use of quotas already: they are not made again."""
    used = Counter[str]()
    for status in (status for plane in planes_for(config) for status in plane.slices(context)):
        is_live = status.is_ready or status.pending
        if is_live and status.place.region == place and is_of_run(config, status.name):
            used["INSTANCES"] += status.spec.workers
            used["IN_USE_ADDRESSES"] += status.spec.workers * status.spec.external_ip
            used += disk_gigabytes(config, status.spec.workers)
    where = {"project": context.project, "zone": config.tpu.zone, "instance": bastion_name(config)}
    if config.recovery.driver == "bastion" and place in (config.region, EVERYWHERE):
        with suppress(NotFoundError):
            card = context.google.call("compute", "instances.get", **where).get("networkInterfaces", [{}])[0]
            used += Counter(INSTANCES=1, IN_USE_ADDRESSES=int(bool(card.get("accessConfigs"))))
            used += Counter({cpu_quota(config.bastion_machine, place, listed): cpus})
    return used
