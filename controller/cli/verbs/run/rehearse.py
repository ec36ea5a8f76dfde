"""`slipway rehearse`: the same plan, scaled down, on an emulated cloud of its own, misfortune included.

What is shown at the end was looked up in the emulated cloud, which is then wiped: a rehearsal leaves nothing.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.schema.config import Config
from conf.schema.infra.cloud import LocalCloud
from controller.cli.verbs.run.up import carry_out
from controller.cloud import emulator as emulated
from controller.cloud.connect import connected, project_of
from controller.cloud.emulator import Emulator
from controller.context import Context
from controller.core.errors import ConfigError
from controller.core.text import counted
from controller.plan.build import Plan, build
from controller.plan.preview import preview
from controller.reconcile.reconciler import reconcile
from controller.records.ledger import Ledger, Result
from controller.rehearsal.chaos_run import Watched, cost, described, stage_of, timeline, undergo
from controller.rehearsal.fault_schedule import schedule

if TYPE_CHECKING:
    from controller.cli.main import Command

OURS = frozenset({"cloud", "cloud.project"})
"""Keys that a rehearsal decides by itself."""
DEFAULTS = ("scale=tiny", "env.packages=image", "env.requirements=null")
"""What it decides where the command line does not: small, and with the packages that are here, nothing downloaded."""
SECONDS_BEFORE_PREEMPTION = 4.0


@dataclass(frozen=True)
class Fact:
    """One thing that the rehearsal was to prove, and whether it did."""

    proven: bool
    words: str


def run(command: Command) -> int:
    config, folder, words = _scaled(command)
    plan = build(config, project_of(config), Path.cwd())
    if command.flags.chaos is not None:
        return _chaos(command, plan, folder, words)
    flags = Namespace(json=command.flags.json, yes=True, detach=False, queue=False, take_over=False)
    _wipe(folder)
    with connected(config, keep_awake=True) as (world, emulator):
        assert emulator is not None, "a rehearsal is on the emulated cloud"
        if config.tpu.adopt:
            _make_beforehand(config, world)
        try:
            result = carry_out(replace(command, flags=flags), plan, world, emulator)
        except BaseException:
            print(_how_to_look(command, folder), file=sys.stderr)
            raise
        facts = list(_facts(plan, world, emulator, result))
    _wipe(folder)
    _show(command, plan, facts)
    return 0 if all(fact.proven for fact in facts) else 2


def _chaos(command: Command, plan: Plan, folder: Path, words: Sequence[str]) -> int:
    """Under a schedule drawn from a seed: whatever happens, it comes to its end, and it is told what that took."""
    config, show = plan.config, not command.flags.json
    assert isinstance(config.cloud, LocalCloud)
    if config.cloud.faults:
        raise ConfigError("cloud.faults: --chaos draws the faults itself; leave one of the two out")
    faults = schedule(command.flags.chaos, stage_of(config, plan.node.workers))
    _wipe(folder)
    with connected(config, keep_awake=True) as (world, emulator):
        assert emulator is not None, "a rehearsal is on the emulated cloud"
        if config.tpu.adopt:
            _make_beforehand(config, world)
        emulator.post("faults", {"key": "chaos", "faults": list(faults)})
        watched = Watched(world.clock.now())
        if show:
            print(f"seed {command.flags.chaos}: {'; '.join(described(fault) for fault in faults)}", flush=True)
        try:
            undergo([*words, f"run.state_dir={folder}"], watched, show)
        except BaseException:
            print(_how_to_look(command, folder), file=sys.stderr)
            raise
        met = list(emulator.get("state")["fault"].values())
        emulator.delete("faults")  # what still lasts is not to meet us as well
        ledger = Ledger(world.google, plan.bucket, plan.run_id)
        facts = list(_facts(plan, world, emulator, ledger.result()))
        told, took = list(timeline(watched, ledger, met)), cost(watched, ledger)
    _wipe(folder)
    if show:
        print("\n".join(["", *told, took]))
    _show(command, plan, facts, chaos={"seed": command.flags.chaos, "faults": met, "timeline": told, "cost": took})
    return 0 if all(fact.proven for fact in facts) else 2


def _scaled(command: Command) -> tuple[Config, Path, Sequence[str]]:
    """The config of the rehearsal, the folder where its emulated cloud lives, and the words that mean the config."""
    words = [word for word in command.overrides if word.lstrip("+").partition("=")[0] not in OURS]
    given = {word.lstrip("+").partition("=")[0] for word in words}
    ours = [word for word in DEFAULTS if word.partition("=")[0] not in given]
    words = (*words, "cloud=local", *ours)
    config = replace(command, overrides=words).checked_config()
    assert isinstance(config.cloud, LocalCloud)
    folder = Path(config.run.state_dir).expanduser() / "rehearsals" / config.run.name
    run = config.run.model_copy(update={"state_dir": str(folder)})
    if command.flags.chaos is not None:
        return config.model_copy(update={"run": run}), folder, words
    cloud = config.cloud.model_copy(update={"faults": config.cloud.faults or misfortune(config)})
    return config.model_copy(update={"cloud": cloud, "run": run}), folder, words


def _make_beforehand(config: Config, world: Context) -> None:
    """The pod that the run adopts: the same plan without `tpu.adopt`, as far as its node."""
    other = config.model_copy(update={"tpu": config.tpu.model_copy(update={"adopt": False})})
    plan = build(other, project_of(other), Path.cwd())
    reconcile(plan.resources[: plan.resources.index(plan.node) + 1], world)


def misfortune(config: Config) -> tuple[dict[str, Any], ...]:
    """A preemption in mid-run: after the first checkpoint where it is known how that looks, else after a while.

    An adopted pod is not ours to replace: workers that refuse SSH and an overloaded API have to do.
    """
    if config.tpu.adopt:  # nobody may replace it, so it is not taken away
        return ({"kind": "ssh_refused", "seconds": 2}, {"kind": "http", "status": 503, "match": "GET .*nodes"})
    if config.program.kind == "trainer":
        return ({"kind": "preempted", "after_object": f"checkpoints/{config.checkpoint.every}/commit_success"},)
    if config.code.stand_in:
        return ({"kind": "preempted", "after_object": "/commit_success"},)
    return ({"kind": "preempted", "after_seconds": SECONDS_BEFORE_PREEMPTION},)


def _facts(plan: Plan, world: Context, emulator: Emulator, result: Result | None) -> Sequence[Fact]:
    ledger, state, requests = Ledger(world.google, plan.bucket, plan.run_id), emulator.get("state"), emulator.requests()
    topology, workers = plan.config.topology, plan.node.workers
    pod = f"{topology.accelerator_type} with {counted(workers, 'worker')}, {counted(topology.devices, 'device')}"
    shared = preview(tuple(plan.of_scope("shared", "external")), world)
    unlike = [row.resource.title for row in shared if row.action != "none"]
    refused = [r for r in requests if r["status"] == 400]
    objects = [name for name in state["objects"].get(plan.bucket, []) if name.startswith(f"{ledger.prefix}/")]
    left = [name for kind in ("node", "queued", "disk") for name in state.get(kind, {})]
    left += [name for name in state["compute"] if re.search("/(disks|instances|addresses)/", name)]
    return [
        Fact(not unlike, f"{len(shared)} shared resources made, and as wanted at a second look{_list(unlike)}"),
        Fact(bool(ledger.launches()), f"a {pod}, reached and verified"),
        *_overcome(plan, ledger, state),
        Fact(result is not None, f"the program ended with 0 on {workers} of {counted(workers, 'worker')}"),
        Fact(bool(objects), f"{len(objects)} objects of the run in the bucket: logs, checkpoints, result"),
        Fact(not refused, f"{len(requests)} requests, {len(refused) or 'none'} of them refused as malformed"),
        _left(plan, left),
    ]


def _left(plan: Plan, left: list[str]) -> Fact:
    """What is still there at the end: nothing, but for a pod that was adopted."""
    if plan.config.tpu.adopt:
        only = {name.rpartition("/")[2] for name in left} == {plan.node.name}
        return Fact(only, f"{plan.node.name} is still there, and nothing else that is billed")
    return Fact(not left, f"nothing billed is left{_list(left)}")


def _list(exceptions: Sequence[str]) -> str:
    return f", but for {', '.join(exceptions)}" if exceptions else ""


def _overcome(plan: Plan, ledger: Ledger, state: dict[str, Any]) -> Sequence[Fact]:
    """Did the scripted misfortune come, and was it overcome?"""
    facts = []
    for fault in state.get("fault", {}).values():
        spec = {key: value for key, value in fault["spec"].items() if key != "at" and value not in (None, 0.0)}
        kind, came = spec.pop("kind"), fault["left"] < spec.get("times", 1)
        words = ", ".join(f"{key} {value}" for key, value in spec.items())
        end = "overcome" if came else "never came: set cloud.faults, or let the program run longer"
        if came and kind == "preempted":
            end = f"replaced, and the program went on: {len(ledger.launches())} attempts"
        facts.append(Fact(came, f"{kind} ({words}): {end}"))
    return facts


def _show(command: Command, plan: Plan, facts: Sequence[Fact], **more: Any) -> None:
    if command.flags.json:
        rows = [{"proven": fact.proven, "words": fact.words} for fact in facts]
        print(json.dumps({"rehearsed": plan.run_id, "facts": rows, **more}))
        return
    print(f"rehearsed {plan.config.run.name}:")
    for fact in facts:
        print(f"  {'✓' if fact.proven else '✗'} {fact.words}")
    unproven = ["Google's capacity and quota", "real weights and data", "the memory of a chip"]
    if plan.config.code.stand_in:
        unproven.insert(0, "the program itself, for which a stand-in ran")
    print(f"  not rehearsed: {', '.join(unproven)}")


def _how_to_look(command: Command, folder: Path) -> str:
    words = [word for word in command.overrides if word.lstrip("+").partition("=")[0] not in {*OURS, "scale"}]
    again = shlex.join([*words, "cloud=local", *DEFAULTS, f"run.state_dir={folder}"])
    return f"kept until the next rehearsal of it; look with `slipway status {again}`, and logs, verify, ssh alike"


def _wipe(folder: Path) -> None:
    """End and remove what an earlier rehearsal left, or this one.

    Raises:
        ConfigError: a rehearsal of that name is under way.
    """
    if not folder.exists():
        return
    users = folder / "localcloud" / "users"
    if users.exists() and not emulated.is_idle(users.parent):
        raise ConfigError(f"run.name: a rehearsal of {folder.name} is under way; wait for it, or give this one another")
    status, words = emulated.command(["wipe"], folder / "localcloud")
    if status != 0:
        raise ConfigError(words.strip())
    shutil.rmtree(folder)
