"""`slipway up`: apply the plan, launch, follow, and restart from the last checkpoint when the pod is lost."""

from pathlib import Path

from controller.cli.main import Command
from controller.cli.view import View
from controller.records.last_command import LastCommand, save
from controller.run.drive import open_run
from controller.samplers.crew import drive


def run(command: Command) -> int:
    options = command.options
    with open_run(options) as (plan, context, emulator):
        save(LastCommand(options.overrides, plan.run_id if options.run_id else ""), Path.cwd())
        with View(plan, json_lines=options.json) as view:
            drive(options, plan, context, emulator, view)
    return 0
