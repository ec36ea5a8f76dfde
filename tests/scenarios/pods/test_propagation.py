"""What Google makes visible late is late all at once: `up` waits and goes on."""

import re

import pytest

from tests.controller.conftest import ECHO_COMMAND, SlipwayCli

pytestmark = pytest.mark.e2e
LATE = [
    ("laptop", "POST .*/compute/v1/.*/global/networks$", 403),  # an API enabled a moment ago
    ("laptop", "GET .*/serviceAccounts/slipway-runner@.*", 404),  # an account created a moment ago
    ("laptop", "POST .*:getGuestAttributes", 404),  # a VM that has just booted
    (".*/0", "GET .*/storage/v1/.*/code%2F.*", 403),  # roles bound a moment ago, asked for by a worker
    ("laptop", "POST .*/upload/storage/.*", 429),  # a second write of one object within a second
]
"""Requests that are refused on the way, as (client, method and path, status)."""


class LateCloud(SlipwayCli):
    """The command line with an emulated cloud whose changes take effect late."""

    @property
    def base_overrides(self) -> list[str]:
        return [*super().base_overrides, "cloud.operation_seconds=0.5"]


@pytest.mark.deep
def test_up_in_a_fresh_project_waits_for_everything_that_is_late(slipway: SlipwayCli) -> None:
    late = LateCloud(slipway.home, slipway.repository, slipway.capsys, slipway.environment)
    code, out, err = late("up", ECHO_COMMAND, "cleanup.on_success=keep")
    assert (code, err) == (0, "")
    assert "hello from worker 0" in out
    requests = [
        (r["client"], f"{r['method']} {r['path'].partition('?')[0]}", r["status"]) for r in late.cloud().requests()
    ]
    late_ones = {
        (client, path, status)
        for client, path, status in LATE
        for r in requests
        if re.fullmatch(client, r[0]) and re.fullmatch(path, r[1]) and r[2] == status
    }
    # All of them on an idle machine; on a busy one, some are no longer late when they are asked for.
    assert late_ones
