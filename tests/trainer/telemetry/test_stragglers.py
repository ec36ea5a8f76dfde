"""Which worker is slow, and how much of an update it costs."""

import pytest

from tests.trainer.conftest import make_mesh
from trainer.telemetry import stragglers
from trainer.telemetry.stragglers import StragglerWatch, WorkerTimes, find_straggler

USUAL = WorkerTimes(host=0.02, wait=0.98, probe=0.001)


@pytest.mark.parametrize(
    ("odd", "host", "device"),
    [
        (WorkerTimes(0.9, 0.1, 0.001), 0.88, 0.0),  # its host reads slowly, and the others wait
        (WorkerTimes(0.02, 0.98, 0.002), 0.0, 0.49),  # its chips take twice as long
        (WorkerTimes(0.5, 0.98, 0.001), 0.0, 0.0),  # a busy host that delays nobody: it works while its chips do
        (WorkerTimes(0.02, 0.98, 0.0012), 0.0, 0.0),  # noise of the probe
    ],
)
def test_the_odd_one_is_found(odd, host, device):
    found = find_straggler([USUAL, USUAL, odd, USUAL])
    assert (found.host_seconds, found.device_seconds) == (pytest.approx(host), pytest.approx(device))
    assert found.worker == 2 or not found.seconds


def test_who_waits_for_a_slow_host_has_no_slow_chips():
    found = find_straggler([WorkerTimes(0.01, 1.04, 0.003), WorkerTimes(1.0, 0.05, 0.001)])
    assert found == (1, pytest.approx(0.99), 0.0)


def test_of_two_the_slower_one_is_named():
    found = find_straggler([WorkerTimes(0.9, 0.05, 0.001), WorkerTimes(0.02, 0.93, 0.001)])
    assert found == (0, pytest.approx(0.88), 0.0)


def test_one_worker_is_compared_with_nobody():
    assert StragglerWatch(make_mesh(8, 1, 1)).compare(1.0, 0.9) == {}


def test_the_share_of_the_delay_is_a_metric(monkeypatch):
    rows = [[0.1, 0.9, 0.001], [0.9, 0.1, 0.001]]
    monkeypatch.setattr(stragglers.jax, "process_count", lambda: 2)
    monkeypatch.setattr(stragglers, "gather_numbers", lambda mesh, row: stragglers.np.array(rows))
    found = StragglerWatch(make_mesh(8, 1, 1)).compare(1.0, 0.9)
    assert found == pytest.approx(
        {"slow_worker": 1, "slow_worker_share": 0.8, "slow_worker_host_time": 0.8, "slow_worker_device_time": 0.0}
    )
