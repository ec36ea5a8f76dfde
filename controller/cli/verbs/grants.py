"""`slipway capacity`: where requests for pods were granted, after what wait, and how long the pods lived."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from conf.strict_json import dumps
from controller.cli.verbs.runs import keep_lines
from controller.core.text import fit_table, format_duration, plural, width_of, wrap
from controller.resources.pod.capacity_log import (
    GRANTED,
    PREEMPTED,
    SURPLUS,
    CapacityEntry,
    capacity_file,
    fetch_entries,
    load_entries,
)
from controller.resources.pod.planes import all_planes

if TYPE_CHECKING:
    from controller.cli.main import Command

DAY = 24 * 3600.0
SLOTS = 28
"""Characters of a picture."""
LEGEND = "█ granted  ▄ some granted  × refused  · no request"


def run_capacity(command: Command) -> int:
    days, state = command.flags.days, command.options.state_dir
    now, damaged = time.time(), list[int]()
    if command.flags.refresh:
        from controller.config.run_yaml import bucket_name
        from controller.connect import open_context, project_of

        config, reading = command.options.cloud_config(), "reading the record of capacity in the bucket"
        with open_context(config) as (context, _), command.options.showing(reading):
            bucket = bucket_name(config, project_of(config))
            found = fetch_entries(context, bucket, now - days * DAY, damaged, keep_lines)
    else:
        found = load_entries(state, damaged)
    entries = [entry for entry in found if entry.is_request and entry.time > now - days * DAY]
    if damaged:
        where = f"{capacity_file(state)}: line{'s' * (len(damaged) > 1)} {', '.join(map(str, damaged))}"
        print(f"warning: {where} cannot be read; `slipway capacity --refresh` reads the bucket", file=sys.stderr)
    if command.flags.json:
        print(dumps([entry.to_json() | {"lived_seconds": entry.lived_seconds} for entry in entries], indent=1))
    else:
        print("\n".join(format_entries(entries, days, now, width_of(sys.stdout))))
    return 0


def format_entries(entries: Sequence[CapacityEntry], days: float, now: float, width: int | None) -> list[str]:
    """Format a table of places with a picture of each, from the oldest request on the left to now."""
    span = plural(int(days), "day") if days == int(days) else f"{days:g} days"
    if not entries:
        return [f"no requests for pods in the last {span}; `slipway capacity --refresh` also reads the bucket"]
    groups, several = _by_place(entries), len({_plane(entry.provisioner) for entry in entries}) > 1
    columns = {
        "type": [group[0].accelerator_type for group in groups],
        "zone": [group[0].zone for group in groups],
        "tier": [group[0].tier for group in groups],
        **({"plane": [_plane(group[0].provisioner) for group in groups]} if several else {}),
        "granted": [f"{sum(e.answer == GRANTED for e in g)} of {sum(e.is_answered for e in g)}" for g in groups],
        "waited": [_median(e.waited_seconds for e in group if e.answer == GRANTED) for group in groups],
        "lived": [_lived(group) for group in groups],
        "last": [f"{_answer(group[-1])}, {format_duration(now - group[-1].time)} ago" for group in groups],
        span: [_picture(group, days, now) for group in groups],
    }
    concessions = [(span, None), ("waited", None), ("lived", None)]
    titles, rows, left_out = fit_table(columns, width, concessions, folded="last")
    lines = ["  ".join(titles).rstrip(), *("  ".join(row).rstrip() for row in rows)]
    if span in left_out:
        names = [f"{_place(group[0])}{f', {_plane(group[0].provisioner)}' if several else ''}" for group in groups]
        picture = [f"{_picture(group, days, now)}  {name}" for group, name in zip(groups, names, strict=True)]
        lines += ["", f"the last {span}:", *picture]
    return [*lines, "", wrap(LEGEND, width)]


def _by_place(entries: Iterable[CapacityEntry]) -> list[list[CapacityEntry]]:
    """Group the entries by type, zone, tier and plane; the place with the latest grant comes first."""

    def where(entry: CapacityEntry) -> tuple[str, str]:
        return _place(entry), _plane(entry.provisioner)

    ordered = sorted(entries, key=lambda entry: (*where(entry), entry.time))
    groups = [list(group) for _, group in itertools.groupby(ordered, where)]
    return sorted(groups, key=lambda group: -max((e.time for e in group if e.answer == GRANTED), default=0.0))


def _place(entry: CapacityEntry) -> str:
    return f"{entry.accelerator_type} in {entry.zone} ({entry.tier})"


@cache
def _plane(provisioner: str) -> str:
    """Return the plane of a way to create slices; the way itself if only a later Slipway knows it."""
    ways = {way: plane.title.removeprefix("the ") for plane in all_planes() for way in plane.provisioners(0.0)}
    return ways.get(provisioner, provisioner)


def _answer(entry: CapacityEntry) -> str:
    if entry.answer != GRANTED:
        return entry.answer.replace("_", " ")
    return entry.ended if entry.ended in (PREEMPTED, SURPLUS) else GRANTED


def _median(seconds: Iterable[float | None]) -> str:
    known = [value for value in seconds if value is not None]
    return format_duration(statistics.median(known)) if known else ""


def _lived(group: Sequence[CapacityEntry]) -> str:
    """Format the median life; the slices that exist, or were deleted by their user, might have lived longer.

    One that was given back at once says nothing.
    """
    used = [entry for entry in group if entry.ended != SURPLUS]
    lives = [entry.lived_seconds for entry in used if entry.lived_seconds is not None]
    cut_short = any(entry.ended != PREEMPTED for entry in used if entry.lived_seconds is not None)
    return f"{'≥ ' if cut_short else ''}{_median(lives)}" if lives else ""


def _picture(group: Sequence[CapacityEntry], days: float, now: float) -> str:
    """Draw one character per slot of time; see `LEGEND`."""
    slots: list[list[bool]] = [[] for _ in range(SLOTS)]
    for entry in (one for one in group if one.is_answered):
        slot = int((entry.time - (now - days * DAY)) / (days * DAY) * SLOTS)
        slots[min(max(slot, 0), SLOTS - 1)].append(entry.answer == GRANTED)
    return "".join("·" if not slot else "█" if all(slot) else "▄" if any(slot) else "×" for slot in slots)
