"""Start a run: `slipway plan`, `fit`, `up`, `run` for a program without a config; and its trials.

`slipway rehearse` tries all that happens to a run on an emulated cloud, `slipway witness` on Google's.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from conf.schema.topology import UnknownTypeError, find_topology
from conf.strict_json import dumps
from controller.checks.fit import cache_file
from controller.cli.main import Command
from controller.cli.view import View
from controller.config.run_yaml import render, run_url
from controller.connect import project_of
from controller.core.errors import ConfigError, SlipwayError
from controller.core.text import plural, print_wrapped, width_of, wrap
from controller.core.this_process import run_program
from controller.gcp.prices import SPOT_TIERS
from controller.plan.build import Plan
from controller.plan.needed_permissions import Need, permissions_of_plan
from controller.plan.samplers import describe_samplers
from controller.reconcile import NotEnabled, Unknown
from controller.records.index import LastCommand, load_last_command, save_last_command
from controller.records.plan_file import save_plan
from controller.resources.pod.planes import label_places, plane_of, planes_not_tried
from controller.run.estimate import describe_estimate
from controller.run.preview import RunPreview, preview_run

if TYPE_CHECKING:
    from controller.rehearsal.rehearsal import Check
    from controller.witness.play import Outcome

ACTION_SIGNS = {"none": "=", "create": "+", "update": "~", "replace": "±", "wait": "…", "unknown": "?"}
NONE_FOUND = "no Google credentials"
"""Beginning of what a check and every resource say; once is enough."""
MAX_PLACES = 6
"""Places that `plan` shows of the order."""
LINE_START = re.compile(r"  \S \w+ +|(?:run|pod|order|samplers|results|price|estimate|limit|now) +| +")
"""What stands before the text of a line: the sign and action of a resource, or the name of a value."""


def run_plan(command: Command) -> int:
    """`slipway plan`: show what `up` would do, its cost, and every mistake in the config. Changes nothing."""
    chosen = [f"--{name}" for name in ("config", "permissions", "save") if getattr(command.flags, name)]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)}: give one of them")
    if command.flags.config:
        from controller.cli.verbs.keys import print_config

        return print_config(command)
    if command.flags.permissions:
        if command.flags.run:
            raise ConfigError("--permissions: takes overrides, not --run")
        return print_permissions(command)
    preview = preview_run(command.options)
    if command.flags.save:
        print(f"saved {save_plan(preview.plan, command.overrides, Path.cwd())}", file=sys.stderr)
    print(dumps(preview.as_document(), indent=1) if command.flags.json else _wrapped(format_plan(preview)))
    return 2 if any(f.severity == "error" for f in preview.findings) else 0


def _wrapped(lines: list[str]) -> str:
    """Wrap lines on a terminal; what follows stands below the value, the title or the change that it continues."""
    width = width_of(sys.stdout)
    starts = [LINE_START.match(line) for line in lines]
    return "\n".join(wrap(line, width, start.end() if start else 2) for line, start in zip(lines, starts, strict=True))


def print_permissions(command: Command) -> int:
    """Print one permission per line: by resource on a terminal, else as tab-separated values."""
    config, _ = command.options.config()
    needs = permissions_of_plan(config, project_of(config))
    if command.flags.json:
        print(dumps([asdict(need) | {"role": need.role} for need in needs], indent=1))
    elif sys.stdout.isatty():
        print(_wrapped(format_permissions(needs)))
    else:
        for need in needs:
            print(need.permission, need.kind, need.name, need.when, need.role, sep="\t")
    return 0


def format_permissions(needs: list[Need]) -> list[str]:
    lines: list[str] = []
    width = max(len(need.permission) for need in needs)
    wide = max(len(need.when) for need in needs)
    for (kind, name), group in groupby(needs, key=lambda need: (need.kind, need.name)):
        lines.append(f"{kind} {name}")
        lines += [f"  {need.permission:<{width}}  {need.when:<{wide}}  {need.role}" for need in group]
    roles = dict.fromkeys(need.role for need in needs)
    return [*lines, "", f"These roles contain them: {' '.join(roles)}"]


def _hardware(plan: Plan) -> str:
    tpu, topology = plan.config.tpu, plan.config.topology
    if plan.config.cloud.kind == "here":
        return plan.node.title
    return (
        f"{tpu.accelerator_type}, {plural(topology.workers, 'worker')}, {plural(topology.devices, 'device')}, "
        f"{' or '.join(tpu.capacity)} in {' or '.join(tpu.all_zones)}"
    )


def _order(plan: Plan) -> list[str]:
    """Return where the pod will be asked for if it may come from several planes, and why it may not."""
    places = plan.node.places
    if plan.config.cloud.kind == "here":
        return []
    shown, lines = ", ".join(label_places(places)[:MAX_PLACES]), planes_not_tried(plan.config)
    more = f", and {len(places) - MAX_PLACES} more" if len(places) > MAX_PLACES else ""
    if len({plane_of(place.provisioner).title for place in places}) > 1:
        lines.append(f"{shown}{more}; first where capacity was granted lately")
    return [f"order    {line}" for line in lines]


def format_plan(preview: RunPreview) -> list[str]:
    plan, price = preview.plan, preview.price
    lines = [
        f"run      {plan.run_id}",
        f"pod      {plan.node.name}: {_hardware(plan)}",
        *_order(plan),
        *([f"samplers {samplers}"] if (samplers := describe_samplers(plan.config)) else []),
        f"results  {run_url(plan.config, plan.bucket, plan.run_id)}",
    ]
    if plan.config.cloud.kind == "here" and price.tpu is None:
        lines.append("price    none: it runs on this machine")
    elif plan.config.cloud.kind == "local" and price.tpu is None:
        lines.append("price    none: the cloud is emulated on this machine")
    else:
        lines += [f"price    {price}", f"estimate {describe_estimate(plan.config, price)}"]
        lines.append(f"limit    {preview.limit}")
    if preview.status:
        lines.append(f"now      {preview.status}")
    lines.append("")
    told = any(f.message.startswith(NONE_FOUND) for f in preview.findings)
    unknown = [row.observed for row in preview.rows if isinstance(row.observed, Unknown)]
    if unseen := _unseen_lines([s for s in unknown if not (told and s.why.startswith(NONE_FOUND))]):
        lines += [*unseen, ""]  # first: without credentials it is every line
    for row in preview.rows:
        label = "exists" if row.action == "none" else row.action
        lines.append(f"  {ACTION_SIGNS[row.action]} {label:<8} {row.title}")
        if row.action in ("update", "replace") and row.diff:
            lines += [f"               {change}" for change in row.diff.changes]
    if preview.findings:
        lines += ["", *(f"{f.severity}: {f}" for f in preview.findings)]
    return lines


def _unseen_lines(states: list[Unknown]) -> list[str]:
    """Return why resources could not be observed, each reason once; one line for all APIs that are not enabled."""
    lines = dict.fromkeys(f"unknown: {state.why}" for state in states if not isinstance(state, NotEnabled))
    apis = dict.fromkeys(state.service.split(".")[0] for state in states if isinstance(state, NotEnabled))
    enabling = f"note: {plural(len(apis), 'API')} not enabled yet ({', '.join(apis)}): `up` enables them. "
    return [*lines, *([f"{enabling}What they manage is shown as absent."] if apis else [])]


def run_fit(command: Command) -> int:
    """`slipway fit`: check whether the run fits the slice, and how long it takes, with the TPU compiler.

    The compiler runs in a child process, which imports JAX. The result for the config's own slice is kept for `plan`.
    """
    config = command.options.checked_config(without={"fit"}, resolve=False)
    if config.program.kind != "trainer":
        raise ConfigError("program: fit supports only the bundled trainer; set program=trainer")
    for name in filter(None, command.flags.slices.split(",")):
        try:
            find_topology(name)
        except UnknownTypeError as error:
            raise ConfigError(f"--slices: {error}") from None
    # the location of data does not affect shapes
    anywhere = {name: name for name in re.findall(r"assets://([^/\"]+)", config.model_dump_json())}
    with tempfile.TemporaryDirectory() as folder:
        file, answer = Path(folder) / "run.yaml", Path(folder) / "fit.json"
        file.write_text(render(config, config.run.name, "bucket", anywhere))
        price_flags = ["--zone", config.tpu.zone] if config.tpu.zone else []
        price_flags += ["--spot"] if config.tpu.capacity[0] in SPOT_TIERS else []
        flags = ["--out", str(answer), *(["--json"] if command.flags.json else []), *price_flags]
        if command.flags.slices:
            flags += ["--slices", command.flags.slices, "--sort", command.flags.sort]
        print("compiling each program for the TPU; a large model takes minutes …", file=sys.stderr, flush=True)
        code = run_program("trainer.fit", str(file), *flags, modules=config.code.modules)
        if answer.is_file() and not command.flags.slices:
            kept = cache_file(config)
            try:
                kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                kept.write_text(answer.read_text())
            except OSError as error:
                raise ConfigError(f"run.state_dir: {kept.parent} cannot be written: {error.strerror}") from None
    return code


def run_up(command: Command) -> int:
    """`slipway up`: apply the plan, launch, follow, and restart from the last checkpoint when the pod is lost."""
    from controller.run.drive import open_run  # `plan` needs neither
    from controller.sampler_crew import drive

    options, before, begun = command.options, load_last_command(Path.cwd()), list[str]()
    with open_run(options) as (plan, context, emulator):
        of_record = plan.run_id if options.run_id else ""
        save_last_command(LastCommand(options.overrides, of_record, meant=plan.run_id), Path.cwd())
        context.events.add_listener(lambda event: begun.append(event.kind))
        try:
            with View(plan, json_lines=options.json) as view:
                drive(options, plan, context, emulator, view)
        except SlipwayError as error:
            if error.exit_code == ConfigError.exit_code and "step_started" not in begun:
                save_last_command(before, Path.cwd())  # it was refused, and nothing was made
            raise
    return 0


run_run = run_up
"""`slipway run -- PROGRAM`: the overrides stand for the program from here on."""


SIGNS = {"ok": "✓", "skipped": "-"}


def run_rehearse(command: Command) -> int:
    """`slipway rehearse`: run the same plan, scaled down, on its own emulated cloud, with a preemption."""
    from controller.rehearsal.rehearsal import open_rehearsal
    from controller.witness.drill import ended_in_order

    with ended_in_order(), open_rehearsal(command.options) as rehearsal:
        try:
            with View(rehearsal.plan, json_lines=command.flags.json, discards=True) as view:
                result = rehearsal.run(view)
            with command.options.showing("checking what the run has left"):
                checks = rehearsal.checks(result)
        except BaseException:
            print(rehearsal.keep_for_inspection(), file=sys.stderr)
            raise
    if command.flags.json:
        rows = [{"proven": check.passed, "words": check.message, "warning": check.doubtful} for check in checks]
        print(dumps({"rehearsed": rehearsal.plan.run_id, "facts": rows}))
    else:
        print_wrapped(_rehearsed_lines(rehearsal.plan, checks), indent=4)
    return 0 if all(check.passed for check in checks) else 2


def _rehearsed_lines(plan: Plan, checks: Sequence[Check]) -> list[str]:
    """Format the checks for people, with what no rehearsal can prove."""
    unproven = ["Google's capacity and quota", "real weights and data", "chip memory"]
    if plan.config.tpu.adopt:
        unproven.insert(0, "an interruption (the pod is adopted)")
    if plan.config.code.stand_in:
        unproven.insert(0, "the program itself (a stand-in ran)")
    return [
        f"rehearsed {plan.config.run.name}:",
        *(f"  {('!' if check.doubtful else '✓') if check.passed else '✗'} {check.message}" for check in checks),
        f"  not rehearsed: {', '.join(unproven)}",
    ]


def run_witness(command: Command) -> int:
    """`slipway witness`: on each plane one small run, preempted once; records, deletes and compares everything."""
    from controller.witness.drill import Limits
    from controller.witness.play import Witness

    usd, minutes, is_json = command.flags.max_dollars, command.flags.minutes, command.flags.json
    witness = Witness(
        command.options,
        Limits(usd, minutes),
        Path(command.flags.output or time.strftime("witness-%Y%m%d-%H%M%S")),
        lambda plan: View(plan, json_lines=is_json, discards=True),
        lambda line: print(line, file=sys.stderr),
        command.flags.plane,
    )
    outcome = witness.play()
    print(dumps(outcome.as_document()) if is_json else "\n".join(_witnessed_lines(outcome)))
    return outcome.exit_code


def _witnessed_lines(outcome: Outcome) -> list[str]:
    """Format the outcome for people."""
    recording, found = outcome.recording, outcome.differences
    lines = [
        f"  {SIGNS.get(stage.outcome, '✗')} {stage.name:<26} {stage.outcome:<12} {stage.seconds:7.1f} s  {stage.detail}"
        for stage in recording.stages
    ]
    for plane, pod in recording.facts["pods"].items():
        usd = pod.get("usd_at_most")
        price = "" if usd is None else f", at most ${usd:.2f} at the list price"
        lines.append(f"{plane}: {pod['type']} was billed for at most {pod.get('minutes_at_most', 0.0)} minutes{price}")
    if outcome.left:
        lines.append(
            f"STILL THERE: {', '.join(outcome.left)}; delete it with `slipway down --all` and `slipway orphans`"
        )
    else:
        lines.append("verified: nothing that it made is left, nothing is billed; the APIs stay enabled")
    lines += [f"error: {why}" for why in outcome.refused]
    if found is not None:
        lines.append(f"the emulated cloud answers otherwise in {plural(len(found), 'place')}: see README.md there")
    lines.append(f"recording: {recording.folder}; read it, then attach it to an issue")
    return lines
