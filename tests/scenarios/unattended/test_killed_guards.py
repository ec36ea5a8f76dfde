"""Guards of real pods die by kill -9, each subset on a pod of its own: all pods are gone within two minutes of a limit.

`tests/controller/agent/test_guards.py` kills every subset in every phase and under every clock, in virtual time.
"""

import signal
import time
from collections.abc import Iterable
from datetime import datetime

import psutil
import pytest

from controller.localcloud.vms.processes import MARKER
from tests.controller.cli.verbs.test_up import workers_home
from tests.controller.conftest import SlipwayCli
from tests.planes import Plane
from tests.scenarios.unattended.test_two_controllers import Controller, controllers
from tests.soak.strikes import GUARDS, processes, send
from tests.soak.world import billed

pytestmark = [pytest.mark.e2e, pytest.mark.deep, pytest.mark.real_time]
LIMIT_SECONDS, LATE_SECONDS, SAID_SECONDS = 150.0, 120.0, 60.0
"""What a run may take, in time of its pod; how much later that may be gone; how soon the controller says what died."""
IN_POD = ("supervisor", "watchdog", "switch")
ALL = ("controller", *IN_POD, "program")
"""In the order in which they are killed: the controller and the supervisor would start a watchdog again."""
KILLED: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in ALL},
    "controller-supervisor": ("controller", "supervisor"),
    "controller-watchdog": ("controller", "watchdog"),
    "all-but-switch": tuple(name for name in ALL if name != "switch"),
    "all-but-watchdog": tuple(name for name in ALL if name != "watchdog"),
    "all-but-controller": (*IN_POD, "program"),
    "guards": IN_POD,
}
"""What is killed, by the name of the pod."""
FOREVER = "program.command=[sh,-c,'echo up; sleep 3600']"
ROOM = "cloud.quotas={INSTANCES: 99, IN_USE_ADDRESSES: 99}"
SAID = "warning: the pod's watchdog had died; it is started again"


def strike(slipway: SlipwayCli, pod: str, killed: Iterable[str], controller: Controller) -> None:
    orders = {home: home / ".slipway" / "watchdog.json" for home in workers_home(slipway)}
    [home] = [home for home, file in orders.items() if f'/{pod}"' in file.read_text()]
    for name in killed:
        if name == "controller":
            controller.process.kill()
            continue
        found = processes(slipway.cloud().state)
        there = [one for one in found if one[1][MARKER].rpartition(":")[2].startswith(f"{home.parent.parent.name}/")]
        struck: list[psutil.Process] = [
            process
            for process, environment, line in there
            if ("SLIPWAY_ATTEMPT" in environment if name == "program" else GUARDS[name] in line)
        ]
        assert send(struck, signal.SIGKILL), (pod, name)


@pytest.mark.wide
def test_whoever_is_killed_the_pod_is_gone_in_time(slipway: SlipwayCli, plane: Plane) -> None:
    """By the emulated cloud's state, from the creation of each pod to its end."""
    limit = f"budget.max_hours={LIMIT_SECONDS / 3600:.6f}"
    lines = [["up", FOREVER, *plane.one, limit, ROOM, f"tpu.name={pod}", f"run.name={pod}"] for pod in KILLED]
    created, gone, said = dict[str, float](), dict[str, float](), dict[str, float]()
    with controllers(slipway, *lines) as started:
        ups = dict(zip(KILLED, started, strict=True))
        for up in started:
            up.hears("    up\n")
        for pod, killed in KILLED.items():
            strike(slipway, pod, killed, ups[pod])
        struck = time.time()
        while gone.keys() < KILLED.keys() and time.time() < struck + LIMIT_SECONDS + LATE_SECONDS:
            there = {path.rpartition("/")[2]: part for path, part in billed(slipway.cloud().get("state")).items()}
            now = time.time()
            for pod in KILLED:
                if part := there.get(pod):
                    made = part.get("createTime") or part["creationTimestamp"]
                    created[pod] = datetime.fromisoformat(made).timestamp()
                else:
                    gone.setdefault(pod, now)
                if SAID in ups[pod].said:
                    said.setdefault(pod, now - struck)
            time.sleep(0.5)
        codes = {pod: up.ends() for pod, up in ups.items() if pod in gone}
    lasted = {pod: gone.get(pod, time.time()) - created[pod] for pod in KILLED}
    assert {pod: s for pod, s in lasted.items() if not LIMIT_SECONDS <= s <= LIMIT_SECONDS + LATE_SECONDS} == {}
    assert codes == {pod: -signal.SIGKILL if "controller" in killed else 7 for pod, killed in KILLED.items()}
    assert [pod for pod, code in codes.items() if code == 7 and "over budget: " not in ups[pod].said] == []
    assert said.get("guards", 1e9) <= SAID_SECONDS, ups["guards"].said
    asked = [request for request in slipway.cloud().requests() if request["method"] == "DELETE"]
    by_itself = {r["path"].rpartition("/")[2] for r in asked if r["client"].endswith("/0") and r["status"] == 200}
    assert by_itself == {pod for pod, killed in KILLED.items() if "controller" in killed}
