"""`slipway rehearse`: run the same plan, scaled down, on its own emulated cloud, with a preemption."""

import json
import sys
from collections.abc import Sequence

from controller.cli.main import Command
from controller.cli.view import View
from controller.core.layout import print_wrapped
from controller.plan.build import Plan
from controller.rehearsal.rehearsal import Check, open_rehearsal
from controller.witness.limits import ended_in_order


def run(command: Command) -> int:
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
        print_wrapped(as_lines(rehearsal.plan, checks), indent=4)
    return 0 if all(check.passed for check in checks) else 2


def as_lines(plan: Plan, checks: Sequence[Check]) -> list[str]:
    """Format the checks for people, with what no rehearsal can prove."""
    unproven = ["Google's capacity and quota", "real weights and data", "chip memory"]
    if plan.config.tpu.adopt:
        unproven.insert(0, "an interruption (the pod is adopted)")
    if plan.config.code.stand_in:
        unproven.insert(0, "the program itself (a stand-in ran)")
    return [
        f"rehearsed {plan.config.run.name}:",
        *(f"  {_mark(check)} {check.message}" for check in checks),
        f"  not rehearsed: {', '.join(unproven)}",
    ]


def _mark(check: Check) -> str:
    return ("!" if check.doubtful else "✓") if check.passed else "✗"
