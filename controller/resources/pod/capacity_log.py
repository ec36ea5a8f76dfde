"""Memory of capacity: every request for a pod, with its answer and how long the pod lived.

Each entry is a line of a file in the state folder and, for other machines, the metadata of an object in the bucket: one
request lists a thousand of them. Nothing is sent anywhere else. An object of its own says how Google shows a slice that
was made otherwise than it was requested.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from conf.strict_json import dumps, loads
from controller.context import Context, SurplusSlice
from controller.core.errors import SlipwayError
from controller.core.json_documents import DamagedRecordError, Document, FormatError, dump, load, type_problem
from controller.core.this_process import iso_timestamp
from controller.gcp.google_errors import GoogleError, NotFoundError
from controller.resources.pod.planes import all_planes
from controller.resources.pod.provisioner import Place, SliceSpec, SliceStatus, pod_object, short_uid
from controller.resources.pod.refusals import Refusal

PREFIX = "capacity/"
"""Objects of the bucket, one per entry; names sort by time."""
GRANTED = "granted"
PREEMPTED = "preempted"
SURPLUS = "surplus"
"""End of a slice that was given back at once: another place had granted one before."""
WITHDRAWN = "withdrawn"
"""Answer of a request that another place has made superfluous."""
RECENT_SECONDS = 24 * 3600.0
"""How long a zone that granted a slice is tried first."""
MAX_MESSAGE = 300
"""Characters kept of Google's answer: an entry has to fit into the 8 KiB of an object's metadata."""


@dataclass(frozen=True, kw_only=True)
class CapacityEntry(Document):
    """One request for a slice, or the end of a slice.

    Attributes:
        id: names the entry; the end of a slice has the id of its request.
        time: when the request was sent, or when the slice was created; seconds since the epoch.
        tier: capacity tier, such as spot.
        answer: `granted`, `withdrawn`, or the kind of refusal; '' in the end of a slice.
        waited_seconds: from the request to the answer.
        message: what Google said about a refusal.
        ended: '' while the slice exists; `preempted`, or `deleted` by Slipway, as `surplus` if it was never used.
        ended_time: when Slipway deleted it or what the preemption left of it; seconds since the epoch.
    """

    id: str
    time: float
    project: str
    provisioner: str
    zone: str
    tier: str
    accelerator_type: str
    pod: str
    answer: str = ""
    waited_seconds: float | None = None
    message: str = ""
    ended: str = ""
    ended_time: float | None = None

    @classmethod
    def from_json(cls, body: Any, where: str = "") -> Self:
        """Parse what `to_json` wrote. Raises FormatError, KeyError or ValueError if it is no such entry."""
        return cls._adapter().validate_python(vars(super().from_json(body, where)))

    @classmethod
    @cache
    def _adapter(cls) -> TypeAdapter[Self]:
        """Return what checks the types of an entry; to build one takes longer than to check a thousand entries."""
        return TypeAdapter(cls)

    @property
    def is_request(self) -> bool:
        """Whether this tells how a request was answered; the end of a slice of another machine may stand alone."""
        return bool(self.answer)

    @property
    def is_answered(self) -> bool:
        """Whether Google has said whether there was capacity."""
        return self.is_request and self.answer != WITHDRAWN

    @property
    def lived_seconds(self) -> float | None:
        """How long a granted slice existed; None if it exists, or nobody saw its end."""
        if self.ended_time is None or self.waited_seconds is None:
            return None
        return max(0.0, self.ended_time - self.time - self.waited_seconds)


def capacity_file(state: Path) -> Path:
    return state / "capacity.jsonl"


def record_answer(
    context: Context, name: str, spec: SliceSpec, place: Place, asked: float, answer: Refusal | SliceStatus
) -> None:
    """Record how a request of time `asked` was answered: by a refusal, or by a slice that is READY."""
    about: dict[str, Any] = {"time": asked, "waited_seconds": round(context.clock.now() - asked, 1)}
    if isinstance(answer, Refusal):
        about |= {"id": _request_id(name, asked), "answer": answer.kind, "message": answer.message[:MAX_MESSAGE]}
    else:
        about |= {"id": _slice_id(name, answer), "answer": GRANTED}
    _record(context, name, place, spec, **about)


def record_surplus(
    context: Context, name: str, spec: SliceSpec, place: Place, asked: float, given: SliceStatus | None
) -> None:
    """Record that a request of time `asked` was given back, with the slice that had come of it, if one had."""
    if given is not None:
        record_answer(context, name, spec, place, asked, given)
        record_end(context, name, given, SURPLUS)
        return
    waited = round(context.clock.now() - asked, 1)
    about = {"id": _request_id(name, asked), "time": asked, "answer": WITHDRAWN, "waited_seconds": waited}
    _record(context, name, place, spec, **about)


def record_end(context: Context, name: str, status: SliceStatus, why: str = "deleted") -> None:
    """Record that a slice has been deleted, and whether Google had taken it before; `why` otherwise."""
    if not status.uid or not status.created:
        return  # a request that has brought up nothing
    ended = PREEMPTED if status.state in ("PREEMPTED", "TERMINATED") else why
    about = {"id": _slice_id(name, status), "time": status.created, "ended": ended, "ended_time": context.clock.now()}
    _record(context, name, status.place, status.spec, **about)
    if why == SURPLUS:
        kind, place = status.spec.accelerator_type, status.place
        context.on_surplus(SurplusSlice(status.uid, name, kind, place.zone, place.capacity, status.billed_since))


def record_echo(context: Context, pod: str, uid: str, shown: Mapping[str, Any]) -> None:
    """Record the settings that Google shows otherwise than they were requested. Raises GoogleError."""
    context.google.upload(context.bucket, pod_object("echoes", pod, uid), dump({"shown": dict(shown)}).encode())


def recorded_echo(context: Context, pod: str, status: SliceStatus) -> dict[str, Any]:
    """Return what `record_echo` has recorded of a slice; all that Google shows if the record cannot be read.

    Without it nobody knows whether the slice is another one, and it is not to be deleted for that.
    """
    if not context.bucket:
        return {}
    name = pod_object("echoes", pod, status.uid)
    try:
        found = load(context.google.download(context.bucket, name), f"gs://{context.bucket}/{name}")
        if problem := type_problem(found.get("shown"), dict, "shown"):
            raise DamagedRecordError(f"gs://{context.bucket}/{name} is damaged: {problem}")
    except NotFoundError:
        return {}
    except SlipwayError as error:
        context.events.note(f"node/{pod}", f"cannot see whether it was requested as Google shows it: {error}")
        return dict(status.spec.at(status.place))
    return found["shown"]


def _record(context: Context, name: str, place: Place, spec: SliceSpec, **about: Any) -> None:
    """Record an entry about a place and the type of a slice, on this machine and in the bucket."""
    entry = CapacityEntry(
        project=context.project,
        provisioner=place.provisioner,
        zone=place.zone,
        tier=place.capacity,
        accelerator_type=spec.accelerator_type,
        pod=name,
        **about,
    )
    context.local_notes.append(capacity_file(context.state_dir), f"{_line(entry)}\n")
    if not context.bucket:
        return
    try:
        object_name = f"{PREFIX}{entry.id}{'.ended' if entry.ended else ''}"
        context.google.upload(context.bucket, object_name, b"", metadata={"entry": _line(entry)})
    except GoogleError as error:  # a search must not fail for want of a record
        context.events.note(f"node/{entry.pod}", f"the answer is on record on this machine only: {error}")


def load_entries(state: Path, damaged: list[int] | None = None) -> list[CapacityEntry]:
    """Return the entries of this machine by time; the numbers of damaged lines go into `damaged`.

    Raises FormatError if a later Slipway wrote one.
    """
    return _merged(_read(state, damaged))


def fetch_entries(
    context: Context,
    bucket: str,
    since: float,
    damaged: list[int] | None = None,
    append: Callable[[Path, str], None] | None = None,
) -> list[CapacityEntry]:
    """Copy the bucket's entries to this machine's file; return all entries. Raises GoogleError.

    Args:
        context: its project's entries are copied.
        bucket: where they are; one that does not exist has none.
        since: only slices and requests from this time on; seconds since the epoch.
        damaged: gets the numbers of this machine's damaged lines.
        append: adds lines to the file; by default as notes of the run.
    """
    where = {"bucket": bucket, "prefix": PREFIX, "startOffset": PREFIX + _stamp(since)}
    here = _read(context.state_dir, damaged)
    known = {(entry.id, entry.ended) for entry in here}
    found: list[CapacityEntry] = []
    try:
        fields = "items(metadata),nextPageToken"
        for item in context.google.list_all("storage", "objects.list", "items", **where, fields=fields):
            entry = _parse(item.get("metadata", {}).get("entry", ""))
            if entry is not None and (entry.id, entry.ended) not in known:
                found.append(entry)
    except NotFoundError:
        return _merged(here)
    text = "".join(f"{_line(entry)}\n" for entry in found)
    (append or context.local_notes.append)(capacity_file(context.state_dir), text)
    return _merged([*here, *found])


def recent_places_first(
    places: Sequence[Place], accelerator_type: str, entries: Sequence[CapacityEntry], now: float
) -> list[Place]:
    """Return the places with those zones first that lately granted a slice of this type, the latest of them first.

    A zone counts once for each plane. Its answer counts for `RECENT_SECONDS`, until it refuses a request or preempts
    the slice. Otherwise, and among the tiers of one zone, the order stays.
    """
    planes = {way: index for index, plane in enumerate(all_planes()) for way in plane.provisioners(0.0)}
    granted: dict[tuple[str, int | None], float] = {}
    for entry in entries:  # by time: the last one counts
        if entry.accelerator_type == accelerator_type and now - entry.time < RECENT_SECONDS and entry.is_answered:
            is_good = entry.answer == GRANTED and entry.ended != PREEMPTED
            granted[entry.zone, planes.get(entry.provisioner)] = entry.time if is_good else 0.0
    return sorted(places, key=lambda place: -granted.get((place.zone, planes[place.provisioner]), 0.0))


def _line(entry: CapacityEntry) -> str:
    return dumps(entry.to_json())


def _read(state: Path, damaged: list[int] | None = None) -> list[CapacityEntry]:
    file = capacity_file(state)
    found: list[CapacityEntry] = []
    for number, line in enumerate(file.read_bytes().splitlines() if file.is_file() else (), 1):
        if (entry := _parse(line)) is not None:
            found.append(entry)
        elif damaged is not None:
            damaged.append(number)
    return found


def _parse(text: str | bytes) -> CapacityEntry | None:
    """Parse a line; None for anything else, such as a line cut short by a crash, or one of a later Slipway."""
    try:
        return CapacityEntry.from_json(loads(text))
    except (FormatError, KeyError, TypeError, ValueError, RecursionError):
        return None


def _merged(entries: Sequence[CapacityEntry]) -> list[CapacityEntry]:
    """Join each request with the end of its slice, whichever came first, and sort by time."""
    made: dict[str, CapacityEntry] = {}
    for entry in entries:
        other = made.get(entry.id, entry)
        request, end = (entry, other) if entry.is_request else (other, entry)
        ended_time = request.ended_time if end.ended_time is None else end.ended_time
        made[entry.id] = replace(request, ended=end.ended or request.ended, ended_time=ended_time)
    return sorted(made.values(), key=lambda entry: entry.time)


def _request_id(name: str, asked: float) -> str:
    return f"{_stamp(asked)}-{name}-{uuid.uuid4().hex[:12]}"


def _slice_id(name: str, status: SliceStatus) -> str:
    return f"{_stamp(status.created)}-{name}-{short_uid(status.uid)}"


def _stamp(seconds: float) -> str:
    """Return a time as the beginning of an object's name."""
    return iso_timestamp(seconds).replace(":", "").replace("-", "")
