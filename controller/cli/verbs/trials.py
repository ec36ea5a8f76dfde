"""Trials of all that happens to a run: `slipway rehearse` on an emulated cloud, `slipway witness` on Google's."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from controller.cli.main import Command
from controller.cli.view import View
from controller.core.errors import ConfigError
from controller.core.layout import print_wrapped
from controller.plan.build import Plan
from controller.rehearsal.rehearsal import Check, open_rehearsal
from controller.witness.drill import Limits, ended_in_order
from controller.witness.play import Outcome, Witness

SIGNS = {"ok": "✓", "skipped": "-"}


def run_rehearse(command: Command) -> int:
    """`slipway rehearse`: run the same plan, scaled down, on its own emulated cloud, with a preemption."""
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
        print(json.dumps({"rehearsed": rehearsal.plan.run_id, "facts": rows}))
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
    """`slipway witness`: one small run on the project, preempted once; records everything and deletes everything."""
    usd, minutes, is_json = command.flags.usd, command.flags.minutes, command.flags.json
    if usd <= 0 or minutes <= 0:
        raise ConfigError("--usd and --minutes: must be above 0")
    folder = Path(command.flags.output or time.strftime("witness-%Y%m%d-%H%M%S"))
    witness = Witness(
        command.options,
        Limits(usd, minutes),
        folder,
        lambda plan: View(plan, json_lines=is_json, discards=True),
        lambda line: print(line, file=sys.stderr),
    )
    outcome = witness.play()
    print(json.dumps(outcome.as_document()) if is_json else "\n".join(_witnessed_lines(outcome)))
    return outcome.exit_code


def _witnessed_lines(outcome: Outcome) -> list[str]:
    """Format the outcome for people."""
    recording, facts = outcome.recording, outcome.recording.facts
    lines = [
        f"  {SIGNS.get(stage.outcome, '✗')} {stage.name:<12} {stage.outcome:<12} {stage.seconds:7.1f} s  {stage.detail}"
        for stage in recording.stages
    ]
    usd = facts.get("usd_at_most")
    price = "" if usd is None else f", at most ${usd:.2f} at the list price"
    lines.append(f"the pods were billed for at most {facts.get('pod_minutes_at_most', 0.0)} minutes{price}")
    if outcome.left:
        lines.append(
            f"STILL THERE: {', '.join(outcome.left)}; delete it with `slipway down --all` and `slipway orphans`"
        )
    else:
        lines.append("verified: nothing that it made is left; the APIs stay enabled")
    lines += [f"error: {why}" for why in outcome.refused]
    lines.append(f"recording: {recording.folder}; read it, then attach it to an issue")
    return lines
