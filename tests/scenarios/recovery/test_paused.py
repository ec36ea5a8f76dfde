"""SIGSTOP of the controller before any request of an `up`, for longer than its lease, while another `up` does the work.

After SIGCONT the first one finds out before it changes anything. Before each request that may change something, or with
SLIPWAY_KILL_POINTS as in test_killed; in a run whose pod is preempted, before those of the recovery, too.
"""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.planes import Plane
from tests.scenarios.recovery.test_killed import PARTS, READS, Killer, killer, points

pytestmark = [pytest.mark.e2e, pytest.mark.deep]
__all__ = ["killer"]
MOMENT = re.compile(r"/attempt-1/|/verdicts/|/launches/")
"""Objects that depend on whether a preempted attempt had begun."""


@pytest.mark.timeout(0 if "SLIPWAY_KILL_POINTS" in os.environ else 1800)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("preempted", [False, True])
def test_paused_before_any_request_it_changes_nothing_more(
    killer: Killer, plane: Plane, preempted: bool, part: int
) -> None:
    killer.pod = plane.one
    home, log = killer.fresh(), killer.folder / "requests"
    assert killer.up(home, log=log, preempted=preempted) == 0
    undisturbed = killer.left_behind(home)
    for request in points(log.read_text().splitlines())[part::PARTS]:
        home = killer.fresh()
        first = killer.pause(home, request, preempted=preempted)
        if "pid" not in first:
            assert READS.search(request.rpartition(" ")[0]) or preempted, request  # how often it polls differs
            killer.left_behind(home)
            continue
        second = killer.pause(home, None, preempted=preempted)
        if second != {"code": 0}:
            os.kill(first["pid"], signal.SIGKILL)
        assert second == {"code": 0}, (request, (home / "words").read_text(errors="replace"))
        assert killer.go_on(first["pid"]) in (0, 8), (request, (home / "words").read_text(errors="replace"))
        found = killer.left_behind(home)
        if preempted:
            for left in (found, undisturbed):
                left["objects"] = [name for name in left["objects"] if not MOMENT.search(name)]
            assert len(found.pop("starts")) <= 2, request
        differ = {kind: set(found[kind]) ^ set(undisturbed[kind]) for kind in found if found[kind] != undisturbed[kind]}
        assert differ == {}, request
