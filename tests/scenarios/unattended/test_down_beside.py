"""`down --all` beside several `up`s of a new project that are starting, as processes; one run has two of them.

At the end nothing is billed, and each has said how it ended. The emulated cloud has its own delays and limits;
`tests/controller/resources/test_at_once.py` does the same with what a project shares, without runs.
"""

import random
import re
import threading
import time
from contextlib import ExitStack

import pytest

from controller.resources import vpc
from tests.conftest import wide
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.planes import Plane, pods
from tests.scenarios.unattended.test_two_controllers import Controller, controllers

pytestmark = [pytest.mark.e2e, pytest.mark.deep]
SPREAD_SECONDS, DOWN_SECONDS = 6.0, (2.0, 10.0)
"""How long after the first `up` the last one starts, and when `down` does; a lone `up` has its pod after seven."""
ROOM = "cloud.quotas={INSTANCES: 99, IN_USE_ADDRESSES: 99}"
TAKEN_DOWN = "pod-0"
MADE_ANEW = (
    "nothing was deleted; still in use: |is there again: another controller has made it|is already being used by"
)
"""What `down` may say of what others have made in the meantime."""


def is_true(slipway: SlipwayCli, up: Controller, code: int, pod: str) -> bool:
    """Return whether the exit code and the last words of an `up` are how it ended."""
    if code == 0 and "finished after" in up.said:
        written = [
            r["query"].get("name", "") for r in slipway.cloud().requests() if r["status"] == 200 and r["mutating"]
        ]
        return any(re.fullmatch(rf"runs/of-{pod}-\w+/result\.json", name) for name in written)
    if code == 8 and "the lease and its bucket no longer exist; this controller stopped" in up.said:
        return True  # it has no pod: none is left
    ended = re.search(r"deleted by .*: cancelled; run the same command to resume.*\n+$", up.said)
    return code == 0 and bool(ended) and pod == TAKEN_DOWN


@pytest.mark.parametrize("seed", [1, *wide(2)])
@pytest.mark.parametrize("number", [3, *wide(5)])
def test_beside_down_all_each_up_ends_well_and_says_so(
    slipway: SlipwayCli, plane: Plane, number: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vpc, "IN_USE_SECONDS", 5.0)  # else it waits for five minutes for who uses the network anew
    chance = random.Random(seed)
    names = [f"pod-{i % (number - 1)}" for i in range(number)]
    words = {name: [ECHO_COMMAND, *plane.one, ROOM, f"tpu.name={name}", f"run.name=of-{name}"] for name in names}
    starts = sorted((chance.uniform(0, SPREAD_SECONDS), name) for name in names)
    slipway.cloud()
    began, ups = time.monotonic(), list[Controller]()
    with ExitStack() as started:

        def start() -> None:
            for after, name in starts:
                time.sleep(max(0.0, began + after - time.monotonic()))
                ups.extend(started.enter_context(controllers(slipway, ["up", *words[name]])))

        starting = threading.Thread(target=start)
        starting.start()
        time.sleep(chance.uniform(*DOWN_SECONDS))
        code, out, err = slipway("down", "--all", "--yes", *words[TAKEN_DOWN])
        starting.join()
        codes = [up.ends() for up in ups]
    told = "\n".join([out + err, *(f"=== exit code {code}\n{up.said}" for up, code in zip(ups, codes, strict=True))])
    assert pods(slipway.cloud().get("state")) == {}, told
    assert (code == 0 and not err) or (code == 2 and re.search(MADE_ANEW, err)), told
    for up, ended, (_, name) in zip(ups, codes, starts, strict=True):
        assert is_true(slipway, up, ended, name), f"{up.said}\nof\n{told}"
    assert slipway("down", "--all", "--yes", *words[TAKEN_DOWN])[0] == 0
    state = slipway.cloud().get("state")
    assert {
        kind: state[kind] for kind in ("node", "queued", "compute", "serviceAccount", "bucket") if state[kind]
    } == {}
