"""Requests to release a lease, in an emulated cloud with its own limits: an object takes one write a second."""

import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from google.oauth2.credentials import Credentials

from controller import lease as leases
from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.lease import Lease, ReleaseRequestedError
from controller.lease_store import BucketLeaseStore, Identity
from controller.localcloud import lifecycle
from tests.conftest import wide
from tests.controller.localcloud.harness import EmulatedCloud
from tests.emulators import Emulators

BUCKET = "leases"


@pytest.fixture(scope="module")
def slow_cloud(tmp_path_factory: pytest.TempPathFactory, emulators: Emulators) -> Iterator[EmulatedCloud]:
    """A cloud with the delays and limits that it has by itself, and a bucket."""
    made = EmulatedCloud(tmp_path_factory.mktemp("cloud") / "state")
    assert emulators.start(made.state) == (0, "")
    made.establish()
    made.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": BUCKET, "location": "US"})
    yield made
    lifecycle.wipe(made.state)


@dataclass
class Controllers:
    """Controllers that want the lease of one pod, each with a client of its own; the term is the shortest."""

    cloud: EmulatedCloud
    pod: str
    clients: list[GoogleClient] = field(default_factory=list)

    def __call__(self, name: str, woken: threading.Event | None = None) -> Lease:
        endpoint, clock = self.cloud.endpoint, Clock()
        self.clients.append(GoogleClient(Credentials(token=endpoint["token"]), clock, endpoint["roots"]))
        store = BucketLeaseStore(self.clients[-1], BUCKET, self.pod)
        identity = Identity("laptop", "run-1", id=name, holder=f"{name}@host", process="")
        return Lease(store, clock, identity, 15.0, leases.RENEW_SECONDS, woken.set if woken else lambda: None)

    def refusals(self) -> list[int]:
        """Return the statuses of the refused writes of the lease and of the requests for it."""
        log = self.cloud.request_log()
        writes = [r for r in log if r["mutating"] and f"pods/{self.pod}/" in r["query"].get("name", "")]
        return [r["status"] for r in writes if r["status"] >= 400]


@pytest.fixture
def controller(slow_cloud: EmulatedCloud, request: pytest.FixtureRequest) -> Iterator[Controllers]:
    made = Controllers(slow_cloud, f"pod-{zlib.crc32(request.node.name.encode())}")
    yield made
    for client in made.clients:
        client.close()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[GoogleClient]:
    """How often each client has looked for a request: how long that takes on a busy machine says nothing."""
    made, read = Counter[GoogleClient](), BucketLeaseStore.read_request

    def counted(store: BucketLeaseStore) -> Any:
        made[store.google] += 1
        return read(store)

    monkeypatch.setattr(BucketLeaseStore, "read_request", counted)
    return made


def test_a_holder_that_writes_as_often_as_it_may_is_reached(
    controller: Controllers, looks: Counter[GoogleClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renewals in the object of the request would starve it: each is refused with 429 or 412."""
    monkeypatch.setattr(leases, "REQUEST_SECONDS", 0.1)
    monkeypatch.setattr(leases, "RENEW_SECONDS", 1.0)
    woken = threading.Event()
    holder = controller("anna", woken)
    holder.ensure()

    def end_when_asked() -> None:
        woken.wait(300)
        with pytest.raises(ReleaseRequestedError), holder.released_on_exit():
            holder.raise_if_lost()

    ending = threading.Thread(target=end_when_asked)
    ending.start()
    controller("ben").request_release("cancelled")  # in the same second as the next one
    seen = looks[controller.clients[0]]
    taker = controller("cleo")
    taker.take_over("taken over")
    ending.join()
    assert looks[controller.clients[0]] - seen <= 2
    assert taker.last_token == 2
    taker.release()


@pytest.mark.deep
@pytest.mark.parametrize("after", [0.5, 3.5, 11.0, *wide(0.0, 1.0, 2.0, 7.0)])
def test_a_holder_is_reached_within_ten_seconds_at_any_time(
    controller: Controllers, looks: Counter[GoogleClient], after: float
) -> None:
    assert 2 * leases.REQUEST_SECONDS + leases.WRITE_SECONDS < 10, "two looks and the write of the release"
    woken = threading.Event()
    holder = controller("anna", woken)
    holder.ensure()
    time.sleep(after)
    asker = controller("ben")
    asker.request_release("deleted")
    seen = looks[controller.clients[0]]
    assert woken.wait(300)
    assert looks[controller.clients[0]] - seen <= 2
    with pytest.raises(ReleaseRequestedError), holder.released_on_exit():
        holder.raise_if_lost()
    found = asker.read()
    assert found is not None
    assert (found.record.released, found.record.asked) == (True, "deleted by ben@host")
    assert controller.refusals() in ([], [429]), "the release may come a moment after a renewal"


@pytest.mark.deep
@pytest.mark.parametrize("status", [429, 503])
def test_refusals_of_single_writes_lose_no_request(controller: Controllers, status: int) -> None:
    woken = threading.Event()
    holder = controller("anna", woken)
    holder.ensure()
    fault = {"kind": "http", "status": status, "match": "POST /upload/.*", "times": 1}
    asker = controller("ben")
    controller.cloud.call_ok("POST", "emulator/faults", {"key": controller.pod, "faults": [fault]})
    asker.request_release("cancelled")
    assert woken.wait(300)
    holder.release("cancelled", 0)
    assert asker.ensure() == 2
    asker.release()
