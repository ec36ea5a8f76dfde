"""SIGSTOP of the controller before any request of an `up`, for longer than its lease, while another `up` does the work.

After SIGCONT the first one finds out before it changes anything. Before each request that may change something, or with
SLIPWAY_KILL_POINTS as in test_killed. The pod is preempted in its first attempt, so that the life has all that one
without a preemption has, and the recovery, too; on Compute Engine the points are the requests for its pod. The term of
the lease passes at once: the cloud and the controllers are told that it is later.
"""

import os
import re
import signal

import pytest

from tests.conftest import wide
from tests.planes import Plane
from tests.scenarios.recovery.test_killed import PARTS, Killer, killer, of_plane, points

pytestmark = [pytest.mark.e2e, pytest.mark.deep]
__all__ = ["killer"]
MOMENT = re.compile(r"/attempt-1/|/verdicts/|/launches/")
"""Objects that depend on whether a preempted attempt had begun."""


@pytest.mark.timeout(0 if "SLIPWAY_KILL_POINTS" in os.environ else 1800)
@pytest.mark.one_plane
@pytest.mark.always_on("compute_engine")
@pytest.mark.parametrize("part", [0, *wide(*range(1, PARTS))])
def test_paused_before_any_request_it_changes_nothing_more(killer: Killer, plane: Plane, part: int) -> None:
    killer.pod = plane.one
    home, log = killer.fresh(), killer.folder / "requests"
    assert killer.up(home, log=log, preempted=True) == 0
    undisturbed = killer.left_behind(home)
    chosen = of_plane(plane, points(log.read_text().splitlines()))[part::PARTS]
    undisturbed["objects"] = [name for name in undisturbed["objects"] if not MOMENT.search(name)]
    paused = 0
    for request in chosen:
        home = killer.fresh()
        first = killer.pause(home, request)
        if "pid" not in first:
            killer.left_behind(home)  # when the preemption is seen differs, and with it what is asked
            continue
        paused += 1
        killer.skip_term(home)
        second = killer.pause(home, None)
        if second != {"code": 0}:
            os.kill(first["pid"], signal.SIGKILL)
        assert second == {"code": 0}, f"{request}: {killer.words(home)}"
        assert (code := killer.go_on(first["pid"])) in (0, 8), f"{request}: {code}: {killer.words(home)}"
        found = killer.left_behind(home)
        found["objects"] = [name for name in found["objects"] if not MOMENT.search(name)]
        assert len(found.pop("starts")) <= 2, request
        differ = {kind: set(found[kind]) ^ set(undisturbed[kind]) for kind in found if found[kind] != undisturbed[kind]}
        assert differ == {}, request
    assert paused >= 0.8 * len(chosen)
