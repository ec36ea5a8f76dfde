"""Cost of a run so far: the lifetime of each of its pods, recorded in the bucket, times the hourly price.

A pod created for the run counts from its creation, one left by an earlier run from when this run took it over. It
counts until it is deleted or stopped, or another run takes it over, idle hours included.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, ClassVar

from conf.schema.config import Config
from conf.strict_json import dumps
from controller.context import Context, SurplusSlice
from controller.core.json_documents import DamagedRecordError, Document, UnreadableError, checked, dump
from controller.core.text import object_url
from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import NotFoundError
from controller.gcp.prices import HourlyPrice, hourly_price
from controller.records.ledger import parse_record, read_objects
from controller.resources.pod.node import Node
from controller.resources.pod.provisioner import pod_object, short_uid


@dataclass(frozen=True)
class PodLifetime(Document):
    """Lifetime of one pod of a run. Times in seconds since the epoch; `ended` is None while the pod is in use."""

    KEYS: ClassVar = {"why": "reason"}

    uid: str
    pod: str
    accelerator_type: str
    zone: str
    capacity: str
    usd_per_hour: float | None
    began: float
    ended: float | None = None
    why: str = ""

    @property
    def key(self) -> str:
        """Return the unique key of this lifetime; a pod that was stopped and started has several."""
        return f"{short_uid(self.uid)}-{self.began:.0f}"

    def hours(self, now: float) -> float:
        return max(0.0, (now if self.ended is None else self.ended) - self.began) / 3600


@dataclass(frozen=True)
class PodUsage:
    """Pod hours and their cost; `usd` is None if a price is unknown."""

    hours: float
    usd: float | None

    def __str__(self) -> str:
        cost = f", about ${self.usd:.2f}" if self.usd is not None else ""
        return f"{format_hours(self.hours)}{cost}"


def format_hours(hours: float) -> str:
    """Return `3.20 pod hours`, or minutes if there are few."""
    return f"{hours:.2f} pod hours" if hours >= 0.5 else f"{60 * hours:.1f} pod minutes"


class Account:
    """What a run and its runs of samplers spend together, which is what a budget limits."""

    def __init__(self, pods: int = 1, usd_per_hour: float | None = None) -> None:
        """pods: that are billed at the same time; usd_per_hour: of all of them, None if unknown."""
        self.pods, self.usd_per_hour = pods, usd_per_hour
        self._parts: dict[str, Spending] = {}

    def add(self, run_id: str, spending: "Spending") -> None:
        """Count a run."""
        self._parts[run_id] = spending

    def usage(self) -> PodUsage:
        spent = [part.usage() for part in self._parts.values() if part.lifetimes()]
        known = [each.usd for each in spent if each.usd is not None]
        is_known = bool(spent) and len(known) == len(spent)
        return PodUsage(sum(each.hours for each in spent), sum(known) if is_known else None)


class Spending:
    """Cost account of one run. A damaged object ends no run: `problems` names it."""

    def __init__(
        self,
        google: GoogleClient,
        clock: Clock,
        bucket: str,
        run_id: str,
        config: Config,
        account: Account | None = None,
    ) -> None:
        """account: what the budget limits; None: this run alone."""
        self._google, self._clock, self._bucket = google, clock, bucket
        self._run_id, self._config = run_id, config
        self._lifetimes: dict[str, PodLifetime] = {}
        self._loaded = False
        self._lock = threading.RLock()
        """Held to change the lifetimes: the account of a run is also read by the controllers of its samplers."""
        self.problems: list[str] = []
        self.account = account or Account()
        self.account.add(run_id, self)

    @property
    def has_limit(self) -> bool:
        budget = self._config.budget
        return budget.max_usd is not None or budget.max_hours is not None

    def rate(self, node: Node | None = None) -> HourlyPrice:
        """Return the hourly price of the run's pod, for its actual place and capacity type once they are known."""
        if node is None:
            return hourly_price(self._config, self._clock.now())
        return hourly_price(self._config, self._clock.now(), node.place.zone, node.place.capacity)

    def lifetimes(self) -> list[PodLifetime]:
        if not self._loaded:
            self.reload()
        return sorted(self._lifetimes.values(), key=lambda life: life.began)

    def reload(self) -> None:
        """Read the lifetimes again: another controller may have written some."""
        with self._lock:
            self._lifetimes = {life.key: life for life in self._read_all()}
            self._loaded = True

    def usage(self) -> PodUsage:
        lives, now = self.lifetimes(), self._clock.now()
        known = [life.usd_per_hour for life in lives]
        hours = sum(life.hours(now) for life in lives)
        usd = sum(life.hours(now) * (life.usd_per_hour or 0.0) for life in lives)
        return PodUsage(hours, None if None in known or not lives else usd)

    def is_billed(self, node: Node) -> bool:
        """Return whether the run is billed for this pod already."""
        return any(life.uid == node.status.uid and life.ended is None for life in self.lifetimes())

    def open_billing(self, node: Node, *, if_new: bool = False) -> None:
        """Start the lifetime of a pod: now, or at its creation if this run is its first user.

        With `if_new`, do so only if no run has used the pod yet.
        """
        if self.is_billed(node):
            return
        now = self._clock.now()
        try:
            claim = read_claim(self._google, self._bucket, node.name, node.status.uid)
        except UnreadableError as error:
            self.problems.append(str(error))
            claim = {}
        if claim and if_new:
            return
        began = node.status.billed_since if node.status.billed_since and not claim else now
        if claim and claim["latest"] != self._run_id:
            Spending(self._google, self._clock, self._bucket, claim["latest"], self._config).close_billing(
                f"taken over by {self._run_id}"
            )
        price = self.rate(node).total
        kind, place = node.status.spec.accelerator_type, node.place
        self._write(PodLifetime(node.status.uid, node.name, kind, place.zone, place.capacity, price, min(began, now)))
        self._claim(node, claim)

    def add_surplus(self, given: SurplusSlice) -> None:
        """Count a slice that was granted beside the pod, from its beginning until now."""
        now = self._clock.now()
        price = hourly_price(self._config, now, given.zone, given.capacity).total
        where = (given.uid, given.pod, given.accelerator_type, given.zone, given.capacity, price)
        self._write(PodLifetime(*where, min(given.began or now, now), now, "given back: another place was first"))

    def close_billing(self, why: str) -> None:
        """End the lifetime of the run's pod now; here also if the bucket does not take it."""
        ended = [replace(life, ended=self._clock.now(), why=why) for life in self.lifetimes() if life.ended is None]
        for life in ended:
            self._keep(life)
        for life in ended:
            self._write(life)

    def write_ends(self) -> None:
        """Write the ends of lifetimes that the bucket has not taken before."""
        write_ends(self._google, self._bucket, self._run_id, self.lifetimes())

    def close_lost(self, uid: str) -> None:
        """End the lifetimes of pods that vanished unobserved, for this object alone.

        `uid` is the current pod, empty if none.
        """
        for life in self.lifetimes():
            if life.ended is None and life.uid != uid:
                self._keep(self._ended_unseen(life))

    def close_vanished(self, context: Context, pod: Node) -> None:
        """End on record the lifetimes of pods that vanished while no controller looked: a budget must not count it.

        A lifetime under another name or in another zone than the pod's is left open: nobody has looked there.

        Args:
            context: any context of the run's project.
            pod: the run's pod as its plan has it.
        """
        billed = [life for life in self.lifetimes() if life.ended is None and life.pod == pod.name]
        if not billed:
            return
        uid = billed_uid(pod.find(context, {life.uid for life in billed}))
        for life in billed:
            if life.uid != uid and pod.is_visible_in(context, life.zone):
                self._write(self._ended_unseen(life))

    def _ended_unseen(self, life: PodLifetime) -> PodLifetime:
        """Return a lifetime with an end: when the watchdog's note was written, else the log for the last time.

        Both by the bucket's clock: that of a worker may be wrong.
        """
        word = watchdog_note(self._google, self._bucket, life.pod, life.uid)
        written = self._last_upload(pod_object("ends", life.pod, life.uid)) if word else 0.0
        ended = max(written or self._last_upload(f"runs/{self._run_id}/logs/"), life.began)
        return replace(life, ended=ended, why=word.get("reason", "the pod disappeared"))

    def _last_upload(self, prefix: str) -> float:
        items = self._google.objects(self._bucket, prefix)
        return max((datetime.fromisoformat(item["updated"]).timestamp() for item in items), default=0.0)

    def budget_exceeded(self) -> str:
        """Return why the run must end, empty while it is within its budget."""
        if not self.has_limit:
            return ""
        budget, spent = self._config.budget, self.account.usage()
        if budget.max_hours is not None and spent.hours >= budget.max_hours:
            return f"its pods have run for {spent.hours:.2f} h, and budget.max_hours is {budget.max_hours:g}"
        if budget.max_usd is not None and spent.usd is not None and spent.usd >= budget.max_usd:
            return f"it has cost about ${spent.usd:.2f}, and budget.max_usd is {budget.max_usd:g}"
        return ""

    def hours_left(self) -> float | None:
        """Return the hours until the budget is used up, if all pods are billed until then; None without a budget."""
        if not self.has_limit:
            return None
        budget, spent = self._config.budget, self.account.usage()
        left = [] if budget.max_hours is None else [(budget.max_hours - spent.hours) / self.account.pods]
        lives = self.lifetimes()
        price = lives[-1].usd_per_hour if lives else self.rate().total
        if self.account.pods > 1:
            price = self.account.usd_per_hour
        if budget.max_usd is not None and price:
            left.append((budget.max_usd - (spent.usd or 0.0)) / price)
        return max(0.0, min(left)) if left else None

    def _read_all(self) -> list[PodLifetime]:
        objects = read_objects(self._google, self._bucket, f"runs/{self._run_id}/pods/")
        found = [self._parse(item, content) for item, content in objects]
        return [life for life in found if life is not None]

    def _parse(self, item: dict[str, Any], content: bytes) -> PodLifetime | None:
        """Parse a lifetime; one whose record is damaged counts from the time in its name to its last write.

        An object that is no lifetime by its name either does not count.
        """
        try:
            return parse_record(content, PodLifetime.from_json, item["name"])
        except UnreadableError as error:
            self.problems.append(str(error))
            uid, _, began = item["name"].rpartition("/")[2].removesuffix(".json").rpartition("-")
            if not began.isdecimal():
                return None
            written = datetime.fromisoformat(item["updated"]).timestamp()
            ended = max(float(began), written)
            return PodLifetime(uid, "unknown", "", "", "", self.rate().total, float(began), ended, str(error))

    def _write(self, life: PodLifetime) -> None:
        self._keep(life)
        name = f"runs/{self._run_id}/pods/{life.key}.json"
        self._google.upload(self._bucket, name, dumps(life.to_json()).encode())

    def _keep(self, life: PodLifetime) -> None:
        with self._lock:
            self._lifetimes = {**self._lifetimes, life.key: life}

    def _claim(self, node: Node, claim: dict[str, Any]) -> None:
        body = {"first": claim.get("first", self._run_id), "latest": self._run_id, "uid": node.status.uid}
        self._google.upload(self._bucket, pod_object("claims", node.name, node.status.uid), dump(body).encode())


def write_ends(google: GoogleClient, bucket: str, run_id: str, lives: Sequence[PodLifetime]) -> None:
    """Write the lifetimes that have ended, but not over an end that is on record."""
    for life in lives:
        name = f"runs/{run_id}/pods/{life.key}.json"
        try:
            known = parse_record(google.download(bucket, name), PodLifetime.from_json, name).ended
        except (NotFoundError, UnreadableError):
            known = None
        if life.ended is not None and known is None:
            google.upload(bucket, name, dumps(life.to_json()).encode())


def billed_uid(pod: object) -> str:
    """Return the uid of a pod that is there and billed; '' if it is not, or lies dead."""
    if not isinstance(pod, Node):
        return ""
    status = pod.status
    return status.uid if status.is_ready or status.pending or status.is_under_repair else ""


def close_billing(context: Context, bucket: str, config: Config, node: Node, why: str) -> None:
    """End the lifetime of a pod that is deleted or stopped, in the account of its last run; say if it is unknown."""
    try:
        claim = read_claim(context.google, bucket, node.name, node.status.uid)
    except UnreadableError as error:
        url = object_url(bucket, str(error))
        context.events.note(node.id, f"warning: {url}; the end of the pod's time is not on record")
        return
    if claim:
        Spending(context.google, context.clock, bucket, claim["latest"], config).close_billing(why)


def read_claim(google: GoogleClient, bucket: str, pod: str, uid: str) -> dict[str, Any]:
    """Return {first, latest, uid}: the first and latest run of this pod; empty if no run has used it.

    Raises UnreadableError if the claim is not what this Slipway writes.
    """
    return _json(google, bucket, pod_object("claims", pod, uid), "latest")


def watchdog_note(google: GoogleClient, bucket: str, pod: str, uid: str) -> dict[str, Any]:
    """Return {time, reason} if the watchdog deleted the pod, else an empty dict. The time is that of its worker."""
    try:
        return _json(google, bucket, pod_object("ends", pod, uid), "reason")
    except UnreadableError as error:
        return {"reason": f"the pod's watchdog ended it ({error})"}


def write_limit(google: GoogleClient, bucket: str, pod: Node, run_id: str, seconds_left: float | None) -> None:
    """Record when the pod's watchdog ends it: so many seconds after this write by the server's clock; None: never."""
    if seconds_left is None and read_limit(google, bucket, pod.name, pod.status.uid, run_id) is None:
        return
    text = dump({"run": run_id, "seconds_left": seconds_left})
    google.upload(bucket, pod_object("limits", pod.name, pod.status.uid), text.encode(), metadata={"limit": text})


def read_limit(google: GoogleClient, bucket: str, pod: str, uid: str, run_id: str) -> float | None:
    """Return the seconds until the watchdog ends the pod, negative if it should have; None if that is not on record."""
    name = pod_object("limits", pod, uid)
    try:
        answer, now = google.object_metadata(bucket, name)
        known = parse_record(answer.get("metadata", {}).get("limit", "").encode(), checked, name)
    except (NotFoundError, UnreadableError):
        return None
    left = known.get("seconds_left")
    if known.get("run") != run_id or not isinstance(left, int | float):
        return None
    return left - (now - datetime.fromisoformat(answer["updated"]).timestamp())


def _json(google: GoogleClient, bucket: str, name: str, key: str) -> dict[str, Any]:
    """Return a document with this key; empty if there is none. Raises UnreadableError."""
    if (content := google.read(bucket, name)) is None:
        return {}
    body = parse_record(content, checked, name)
    if not isinstance(body.get(key), str):
        raise DamagedRecordError(f"{name} is damaged: no {key}")
    return body
