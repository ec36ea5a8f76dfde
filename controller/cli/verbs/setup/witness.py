"""`slipway witness`: one small run on the project, preempted once; records everything and deletes everything."""

import json
import sys
import time
from pathlib import Path

from controller.cli.main import Command
from controller.cli.view import View
from controller.core.errors import ConfigError
from controller.witness.drill import Limits
from controller.witness.play import Outcome, Witness

SIGNS = {"ok": "✓", "skipped": "-"}


def run(command: Command) -> int:
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
    print(json.dumps(outcome.as_document()) if is_json else "\n".join(as_lines(outcome)))
    return outcome.exit_code


def as_lines(outcome: Outcome) -> list[str]:
    """Format the outcome for people."""
    recording = outcome.recording
    facts = recording.facts
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
