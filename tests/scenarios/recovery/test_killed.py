"""kill -9 of the controller before any request of an `up`, Google's and the workers': the next `up` converges.

Before each that may change something: between two of them everything is as it was before the first. One life is killed
many times. On Compute Engine only the requests for its pod are points: the rest of the life is the same code. With
SLIPWAY_KILL_POINTS=all before every request.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from controller import emulator
from controller.localcloud import lifecycle
from controller.resources.pod.capacity_log import load_entries
from tests.conftest import wide
from tests.controller.localcloud.harness import wait_for
from tests.emulators import Emulators
from tests.paths import ROOT
from tests.planes import EITHER, Plane
from tests.scenarios.recovery.killing import READS, time_of

pytestmark = [pytest.mark.e2e, pytest.mark.deep]
TERM_SECONDS = 600
"""Term of a lease that passes at once."""
KILLS = 1000
"""More than one life has points."""
PARTS = 2
"""The number of tests that share all points, so that several processes or shards can run them."""


@dataclass
class Killer:
    """`up` of an echo program from nothing, again and again, each time on an emulated cloud of its own."""

    folder: Path
    agents: str
    pod: tuple[str, ...] = ("tpu=v5litepod_8",)
    faults: tuple[str, ...] = ()
    lift_after: str = ""
    """When a controller has sent this request, the faults of its cloud end."""
    orders: Any = None
    homes: list[Path] = field(default_factory=list)

    def fresh(self) -> Path:
        """The home of an emulated cloud that runs and holds nothing."""
        home = self.folder / str(len(self.homes))
        self.homes.append(home)
        home.mkdir()
        self._order(serve=str(emulator.state_folder(str(home))), agents=self.agents, home=str(home))
        while lifecycle.find_endpoint(emulator.state_folder(str(home))) is None:
            assert self.orders.poll() is None
        return home

    def up(
        self,
        home: Path,
        before: str | None = None,
        log: Path | None = None,
        *,
        preempted: bool = False,
        goes_on: bool = False,
    ) -> int:
        """Its exit code, or -9. `goes_on`: earlier controllers of this life have made requests, too."""
        log = log or home / f"requests-{len([*home.glob('requests-*')])}"
        with self._lifting_faults(home, log):
            words = self._words(home, 3600, preempted)
            return self._order(**words, before=before, log=str(log), goes_on=goes_on)["code"]

    def goes_on(self, home: Path, before: str) -> bool:
        """Kill the next `up` of a life before a request; return False if it has ended well without making it."""
        code = self.up(home, before, goes_on=True)
        assert code in (0, -signal.SIGKILL), f"{before}: {self.words(home)}"
        return code != 0

    def pause(self, home: Path, before: str | None) -> dict[str, int]:
        """Stop an `up` whose pod is preempted before a request: its `pid`, or its exit code if it has ended before."""
        return self._order(**self._words(home, TERM_SECONDS, True), before=before, log=None, pause=True)

    def skip_term(self, home: Path) -> None:
        """Let a whole term of a lease pass for the cloud and for every controller."""
        for _ in range(3):  # what a stopped controller has sent arrives before
            self.state(home)
        time_of(str(home)).skip(2 * TERM_SECONDS)

    def down(self, home: Path) -> None:
        order = self._words(home, 3600, preempted=False)
        order["argv"] = ["down", "--yes", *order["argv"][1:]]
        assert self._order(**order, before=None, log=None)["code"] == 0, self.words(home)

    @staticmethod
    def words(home: Path) -> str:
        """Return what the last controllers of a home have said."""
        return (home / "words").read_text(errors="replace")[-6000:]

    def go_on(self, pid: int) -> int:
        """Its exit code after SIGCONT."""
        return self._order(go_on=pid)["code"]

    @contextmanager
    def _lifting_faults(self, home: Path, log: Path) -> Iterator[None]:
        ended = threading.Event()

        def lift() -> None:
            while self.lift_after and not ended.wait(0.02):
                if log.exists() and self.lift_after in log.read_text().splitlines():
                    self.end_faults(home)
                    return

        thread = threading.Thread(target=lift)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def end_faults(self, home: Path) -> None:
        lifecycle.request_admin(lifecycle.require_endpoint(emulator.state_folder(str(home))), "DELETE", "faults")

    def state(self, home: Path) -> dict[str, Any]:
        endpoint = lifecycle.require_endpoint(emulator.state_folder(str(home)))
        return json.loads(lifecycle.request_admin(endpoint, "GET", "state"))

    def _words(self, home: Path, lease_seconds: float, preempted: bool) -> dict[str, Any]:
        """The words of an `up`; with `preempted`, its pod is taken away while the first attempt runs."""
        runs = "test $SLIPWAY_ATTEMPT != 1 || sleep 600; " if preempted else ""
        program = f'program.command=[sh,-c,"echo once >> {home}/starts; {runs}echo hello"]'
        words = [*self.pod, "cloud=local", "program=command", "env.packages=image",
                 f"recovery.lease_duration_seconds={lease_seconds}"]  # fmt: skip
        taken = ("{kind: preempted, after_object: launches/0001, delay_seconds: 1}",) if preempted else ()
        faults = ", ".join((*self.faults, *taken))
        words += [f"cloud.faults=[{faults}]"] if faults else []
        return {"home": str(home), "argv": ["up", program, *words]}

    def left_behind(self, home: Path) -> dict[str, Any]:
        """What an `up` leaves, without the names that differ from run to run; and the cloud is gone.

        What each controller has seen and asked is its own.
        """
        found = self.state(home)
        lifecycle.wipe(emulator.state_folder(str(home)))
        names = [name for names in found["objects"].values() for name in names]
        names = [name for name in names if not re.match("capacity/|pods/|runs/[^/]*/(events|requests)/", name)]
        plain = [re.sub(r"(?<=run-)[0-9a-f]{8}|[0-9a-f]{12}(-\d+)?(?=\.json)", "ID", name) for name in names]
        kinds = {kind: sorted(found[kind]) for kind in ("node", "queued", "worker", "serviceAccount", "bucket")}
        starts = (home / "starts").read_text().split()
        return {**kinds, "compute": sorted(found["compute"]), "objects": sorted(plain), "starts": starts}

    def _order(self, **order: Any) -> Any:
        self.orders.stdin.write(json.dumps(order) + "\n")
        self.orders.stdin.flush()
        return json.loads(self.orders.stdout.readline())


@pytest.fixture
def killer(tmp_path: Path, emulators: Emulators) -> Iterator[Killer]:
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "hello.txt").write_text("hello\n")
    made = Killer(tmp_path, emulators.agents)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.scenarios.recovery.killing"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=repository, **pipes) as made.orders:
        yield made
        for home in made.homes:
            lifecycle.wipe(emulator.state_folder(str(home)))
        made.orders.stdin.close()


def changes(requests: list[str]) -> list[str]:
    """Return the requests that may change something."""
    return [request for request in requests if not READS.search(request.rpartition(" ")[0])]


def points(requests: list[str]) -> list[str]:
    """Return the requests before which a controller is killed."""
    return requests if os.environ.get("SLIPWAY_KILL_POINTS") == "all" else changes(requests)


def of_plane(plane: Plane, requests: list[str]) -> list[str]:
    """Return the requests to try on a plane: Compute Engine's pods differ in the requests for a pod alone."""
    ours = re.compile(r"compute (instances|disks|resourcePolicies|regionInstanceTemplates|instanceGroupManagers)\.")
    return [request for request in requests if ours.match(request)] if plane.is_compute_engine else requests


def converges(
    killer: Killer,
    chosen: Callable[[list[str]], list[str]],
    end: Callable[[Path], None] = lambda home: None,
    begin: Callable[[Path], None] = lambda home: None,
    *,
    kills: int = KILLS,
) -> None:
    """Kill one `up` before each of the chosen requests; the last one leaves what an undisturbed one leaves.

    In one life the first `up` is killed before the first request, the next one before the second, and so on, at most
    `kills` times. One that ends well, since a request is not made again, ends the life; the next life begins with that
    request. `begin` is called before each life, and `end` after each.
    """
    home, log = killer.fresh(), killer.folder / "requests"
    begin(home)
    assert killer.up(home, log=log) == 0, killer.words(home)
    end(home)
    undisturbed, left = killer.left_behind(home), chosen(log.read_text().splitlines())
    while left:
        home, killed = killer.fresh(), list[str]()
        begin(home)
        tried = left[:kills]
        while (rest := [request for request in tried if request not in killed]) and killer.goes_on(home, rest[0]):
            killed.append(rest[0])
        if not killed:
            assert READS.search(left[0].rpartition(" ")[0]), left[0]  # how often it polls differs
            killed = left[:1]
        if not rest:
            assert killer.up(home) == 0, f"{killed}: {killer.words(home)}"
        end(home)
        found = killer.left_behind(home)
        differ = {kind: set(found[kind]) ^ set(undisturbed[kind]) for kind in found if found[kind] != undisturbed[kind]}
        assert differ == {}, killed
        left = [request for request in left if request not in killed]


@pytest.mark.timeout(0 if "SLIPWAY_KILL_POINTS" in os.environ else 1800)
@pytest.mark.parametrize("part", [0, *wide(*range(1, PARTS))])
def test_killed_before_any_request_up_again_converges(killer: Killer, plane: Plane, part: int) -> None:
    killer.pod = plane.one
    converges(killer, lambda requests: of_plane(plane, points(requests))[part::PARTS])


@pytest.mark.parametrize("way", ["created", "deleted"])
def test_killed_while_a_group_is_made_or_deleted_up_again_converges(killer: Killer, way: str) -> None:
    """On Compute Engine a pod is three resources. `down` deletes those that bill nothing after a run has ended."""
    killer.pod = ("tpu=v6e_8_ce",)
    verbs = "insert|resize" if way == "created" else "delete"
    of_group = re.compile(rf"compute (instanceGroupManagers|regionInstanceTemplates|resourcePolicies)\.({verbs}) ")
    converges(killer, lambda requests: [request for request in requests if of_group.match(request)], killer.down)


@pytest.mark.wide
def test_killed_while_both_planes_are_asked_up_again_has_one_pod(killer: Killer) -> None:
    """The request to the TPU API waits without end, that to Compute Engine for a while; four VMs on either plane."""
    killer.pod = EITHER.four
    waits = "{{kind: stockout, times: {times}, plane: {plane}}}"
    killer.faults = (waits.format(times=10**6, plane="tpu_api"), waits.format(times=20, plane="compute_engine"))

    def while_both_are_held(requests: list[str]) -> list[str]:
        asked = [i for i, line in enumerate(requests) if "queuedResources.create" in line]
        ended = [i for i, line in enumerate(requests) if "queuedResources.delete" in line]
        assert (len(asked), len(ended)) == (1, 1), "asked once, and given back"
        found = changes(requests[asked[0] : ended[0] + 4])  # with the records of what was given back
        assert any("instanceGroupManagers.resize" in line for line in found)
        return found

    converges(killer, while_both_are_held, killer.down)


@pytest.mark.wide
def test_killed_while_a_surplus_group_is_given_back_up_again_says_what_it_cost(
    killer: Killer,
) -> None:
    """A first controller is killed with requests to both planes; both are granted. The second gives the group back."""
    killer.pod = EITHER.four

    def grant_both(home: Path) -> None:
        killer.faults = ("{kind: stockout, times: 1000000}",)
        assert killer.up(home, before=LOOK_AT_VMS) == -signal.SIGKILL
        killer.faults = ()
        killer.end_faults(home)
        wait_for(lambda: both_are_granted(killer.state(home)), "both slices")

    def end(home: Path) -> None:
        given = [
            life for life in lifetimes(home, killer.state(home)["objects"]) if life["reason"].startswith("given back")
        ]
        assert [life["ended"] > life["began"] for life in given] == [True]
        [file] = home.rglob("capacity.jsonl")
        assert [one.provisioner for one in load_entries(file.parent) if one.ended == "surplus"] == ["mig"]
        killer.down(home)

    converges(killer, while_a_group_is_given_back, end, grant_both, kills=1)


@pytest.mark.wide
def test_killed_while_a_group_that_waits_is_given_back_up_again_converges(killer: Killer) -> None:
    """It waits for quota without end; the TPU API grants a slice once both are asked."""
    killer.pod = (*EITHER.four, "cloud.quotas={preemptible-tpu-v6e: 0}")
    killer.faults = ("{kind: stockout, times: 1000000, plane: tpu_api}",)
    killer.lift_after = VMS_ASKED
    converges(killer, while_a_group_is_given_back, killer.down, kills=1)


VMS_ASKED = "compute instanceGroupManagers.resize 1"
LOOK_AT_VMS = "compute instanceGroupManagers.listManagedInstances after compute instanceGroupManagers.resize"


def while_a_group_is_given_back(requests: list[str]) -> list[str]:
    """Return the requests that delete it, from the first part to the last, with their records."""
    began, ended = (
        requests.index(f"compute {part}.delete 1") for part in ("instanceGroupManagers", "resourcePolicies")
    )
    return changes(requests[began - 2 : ended + 4])


def both_are_granted(state: dict[str, Any]) -> bool:
    """Return whether the TPU API and Compute Engine have a slice that is ready."""
    nodes, slices = state.get("node", {}).values(), state.get("slice", {}).values()
    return any(node["state"] == "READY" for node in nodes) and any(one["phase"] == "ACTIVE" for one in slices)


def lifetimes(home: Path, objects: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Return what the bucket says of the pods of all runs."""
    endpoint, lives = lifecycle.require_endpoint(emulator.state_folder(str(home))), list[dict[str, Any]]()
    for bucket, names in objects.items():
        for name in (name for name in names if re.match("runs/[^/]*/pods/", name)):
            path = f"storage/v1/b/{bucket}/o/{quote(name, safe='')}?alt=media"
            with urllib.request.urlopen(f"{endpoint['url']}t/{endpoint['token']}/{path}") as answer:
                lives.append(json.load(answer))
    return lives
