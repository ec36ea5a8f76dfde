"""Set up a cloud: `slipway init` for Google's, `slipway localcloud` for the emulated one.

`localcloud` needs nothing of Google's: what only `init` imports stands in its functions.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conf.schema.cloud import LocalCloud
from conf.schema.topology import find_topology, tpu_type_table, zone_region
from conf.strict_json import dumps
from controller import emulator
from controller.cli.main import Command
from controller.config.compose import compose
from controller.core.errors import ConfigError
from controller.core.events import confirm
from controller.core.text import plural
from controller.records import index

if TYPE_CHECKING:
    from conf.schema.config import Config
    from controller.context import Context

SIGN_IN_MESSAGE = (
    "no Google credentials; run\n  gcloud auth login\n  gcloud auth application-default login\n"
    "(to install gcloud: https://cloud.google.com/sdk/docs/install), or try cloud=local first, which needs no account"
)
SMALL_SLICE_CHIPS = 16
"""Largest number of chips to suggest, however large the quota."""


@dataclass(frozen=True)
class PlacementChoice:
    """A generation in a zone in a tier; `chips` is the quota, None if it is unknown."""

    generation: str
    zone: str
    capacity: str
    chips: float | None
    usd_per_chip_hour: float | None

    @property
    def accelerator_type(self) -> str:
        """The largest of the small types of the generation that the quota allows."""
        most = min(SMALL_SLICE_CHIPS, SMALL_SLICE_CHIPS if self.chips is None else self.chips)
        types = [find_topology(name) for name, row in tpu_type_table()["types"].items() if row[0] == self.generation]
        fitting = [t for t in types if t.chips <= most] or [min(types, key=lambda t: t.chips)]
        return max(fitting, key=lambda t: t.chips).accelerator_type

    def __str__(self) -> str:
        chips = "?" if self.chips is None else "no limit" if self.chips == float("inf") else f"{self.chips:.0f}"
        price = f"${self.usd_per_chip_hour:.2f}" if self.usd_per_chip_hour is not None else "?"
        return f"{self.generation:<5} {self.zone:<24} {self.capacity:<10} {chips:>8} chips {price:>8} per chip-hour"


def run_init(command: Command) -> int:
    """`slipway init`: set up credentials, project, and a zone with quota; writes cloud=mine and tpu=mine."""
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
            raise ConfigError(SIGN_IN_MESSAGE)
        with command.options.showing("asking for the quota of every zone"):
            offered, why = list_choices(context)
        choice = _select(command, offered, why)
        _write_config(files, config, project, choice)
        bucket = _create_bucket(command, config, project, choice, context)
    _print_result(command, files, choice, bucket, offered)
    return 0


def list_choices(context: Context) -> tuple[list[PlacementChoice], str]:
    """Return the possible choices, sufficient quota first, then the cheapest; and why no quota is known."""
    from controller.gcp.google_errors import ForbiddenError, GoogleError, ServiceDisabledError
    from controller.resources.pod.tpu_api import METRICS, quota_limit, quota_limits

    try:
        limits, why = quota_limits(context), ""
    except ServiceDisabledError as error:
        limits, why = {}, f"{error.service} is not enabled yet"
    except GoogleError as error:
        limits, why = {}, f"permission denied ({error.message})" if isinstance(error, ForbiddenError) else str(error)
    found = []
    for generation in METRICS:
        facts = tpu_type_table()["generations"][generation]
        for zone in facts["zones"]:
            prices = facts["usd_per_chip_hour"].get(zone, (None, None))
            for capacity, price in zip(("on_demand", "spot"), prices, strict=True):
                limit = quota_limit(limits, generation, zone, capacity)
                chips = limit.chips if limit else None
                if chips is None or chips > 0:
                    found.append(PlacementChoice(generation, zone, capacity, chips, price))
    known = [choice for choice in found if choice.chips is not None]
    if known:
        return sorted(known, key=_sort_key), ""
    return sorted(_filter_offered(context, found), key=_sort_key), why or "Google's response contains no TPU quota"


def _sort_key(choice: PlacementChoice) -> tuple[float, float]:
    few = SMALL_SLICE_CHIPS if choice.chips is None else min(choice.chips, SMALL_SLICE_CHIPS)
    return -few, choice.usd_per_chip_hour if choice.usd_per_chip_hour is not None else float("inf")


def _filter_offered(context: Context, found: list[PlacementChoice]) -> list[PlacementChoice]:
    """Keep the choices whose zone offers a type of the generation, as far as Google reports that."""
    from concurrent.futures import ThreadPoolExecutor

    from controller.gcp.google_errors import GoogleError, ServiceDisabledError

    def types_in(zone: str) -> set[str] | None:
        parent = f"projects/{context.project}/locations/{zone}"
        try:
            listed = context.google.list_all(
                "tpu", "projects.locations.acceleratorTypes.list", "acceleratorTypes", parent=parent
            )
            return {item.get("type", item["name"].rpartition("/")[2]) for item in listed}
        except ServiceDisabledError:
            return None
        except GoogleError:
            return set()

    zones = sorted({choice.zone for choice in found})
    with ThreadPoolExecutor(max_workers=16) as pool:
        types = dict(zip(zones, pool.map(types_in, zones), strict=True))
    kinds = {name: row[0] for name, row in tpu_type_table()["types"].items()}

    def is_there(choice: PlacementChoice) -> bool:
        there = types[choice.zone]
        return there is None or any(kinds.get(name) == choice.generation for name in there)

    return [choice for choice in found if is_there(choice)]


def _select(command: Command, offered: list[PlacementChoice], why: str) -> PlacementChoice:
    """Return the zone of --zone, the user's choice, or the largest quota if the user cannot be asked."""
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
        f"capacity: {choice.capacity}\n",
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
    command: Command, files: list[Path], choice: PlacementChoice, bucket: str | None, offered: list[PlacementChoice]
) -> None:
    names = [str(file.relative_to(Path.cwd())) for file in files]
    if command.flags.json:
        chosen = {**asdict(choice), "accelerator_type": choice.accelerator_type}
        rows = [{**asdict(c), "chips": None if c.chips == float("inf") else c.chips} for c in offered]
        print(dumps({"files": names, "chosen": chosen, "bucket": bucket, "choices": rows}, indent=1))
        return
    print(f"wrote {' and '.join(names)}: {choice.accelerator_type}, {choice.capacity} in {choice.zone}")
    print(f"created bucket {bucket}" if bucket else "the first `slipway up` creates the bucket")
    print("next: slipway plan +experiment=gemma2b_gsm8k cloud=mine tpu=mine")


def run_localcloud(command: Command) -> int:
    """`slipway localcloud start|stop|wipe|env|requests`: manage the emulated cloud."""
    config, problems = compose([*command.overrides, "cloud=local"])
    if config is None or problems:
        raise ConfigError(problems)
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
