"""What an hour costs, in which words, and how what was spent adds up."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conf.schema.config import Config
from controller.gcp.prices import hourly_price, max_cost, monthly_storage_price
from controller.records.spending import Spending, close_billing
from controller.resources.pod.node import Node
from controller.resources.pod.provisioner import Place, SliceSpec, SliceStatus
from tests.composed import config_of
from tests.fakes.clock import ManualClock
from tests.fakes.google import MemoryStorage

NEW_YEAR = 1_767_225_600.0
V5E = ["cloud.project=acme", "program=command", "tpu.zone=us-central1-a"]


def config(*overrides: str) -> Config:
    return config_of(*V5E, *overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tpu.capacity=on_demand"], "$19.20 per hour (2026 list price), and $0.01 for NAT and addresses"),
        (["tpu.capacity=spot"], "$3.92 per hour (2026 list price), and $0.01 for NAT and addresses"),
        (
            ["tpu.external_ip=true", "tpu.capacity=on_demand"],
            "$19.20 per hour (2026 list price), and $0.02 for NAT and addresses",
        ),
        (["budget.usd_per_hour=7"], "$7.00 per hour (budget.usd_per_hour)"),
        (
            ["recovery.driver=bastion", "tpu.capacity=spot"],
            "$3.92 per hour (2026 list price), and $0.03 for NAT, addresses and the bastion",
        ),
        (["tpu.zone=us-central1-f"], "unknown for this zone"),
        (
            ["cloud.trc={zones: [us-central1-a], free_until: 2026-01-01}"],
            "$0.00 per hour (free under the TRC grant until 2026-01-01), and $0.01 for NAT and addresses",
        ),
        (
            ["cloud.trc={zones: [us-central1-a], free_until: 2025-12-31}", "tpu.capacity=spot"],
            "$3.92 per hour (2026 list price), and $0.01 for NAT and addresses",
        ),
    ],
)
def test_an_hour(overrides: list[str], words: str) -> None:
    assert str(hourly_price(config(*overrides), NEW_YEAR)) == words


def test_a_whole_run() -> None:
    free = config()
    assert max_cost(free, hourly_price(free, NEW_YEAR)).startswith("none: billed until the program ends; set budget.")
    bound = config("budget.max_hours=10", "budget.usd_per_hour=2", "budget.max_usd=15")
    words = "at most $15.00 (budget.max_usd) and $20.00 in 10 h (budget.max_hours); then the run ends and the pod is "
    assert max_cost(bound, hourly_price(bound, NEW_YEAR)) == words + "deleted"


def test_storage() -> None:
    assert monthly_storage_price(100) == pytest.approx(2.0)


LOOKED = cast(Any, SimpleNamespace(refused_since=dict[str, float]()))
"""A context whose user may look everywhere."""


@dataclass
class Books:
    """The accounts of several runs in one bucket."""

    bucket: MemoryStorage = field(default_factory=lambda: MemoryStorage(b={}))
    clock: ManualClock = field(default_factory=lambda: ManualClock(NEW_YEAR))

    def of(self, run_id: str, *overrides: str) -> Spending:
        return Spending(self.bucket, self.clock, "b", run_id, config(*overrides))

    def pod(self, uid: str, created: float = 0.0) -> Node:
        spec = SliceSpec(workers=4, accelerator_type="v5litepod-16", runtime_version="v", network="n", external_ip=True)
        place = Place("us-central1-a", "spot", "s")
        status = SliceStatus(spec=spec, place=place, state="READY", uid=uid, created=created)
        return Node(name="pod", spec=spec, places=(place,), max_create_attempts=1, create_seconds=1.0, status=status)

    def later(self, hours: float) -> None:
        self.clock.elapsed += 3600 * hours


def test_every_pod_of_a_run_counts_over_controllers() -> None:
    books, two = Books(), "budget.usd_per_hour=2"
    first = books.of("r", two)
    first.open_billing(books.pod("one"))
    books.later(1.5)
    first.close_billing("preempted")
    books.later(5)  # no pod: nothing is billed
    first.open_billing(books.pod("two"))
    books.later(0.5)
    again = books.of("r", two)  # another controller, later
    again.open_billing(books.pod("two"))
    books.later(1)
    assert again.usage().hours == pytest.approx(3.0)
    assert again.usage().usd == pytest.approx(6.0)
    assert str(again.usage()) == "3.00 pod hours, about $6.00"
    again.close_billing("finished")
    books.later(9)
    assert books.of("r", two).usage().hours == pytest.approx(3.0)
    assert [life.why for life in books.of("r").lifetimes()] == ["preempted", "finished"]


def test_a_pod_that_another_run_left_counts_from_when_it_was_taken_over() -> None:
    books = Books()
    books.of("first").open_billing(books.pod("one"))
    books.later(3)
    second = books.of("second")
    second.open_billing(books.pod("one"), if_new=True)
    assert second.lifetimes() == []
    second.open_billing(books.pod("one"))
    books.later(1)
    assert second.usage().hours == pytest.approx(1.0)
    [life] = books.of("first").lifetimes()
    assert life.hours(books.clock.now()) == pytest.approx(3.0)  # its idle hours are its own
    assert life.why == "taken over by second"


def test_a_pod_made_for_the_run_counts_from_its_creation_and_a_stopped_one_not() -> None:
    books = Books()
    pod = books.pod("one", created=NEW_YEAR - 1800)
    books.of("r").open_billing(pod)
    books.later(1)
    context: Any = SimpleNamespace(google=books.bucket, clock=books.clock)
    close_billing(context, "b", config(), pod, "stopped")
    books.later(20)
    books.of("r").open_billing(pod)
    books.later(1)
    assert books.of("r").usage().hours == pytest.approx(2.5)
    assert [life.why for life in books.of("r").lifetimes()] == ["stopped", ""]


def test_a_budget_ends_and_says_which() -> None:
    books = Books()
    run = books.of("r", "budget.max_hours=2", "budget.max_usd=3", "budget.usd_per_hour=1")
    assert run.hours_left() == pytest.approx(2.0)
    run.open_billing(books.pod("one"))
    books.later(1)
    assert run.budget_exceeded() == ""
    assert run.hours_left() == pytest.approx(1.0)
    books.later(1.1)
    assert run.budget_exceeded() == "its pods have run for 2.10 h, and budget.max_hours is 2"
    dear = books.of("r", "budget.max_usd=2", "budget.usd_per_hour=1")
    assert dear.budget_exceeded() == "it has cost about $2.10, and budget.max_usd is 2"
    assert dear.hours_left() == 0.0
    assert books.of("r").budget_exceeded() == ""
    assert books.of("r").hours_left() is None


def test_a_pod_that_went_unseen_ended_when_its_watchdog_or_its_last_log_says() -> None:
    books = Books()
    run = books.of("r")
    run.open_billing(books.pod("one"))
    books.later(30)
    assert run.usage().hours == pytest.approx(30.0)
    books.bucket.buckets["b"]["runs/r/logs/attempt-1/worker-0.log"] = b""
    reader = books.of("r")
    reader.close_lost("")
    assert reader.usage().hours == pytest.approx(1.0)
    kept = books.of("r")
    kept.close_lost("one")
    assert kept.usage().hours == pytest.approx(30.0)


@pytest.mark.parametrize(("state", "hours"), [("READY", 30.0), ("PREEMPTED", 1.0), (None, 1.0)])
def test_a_budget_does_not_count_a_pod_that_was_lost_while_no_controller_looked(
    monkeypatch: pytest.MonkeyPatch, state: str | None, hours: float
) -> None:
    books, ten = Books(), "budget.max_hours=10"
    pod = books.pod("one")
    books.of("r", ten).open_billing(pod)
    books.later(30)
    books.bucket.buckets["b"]["runs/r/logs/attempt-1/worker-0.log"] = b""
    seen = None if state is None else replace(pod, status=replace(pod.status, state=state))
    monkeypatch.setattr(Node, "find", lambda self, context, uids, **_: seen if uids == {"one"} else None)
    run = books.of("r", ten)
    run.close_vanished(LOOKED, pod)
    assert run.usage().hours == pytest.approx(hours)
    assert bool(run.budget_exceeded()) == (state == "READY")
    assert books.of("r", ten).usage().hours == pytest.approx(hours), "on record"


@pytest.mark.parametrize("moved", ["name", "zone", "hidden"])
def test_a_pod_that_nobody_has_looked_for_may_be_there_and_billed(monkeypatch: pytest.MonkeyPatch, moved: str) -> None:
    """The config names another pod now, or another zone, or the caller may not look into the zone any more."""
    books = Books()
    pod = books.pod("one")
    books.of("r").open_billing(pod)
    books.later(30)
    monkeypatch.setattr(Node, "find", lambda self, context, uids, **_: None)
    looked = LOOKED
    if moved == "name":
        pod = replace(pod, name="other")
    elif moved == "zone":
        pod = replace(pod, places=(replace(pod.places[0], zone="us-west4-a"),))
    else:
        looked = cast(Any, SimpleNamespace(refused_since={"TPUs of the TPU API in us-central1-a": 0.0}))
    run = books.of("r")
    run.close_vanished(looked, pod)
    assert run.usage().hours == pytest.approx(30.0)
