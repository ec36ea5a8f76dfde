"""The record of an attempt's alerts, and how `status` shows them."""

from __future__ import annotations

from typing import Any, cast

from controller.alerts.alert import MAX_RECORDED, Alert, AlertRecord, describe_alert, read_alerts, write_alerts
from controller.records.ledger import Ledger


class Written:
    """A ledger in memory."""

    prefix = "runs/run-1"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def read(self, name: str) -> bytes | None:
        return self.objects.get(name)

    def write(self, name: str, text: str) -> None:
        self.objects[name] = text.encode()


def test_a_record_is_read_as_it_was_written() -> None:
    ledger = cast(Ledger, Written())
    assert read_alerts(ledger) == AlertRecord(0)
    record = AlertRecord(3, (Alert("slow", "40 %", 10.0, limit=500.0), Alert("no output", "silent", 10.0, 20.0)))
    write_alerts(ledger, record)
    assert read_alerts(ledger) == record
    assert [alert.name for alert in record.active] == ["slow"]


def test_the_newest_alerts_are_kept() -> None:
    ledger: Any = Written()
    write_alerts(ledger, AlertRecord(1, tuple(Alert(str(number), "", 0.0) for number in range(MAX_RECORDED + 5))))
    assert [alert.name for alert in read_alerts(ledger).alerts][:1] == ["5"]


def test_an_alert_says_for_how_long_and_whether_it_is_over() -> None:
    assert describe_alert(Alert("slow", "40 %", 10.0), 100.0) == "ALERT slow (for 1:30): 40 %"
    assert (
        describe_alert(Alert("slow", "40 %", 10.0, 40.0), 100.0) == "past alert slow (for 0:30, until 1:00 ago): 40 %"
    )
    assert describe_alert(Alert("slow", "40 %", 110.0), 100.0) == "ALERT slow (for 0:00): 40 %"  # another clock
