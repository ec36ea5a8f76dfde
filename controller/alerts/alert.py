"""An alert, and the record of all alerts of an attempt: `runs/<id>/alerts.json`."""

import json
from dataclasses import dataclass, replace
from typing import Any, Self

from controller.core.formats import DamagedRecordError, Document, Record
from controller.core.metric_lines import format_duration
from controller.records.ledger import Ledger, parse_record

ALERTS_FILE = "alerts.json"
MAX_RECORDED = 50
"""Number of alerts in the record; a program of the user's own may raise any number."""


@dataclass(frozen=True)
class Alert(Record):
    """One alert.

    Attributes:
        name: what is wrong, in two words.
        message: what is wrong, and which key or page to look at.
        since: when it was first seen, seconds since the epoch.
        ended: when it was over; None while it lasts.
        limit: the value that the metric has to return to; None if the alert does not compare one.
    """

    name: str
    message: str
    since: float
    ended: float | None = None
    limit: float | None = None

    def over(self, now: float) -> "Alert":
        return replace(self, ended=now)

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


@dataclass(frozen=True)
class AlertRecord(Document):
    """Alerts of one attempt, oldest first, as the controller that followed it last saw them."""

    attempt: int
    alerts: tuple[Alert, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"alerts": [alert.to_json() for alert in self.alerts]}

    @classmethod
    def from_json(cls, body: Any, where: str = "") -> Self:
        found = super().from_json(body, where or ALERTS_FILE)
        return replace(found, alerts=tuple(Alert.from_json(alert) for alert in body["alerts"]))

    @property
    def active(self) -> list[Alert]:
        return [alert for alert in self.alerts if alert.ended is None]


def read_alerts(ledger: Ledger) -> AlertRecord:
    """Return the alerts of the run's latest attempt that was followed; none if there never was one.

    If the record is damaged there are none, and `ledger.problems` names it.
    """
    content = ledger.read(ALERTS_FILE)
    if content is None:
        return AlertRecord(0)
    try:
        return parse_record(content, AlertRecord.from_json, f"{ledger.prefix}/{ALERTS_FILE}")
    except DamagedRecordError as error:
        ledger.report(str(error))
        return AlertRecord(0)


def write_alerts(ledger: Ledger, record: AlertRecord) -> None:
    kept = record.alerts[-MAX_RECORDED:]
    ledger.write(ALERTS_FILE, json.dumps(replace(record, alerts=kept).to_json(), indent=1))


def describe_alert(alert: Alert, now: float) -> str:
    """Describe an alert as `status` does: its name, for how long, and what to look at."""
    if alert.ended is None:
        return f"ALERT {alert.name} (for {_duration(alert.since, now)}): {alert.message}"
    lasted, ago = _duration(alert.since, alert.ended), _duration(alert.ended, now)
    return f"past alert {alert.name} (for {lasted}, until {ago} ago): {alert.message}"


def _duration(start: float, end: float) -> str:
    return format_duration(max(0.0, end - start))
