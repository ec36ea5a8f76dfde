"""Rehearse a run: the same plan, scaled down, on an emulated cloud of its own, faults included.

The checks at the end look at the emulated cloud, which is then wiped: a rehearsal leaves nothing.
"""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from conf.schema.cloud import LocalCloud
from conf.schema.config import Config
from controller import emulator as emulated
from controller.connect import open_context, project_of
from controller.context import Context
from controller.core.errors import ConfigError
from controller.core.events import BoardScreen, Event
from controller.core.text import plural
from controller.emulator import Emulator
from controller.plan.build import Plan, build_plan, preview_resources
from controller.reconcile import reconcile
from controller.records.ledger import Ledger, Result
from controller.rehearsal.recipe import emulated_hub, with_recipe
from controller.run.options import RunOptions
from controller.sampler_crew import drive

FAULT_KEY = "rehearsal"
SECONDS_AFTER_OUTPUT = 4.0
"""Seconds from the program's first line of log or metrics to the preemption."""
PREEMPTION = {"kind": "preempted", "after_requests": 0, "delay_seconds": SECONDS_AFTER_OUTPUT}
"""The fault; the controller's next request to Google triggers it."""
MAX_STEP = 1e15


@dataclass
class Interruption:
    """Event listener that strikes after the program's first output, if `strike` is set, and keeps its steps."""

    strike: Callable[[], object] | None = None
    has_struck: bool = False
    attempt: int = 0
    total: int | None = None
    _steps: dict[int, list[int]] = field(default_factory=dict)
    """Those that each attempt reported, in their order."""
    _newest: float = 0.0

    def __call__(self, event: Event) -> None:
        if event.kind == "note" and event.data.get("launched"):
            self.attempt = event.data["attempt"]
        elif event.kind in ("log", "metrics") and self.attempt:
            if event.kind == "metrics":
                self._record(event.data["metrics"])
            if self.strike is not None and not self.has_struck:
                self.has_struck = True
                self.strike()

    def _record(self, metrics: dict[str, Any]) -> None:
        """Keep the step of a line, unless it is a line of an earlier attempt that the program has restored."""
        time, step, total = (_number(metrics.get(name)) for name in ("time", "step", "steps_total"))
        if step is None or (time is not None and time <= self._newest):
            return
        self._newest = self._newest if time is None else time
        self.total = self.total if total is None else int(total)
        self._steps.setdefault(self.attempt, []).append(int(step))

    def resumption(self) -> tuple[bool, str]:
        """Return whether the last attempt went on after its predecessor's first step, and from where it went on."""
        of = f" of {self.total}" if self.total else ""
        earlier = [steps for attempt, steps in self._steps.items() if attempt < self.attempt]
        now = self._steps.get(self.attempt)
        if now is None:
            return False, "from where is unknown, because it reports no steps in $SLIPWAY_RUN_DIR/metrics.jsonl"
        if not earlier:
            return False, f"at step {now[0]}{of}; no step arrived before the preemption to compare it with"
        if now[0] > earlier[0][0]:
            return True, f"at step {now[0]}{of}; step {earlier[-1][-1]} was reached before"
        return False, f"from the beginning, at step {now[0]}{of}: it loaded no checkpoint"


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) and abs(value) < MAX_STEP else None


OVERRIDDEN_KEYS = frozenset({"cloud", "cloud.project"})
"""Keys that a rehearsal sets itself."""
REHEARSAL_OVERRIDES = ("scale=tiny", "env.packages=image", "env.requirements=null")
"""Defaults of a rehearsal, unless the user sets the key: small, with this machine's packages, nothing downloaded."""


@dataclass(frozen=True)
class Check:
    """One thing that the rehearsal had to prove, and whether it did; `doubtful` if it did, but not as one wishes."""

    passed: bool
    message: str
    doubtful: bool = False


@dataclass(frozen=True)
class Rehearsal:
    options: RunOptions
    plan: Plan
    context: Context
    emulator: Emulator
    folder: Path
    """Folder of the emulated cloud."""
    interruption: Interruption

    def run(self, screen: BoardScreen) -> Result | None:
        self.context.events.add_listener(self.interruption)
        options = RunOptions(self.options.overrides, yes=True, json=self.options.json)
        return drive(options, self.plan, self.context, self.emulator, screen)

    def checks(self, result: Result | None) -> list[Check]:
        """Check in the emulated cloud what the run has proven."""
        plan, state, requests = self.plan, self.emulator.get("state"), self.emulator.requests()
        ledger = Ledger(self.context.google, plan.bucket, plan.run_id)
        topology, workers = plan.config.topology, plan.node.spec.workers
        pod = f"{topology.accelerator_type} with {plural(workers, 'worker')}, {plural(topology.devices, 'device')}"
        observed = preview_resources(plan.before_pod, self.context)
        shared = [row for row in observed if row.resource.scope in ("shared", "external")]
        changed = [row.resource.title for row in shared if row.action != "none"]
        refused = [r for r in requests if r["status"] == 400]
        objects = [name for name in state["objects"].get(plan.bucket, []) if name.startswith(f"{ledger.prefix}/")]
        left = [name for kind in ("node", "queued", "disk") for name in state.get(kind, {})]
        left += [name for name in state["compute"] if re.search("/(disks|instances|addresses)/", name)]
        made = f"{len(shared)} shared resources created, and unchanged when observed again{_join_names(changed)}"
        return [
            Check(not changed, made),
            *_check_recipe(plan, state["objects"].get(plan.bucket, [])),
            Check(bool(ledger.launches()), f"a {pod}, reached and verified"),
            *check_recovery(state["fault"], len(ledger.launches()), self.interruption),
            Check(result is not None, f"the program exited with 0 on {workers} of {plural(workers, 'worker')}"),
            Check(bool(objects), f"{len(objects)} objects of the run in the bucket: logs, checkpoints, result"),
            Check(not refused, f"{len(requests)} requests, {len(refused) or 'none'} of them rejected as malformed"),
            _check_leftovers(plan, left),
        ]

    def keep_for_inspection(self) -> str:
        """Drop the faults that have yet to strike what a failed rehearsal left behind; return how to inspect it."""
        with suppress(OSError):
            self.emulator.delete("faults")
        own = {*OVERRIDDEN_KEYS, "scale"}
        overrides = [override for override in self.options.overrides if _key(override) not in own]
        again = shlex.join([*overrides, "cloud=local", *REHEARSAL_OVERRIDES, f"run.state_dir={self.folder}"])
        end = shlex.join(["cloud=local", f"run.state_dir={self.folder}"])
        return (
            f"kept until this run's next rehearsal; inspect it with `slipway status {again}`, logs, verify or ssh; "
            f"`slipway localcloud wipe --yes {end}` ends it"
        )


@contextmanager
def open_rehearsal(options: RunOptions) -> Iterator[Rehearsal]:
    """Start an emulated cloud for the rehearsal, and wipe it; on any error stop it, with its state for inspection.

    Raises ConfigError if the config is unusable, or a rehearsal of that name is running.
    """
    with ExitStack() as stack:
        with options.waiting() as doing:
            doing("composing the config")
            overrides = [override for override in options.overrides if _key(override) not in OVERRIDDEN_KEYS]
            given = {_key(override) for override in overrides}
            defaults = [override for override in REHEARSAL_OVERRIDES if _key(override) not in given]
            config = replace(options, overrides=(*overrides, "cloud=local", *defaults)).checked_config()
            if config.program.kind == "trainer" and "scale" not in given:
                with suppress(ConfigError):  # without a scale it may lack data; then there is no recipe to rehearse
                    full, _ = replace(options, overrides=(*overrides, "cloud=local")).config(resolve=False)
                    config = with_recipe(config, full, given)
            assert isinstance(config.cloud, LocalCloud)
            folder = Path(config.run.state_dir).expanduser() / "rehearsals" / config.run.name
            run = config.run.model_copy(update={"state_dir": str(folder)})
            cloud = config.cloud.model_copy(update={"faults": config.cloud.faults or default_faults(config)})
            config = config.model_copy(update={"cloud": cloud, "run": run})
            doing("hashing code and data")
            plan = build_plan(config, project_of(config), Path.cwd())
            doing("starting the emulated cloud")
            _wipe_cloud(folder)
            stack.enter_context(_stopped_on_error(emulated.state_folder(str(folder))))
            stack.enter_context(emulated_hub(config, folder / "hub"))
            context, emulator = stack.enter_context(open_context(config, keep_awake=True))
        assert emulator is not None, "a rehearsal is on the emulated cloud"
        if config.tpu.adopt:
            _create_adopted_pod(config, context)
        interruption = Interruption()
        if isinstance(config.cloud, LocalCloud) and not config.cloud.faults:
            interruption = Interruption(partial(emulator.post, "faults", {"key": FAULT_KEY, "faults": [PREEMPTION]}))
        yield Rehearsal(options, plan, context, emulator, folder, interruption)
    _wipe_cloud(folder)


@contextmanager
def _stopped_on_error(cloud: Path) -> Iterator[None]:
    """Stop an emulated cloud and its workers' programs if the block fails; the next verb starts it again."""
    try:
        yield
    except BaseException as error:
        status, message = emulated.run_emulator_verb(["stop", "--programs"], cloud)
        if status != 0:
            raise ConfigError(f"{error}; and the emulated cloud in {cloud} does not stop: {message.strip()}") from error
        raise


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def _create_adopted_pod(config: Config, context: Context) -> None:
    """Create the pod that the run adopts: the same plan without `tpu.adopt`, up to and including its node."""
    other = config.model_copy(update={"tpu": config.tpu.model_copy(update={"adopt": False})})
    plan = build_plan(other, project_of(other), Path.cwd())
    reconcile((*plan.before_pod, plan.node), context)


def default_faults(config: Config) -> tuple[dict[str, Any], ...]:
    """Return a preemption after the first checkpoint; nothing if its name is unknown: see `Interruption`.

    Slipway may not replace an adopted pod, so that run gets workers that refuse SSH and an overloaded API instead.
    """
    if config.tpu.adopt:
        return ({"kind": "ssh_refused", "seconds": 2}, {"kind": "http", "status": 503, "match": "GET .*nodes"})
    if config.program.kind == "trainer":
        return ({"kind": "preempted", "after_object": f"checkpoints/{config.checkpoint.save_interval}/commit_success"},)
    return ({"kind": "preempted", "after_object": "/commit_success"},) if config.code.stand_in else ()


def _check_recipe(plan: Plan, objects: Sequence[str]) -> list[Check]:
    """Check that what the experiment fetches from the Hub is in the bucket."""
    wanted = [content for content in plan.assets if content.source]
    there = [content for content in wanted if f"{content.prefix}/manifest.json" in objects]
    names = ", ".join(content.source or "" for content in wanted)
    return [Check(there == wanted, f"fetched from an emulated Hugging Face Hub: {names}")] if wanted else []


def _check_leftovers(plan: Plan, left: list[str]) -> Check:
    """Check that nothing is left at the end except an adopted pod."""
    if plan.config.tpu.adopt:
        only = {name.rpartition("/")[2] for name in left} == {plan.node.name}
        return Check(only, f"{plan.node.name} still exists; no other billed resource does")
    return Check(not left, f"no billed resource is left{_join_names(left)}")


def _join_names(exceptions: Sequence[str]) -> str:
    return f", except {', '.join(exceptions)}" if exceptions else ""


def check_recovery(faults: Mapping[str, Any], attempts: int, interruption: Interruption) -> list[Check]:
    """Check whether each scripted fault occurred and the run recovered from it.

    Args:
        faults: faults of the emulated cloud by name.
        attempts: number of times that the program was launched.
        interruption: what the program reported.
    """
    checks = []
    for name, fault in faults.items():
        spec = {key: value for key, value in fault["spec"].items() if key != "at" and value not in (None, 0.0)}
        kind, struck = spec.pop("kind"), fault["left"] < spec.get("times", 1)
        details = ", ".join(f"{key} {value}" for key, value in spec.items())
        if name.startswith(f"{FAULT_KEY}/"):
            details = f"{SECONDS_AFTER_OUTPUT:g} s after its first output"
        what = f"{kind} ({details})"
        if struck and kind == "preempted":
            checks.append(_check_resumption(what, attempts, interruption))
        else:
            end = "overcome" if struck else "did not occur; change cloud.faults, or let the program run longer"
            if not struck and name.startswith(f"{FAULT_KEY}/"):
                end = "nothing proven, because the program ended before; let it run longer"
            checks.append(Check(struck, f"{what}: {end}"))
    if interruption.strike is not None and not interruption.has_struck:
        message = "not interrupted: nothing proven, because the program ended without output in log or metrics"
        checks.append(Check(False, message))
    return checks


def _check_resumption(what: str, attempts: int, interruption: Interruption) -> Check:
    """Check whether a preemption interrupted the program, and from where it went on."""
    if attempts < 2:
        why = "because it struck while the program was not running; let it run longer"
        return Check(False, f"{what}: nothing proven, {why}")
    resumed, where = interruption.resumption()
    verb = "resumed" if resumed else "started again"
    return Check(True, f"{what}: replaced, and the program {verb}: {attempts} attempts; {where}", not resumed)


def _wipe_cloud(folder: Path) -> None:
    """Stop and remove the cloud of a rehearsal. Raises ConfigError if a rehearsal of that name is running."""
    if not folder.exists():
        return
    cloud = emulated.state_folder(str(folder))
    if (cloud / "users").exists() and not emulated.is_idle(cloud):
        raise ConfigError(f"run.name: a rehearsal of {folder.name} is running; wait for it, or set another name")
    status, message = emulated.run_emulator_verb(["wipe"], cloud)
    if status != 0:
        raise ConfigError(message.strip())
    shutil.rmtree(folder)
