"""Set up a cloud: `slipway init` for Google's, `slipway localcloud` for the emulated one.

`localcloud` needs nothing of Google's: what only `init` imports stands in its functions.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from conf.schema.cloud import LocalCloud
from conf.schema.topology import zone_region
from conf.strict_json import dumps
from controller import emulator
from controller.cli.main import Command
from controller.config.compose import compose, sound
from controller.core.errors import ConfigError
from controller.core.events import confirm
from controller.core.text import plural
from controller.gcp.credentials import absent_file
from controller.records import index

if TYPE_CHECKING:
    from conf.schema.config import Config
    from controller.cli.verbs.placements import PlacementChoice, Placements
    from controller.context import Context

SIGN_IN_MESSAGE = (
    "no Google credentials; run\n  gcloud auth login\n  gcloud auth application-default login\n"
    "(to install gcloud: https://cloud.google.com/sdk/docs/install), or try cloud=local first, which needs no account"
)


def run_init(command: Command) -> int:
    """`slipway init`: set up credentials, project, and a zone with quota; writes cloud=mine and tpu=mine."""
    from controller.cli.verbs.placements import find_placements
    from controller.connect import open_context, project_of, require_project

    config = command.options.cloud_config()
    project = require_project(project_of(config))
    folder = Path.cwd() / "slipway"
    files = [folder / "cloud" / "mine.yaml", folder / "tpu" / "mine.yaml"]
    present = [str(file) for file in files if file.exists()]
    if present and not command.flags.yes:
        raise ConfigError(f"{' and '.join(present)} already there; pass --yes to overwrite")
    with open_context(config) as (context, _):
        if not context.google.has_credentials:
            raise ConfigError(absent_file() or SIGN_IN_MESSAGE)
        with command.options.showing("asking what every zone offers, and for the quotas"):
            placements = find_placements(context)
        if placements.unknown:
            print(placements.unknown_words, file=sys.stderr)
        choice = _select(command, placements)
        _write_config(files, config, project, choice)
        bucket = _create_bucket(command, config, project, choice, context)
    _print_result(command, files, choice, bucket, placements)
    return 0


def _select(command: Command, placements: Placements) -> PlacementChoice:
    """Return the zone of --zone, the user's choice, or the largest quota if the user cannot be asked."""
    offered, why = placements.choices, placements.why
    if not offered:
        raise ConfigError(
            "no zone has TPU quota for this project: request some (IAM & Admin > Quotas), or apply for TRC"
        )
    if command.flags.zone:
        there = [choice for choice in offered if choice.zone == command.flags.zone]
        if not there:
            zones = ", ".join(dict.fromkeys(choice.zone for choice in offered))
            raise ConfigError(f"--zone {command.flags.zone}: no TPUs available there; zones: {zones}")
        return there[0]
    if command.flags.json or not sys.stdin.isatty():
        return offered[0]
    shown = offered[:30]
    if why:
        print(f"could not read the quota: {why}; these are the types that the zones offer:")
    for number, choice in enumerate(shown, 1):
        print(f"{number:>3}  {choice}")
    if len(offered) > len(shown):
        print(f"     and {len(offered) - len(shown)} more; choose one with --zone ZONE")
    answer = input(f"Choose a number [1-{len(shown)}, default 1]: ").strip() or "1"
    if not answer.isdigit() or not 1 <= int(answer) <= len(shown):
        raise ConfigError(f"invalid choice {answer!r}: expected 1 to {len(shown)}; nothing was written")
    return shown[int(answer) - 1]


def _write_config(files: list[Path], config: Config, project: str, choice: PlacementChoice) -> None:
    head = "# Created by `slipway init`; edit as needed.\ndefaults:\n"
    base = "local" if config.cloud.kind == "local" else "gcp"
    texts = (
        f"{head}  - {base}\n  - _self_\nproject: {project}\n",
        f"{head}  - v5litepod_16\n  - _self_\naccelerator_type: {choice.accelerator_type}\nzone: {choice.zone}\n"
        f"capacity: {choice.capacity}\n" + (f"plane: {choice.plane}\n" if choice.plane != "tpu_api" else ""),
    )
    for file, text in zip(files, texts, strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def _create_bucket(
    command: Command, config: Config, project: str, choice: PlacementChoice, context: Context
) -> str | None:
    """Return the bucket for runs in the zone's region, created now if the user agrees; else `up` creates it."""
    from controller.config.run_yaml import bucket_name
    from controller.plan.project_steps import shared_resources
    from controller.reconcile import reconcile
    from controller.resources.bucket import Bucket
    from controller.resources.services import Services

    if command.flags.no_bucket:
        return None
    tpu = config.tpu.model_copy(update={"zone": choice.zone, "fallback_zones": ()})
    placed = config.model_copy(update={"tpu": tpu})
    name = bucket_name(placed, project)
    question = f"Create bucket {name} in {placed.cloud.bucket_location or zone_region(choice.zone)} now?"
    if not command.flags.yes and (command.flags.json or not confirm(question)):
        return None
    with command.options.showing(f"creating {name}"):
        reconcile([r for r in shared_resources(placed, name) if isinstance(r, Services | Bucket)], context)
    return name


def _print_result(
    command: Command, files: list[Path], choice: PlacementChoice, bucket: str | None, placements: Placements
) -> None:
    names = [str(file.relative_to(Path.cwd())) for file in files]
    if command.flags.json:
        rows = [{**asdict(c), "chips": None if c.chips == float("inf") else c.chips} for c in placements.choices]
        chosen = {**rows[placements.choices.index(choice)], "accelerator_type": choice.accelerator_type}
        document = {"files": names, "chosen": chosen, "bucket": bucket, "choices": rows, "unknown": placements.unknown}
        print(dumps(document, indent=1))
        return
    print(f"wrote {' and '.join(names)}: {choice.accelerator_type}, {choice.capacity} in {choice.zone}")
    print(f"created bucket {bucket}" if bucket else "the first `slipway up` creates the bucket")
    print("next: slipway plan +experiment=gemma2b_gsm8k cloud=mine tpu=mine")


def run_localcloud(command: Command) -> int:
    """`slipway localcloud start|stop|wipe|env|requests`: manage the emulated cloud."""
    config = sound(compose([*command.overrides, "cloud=local"]))
    assert isinstance(config.cloud, LocalCloud)
    action = command.flags.action
    if action == "start":
        running = emulator.ensure_running(config.cloud, config.run.state_dir)
        print(f"the emulated cloud runs at {running.url}; `slipway localcloud env` prints the exports")
        return 0
    if action == "wipe" and not _confirm_wipe(config.run.state_dir, yes=command.flags.yes):
        raise ConfigError("nothing was deleted; pass --yes to skip the prompt")
    status, text = emulator.run_emulator_verb([action], emulator.state_folder(config.run.state_dir), show=True)
    sys.stderr.write(text)
    if action == "wipe" and status == 0:
        print("deleted: the emulated cloud with its buckets and pods; the table of runs and their metrics stay")
    return status


def _confirm_wipe(state_dir: str, *, yes: bool) -> bool:
    """Ask before the results of emulated runs are deleted; return whether to go on."""
    rows = index.load_rows(Path(state_dir).expanduser())
    count = sum(row.get("cloud") == "local" for row in rows)
    question = f"Delete the emulated cloud, and in its buckets the results of {plural(count, 'run')}?"
    return confirm(question, yes=yes)
