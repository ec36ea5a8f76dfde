"""The connections to a pod's workers, against real SSH servers that behave badly on demand."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncssh
import pytest

from controller.agent.protocol import TIDY
from controller.core.this_process import Clock, InterruptedSleepError
from controller.resources.pod.tpu_api import NodeVms
from controller.ssh.fleet import FENCED_COMMANDS, Fleet, Fleets, SshTarget, WorkerError, failures
from controller.ssh.login import private_key
from controller.ssh.route import OS_LOGIN_HINT
from tests.controller.ssh.sshserver import SshPod
from tests.fakes.loopback import free_port


@pytest.fixture
def again(fleets: list[Fleet]) -> Callable[..., Fleet]:
    """Connects to the workers of a pod once more, as another process does."""

    def connect(pod: SshPod, sleep: Callable[[float], None] = time.sleep, **access: Any) -> Fleet:
        fleets.append(Fleet(pod.access(**access), sleep))
        return fleets[-1]

    return connect


def only(answers: list) -> WorkerError:
    [error] = failures(answers)
    return error


@pytest.mark.parametrize(
    ("imported", "heavy"),
    [
        (
            "controller.ssh.fleet, controller.ssh.login, controller.api, controller.cli.verbs.up",
            {"fabric", "invoke", "paramiko", "cryptography"},
        ),
        # The agent is started on every worker for every look.
        ("controller.agent.commands.observe", {"http.client", "ssl", "urllib.request"}),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(imported: str, heavy: set[str]) -> None:
    argv = [sys.executable, "-c", f"import sys, {imported}; print({heavy} & set(sys.modules))"]
    if "agent" in imported:
        argv.insert(1, "-S")
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "set()\n"


# Asking


def test_all_are_asked_at_the_same_time_and_answer_in_order(make_pod) -> None:
    """Peers find each other only if all of them are asked at once."""
    pod, fleet = make_pod(3)
    payload = {"addresses": ["127.0.0.1"] * 3, "port": free_port(), "timeout_seconds": 300}
    answers = fleet.call_all("probe_peers", [{**payload, "index": index} for index in range(3)])
    assert [answer["reachable"] for answer in answers] == [True] * 3
    homes = [answer["home"] for answer in fleet.call_all("observe", {}, workers=[2, 0])]
    assert homes == [str(pod.workers[2].home), str(pod.workers[0].home)]
    assert fleet.call_all("observe", {}, workers=[]) == []


def test_a_worker_that_fails_is_a_value_among_the_answers_and_an_interrupted_wait_interrupts(make_pod) -> None:
    def sleep(_: float) -> None:
        if interrupts:
            raise InterruptedSleepError

    interrupts = False
    pod, fleet = make_pod(3, sleep=sleep)
    pod.run_coroutine(pod.workers[1].drop_connections())
    answers = fleet.call_all("observe", {})
    assert [isinstance(answer, dict) for answer in answers] == [True, False, True]
    error = only(answers)
    assert (error.worker, error.address, error.kind) == (1, "10.0.0.1", "refused")
    interrupts = True
    with pytest.raises(InterruptedSleepError):
        fleet.call_all("observe", {})


# Who is who


def change_host_key(pod: SshPod, worker: int = 0) -> asyncssh.SSHKey:
    pod.run_coroutine(pod.workers[worker].drop_connections())
    pod.workers[worker].key = asyncssh.generate_private_key("ssh-ed25519")
    pod.run_coroutine(pod.workers[worker].listen())
    return pod.workers[worker].key


@pytest.fixture
def kept(tmp_path: Path) -> dict[str, Any]:
    """Where the keys of one life of a pod are kept."""
    return {"known_hosts_file": tmp_path / "known_hosts" / "pod-a", "incarnation": "one"}


def test_another_host_key_than_the_published_one_is_refused(make_pod, again) -> None:
    pod, _ = make_pod(2)
    trusted = [w.host_key_line for w in pod.workers]
    stranger = change_host_key(pod, 1)
    fleet = again(pod, host_keys=lambda: trusted)
    error = only(fleet.call_all("observe", {}))
    assert (error.worker, error.kind) == (1, "host_key")
    assert all(words in error.message for words in ("worker 1 of pod-a", "another machine answers at its address"))
    assert stranger.get_fingerprint() in error.message
    assert pod.workers[1].commands == []
    fleet.expect_new_host_keys()  # after a repair neither, since Google does not publish it
    assert only(fleet.call_all("observe", {})).kind == "host_key"


def test_keys_that_are_not_published_are_not_spoken_to_and_who_does_not_know_ours_says_so(
    make_pod, again, tmp_path: Path
) -> None:
    pod, _ = make_pod()
    with pytest.raises(WorkerError, match="not published its SSH host keys yet"):
        again(pod, lambda _: None, host_keys=lambda: [""]).call(0, "observe", {})
    assert pod.workers[0].connections == []
    rsa = asyncssh.generate_private_key("ssh-rsa", key_size=2048).export_public_key().decode().strip()
    both = again(pod, host_keys=lambda: [f"{rsa}\n{pod.workers[0].host_key_line}"])
    assert both.call(0, "observe", {})["active"] is None, "of several published keys the one in use counts"
    refused = "does not accept user slipway.* you need roles/compute.osAdminLogin"
    with pytest.raises(WorkerError, match=refused) as caught:
        again(pod, key=private_key(tmp_path / "other"), auth_hint=OS_LOGIN_HINT).call(0, "observe", {})
    assert caught.value.kind == "auth"


def test_a_host_key_that_google_publishes_after_a_repair_is_accepted_once_and_noted(
    make_pod, again, kept: dict[str, Any]
) -> None:
    pod, fleet = make_pod(2, **kept)
    notes: list[str] = []
    fleet.note = notes.append
    assert not failures(fleet.call_all("observe", {}))
    fleet.expect_new_host_keys()
    assert not failures(fleet.call_all("observe", {}))
    assert notes == []
    fresh = change_host_key(pod)
    assert not failures(fleet.call_all("observe", {}))
    [note] = notes
    assert note.startswith("worker 0: its SSH host key is")
    assert note.endswith("as after a repair; Google publishes it, so it is accepted")
    assert fresh.get_fingerprint() in note
    later = again(pod, **kept)
    assert not failures(later.call_all("observe", {}))  # the new key is pinned
    change_host_key(pod)
    with pytest.raises(WorkerError, match="while no controller was looking, or someone else controls it"):
        fleet.call(0, "observe", {})
    assert len(notes) == 1


def test_a_host_key_that_changes_in_one_life_of_the_pod_is_refused(make_pod, again, kept: dict[str, Any]) -> None:
    pod, fleet = make_pod(2, **kept)
    assert not failures(fleet.call_all("observe", {}))
    fresh = change_host_key(pod)
    for asked in (fleet, again(pod, **kept)):
        with pytest.raises(WorkerError, match=r"this VM had .* before: Google repaired it while") as caught:
            asked.call(0, "observe", {})
        assert caught.value.kind == "host_key"
        assert fresh.get_fingerprint() in caught.value.message
        assert f"delete {kept['known_hosts_file']}" in caught.value.message
        assert isinstance(asked.call(1, "observe", {}), dict)
    kept["known_hosts_file"].unlink()
    after = again(pod, **kept)
    assert after.call(0, "observe", {})["active"] is None


def test_a_key_that_google_publishes_is_followed_if_the_config_says_so(make_pod, again, kept: dict[str, Any]) -> None:
    """After repairs that no controller has seen, as often as they come; never a key that Google does not publish."""
    pod, fleet = make_pod(1, **kept, follow_host_keys=True)
    notes: list[str] = []
    fleet.note = notes.append
    for _ in range(3):
        assert not failures(fleet.call_all("observe", {}))
        change_host_key(pod)
    trusted = [line.split()[1:] for line in kept["known_hosts_file"].read_text().splitlines()[1:]]
    assert len(notes) == 2
    stale = again(pod, **kept, follow_host_keys=True, host_keys=lambda: [" ".join(trusted[0])])
    with pytest.raises(WorkerError, match="another machine answers at its address"):
        stale.call(0, "observe", {})


def test_the_first_host_key_can_be_pinned(make_pod, again, kept: dict[str, Any]) -> None:
    """For pods that publish none: whoever answers first is believed, and nobody else from then on."""
    options = {**kept, "trust_on_first_use": True, "host_keys": lambda: []}
    pod, fleet = make_pod(1, **options)
    assert fleet.call(0, "observe", {})["active"] is None
    change_host_key(pod)
    later = again(pod, **options)
    with pytest.raises(WorkerError, match="but was ssh-ed25519") as caught:
        later.call(0, "observe", {})
    assert caught.value.kind == "host_key"


def test_one_survey_answers_everyone_once(make_pod) -> None:
    pod, fleet = make_pod(2)
    commands = pod.workers[1].commands
    fleet.prefetch({"run_id": "r", "code": None})
    surveyed = len(commands)
    assert [a["config"] for a in fleet.observe("config", {"run_id": "r"})] == [None, None]
    assert [a["config"] for a in fleet.observe("code", {"code": None})] == [None, None]
    assert len(commands) == surveyed
    fleet.observe("config", {"run_id": "r"})
    assert len(commands) == surveyed + 1, "who asks again wants to know how it is now"
    fleet.observe("other", {"run_id": "other"})
    assert len(commands) == surveyed + 2, "that was not asked"
    fleet.prefetch({"run_id": "r"})
    fleet.call_all("write_config", {"run_id": "r", "text": "x"})
    assert fleet.observe("config", {"run_id": "r"})[0]["config"], "what was changed is looked at anew"


# Coming and going


def test_fresh_workers_are_waited_for(make_pod, again, tmp_path: Path) -> None:
    """One does not listen yet, one has not heard of our key, and none has published its own."""
    published = ["", "", ""]
    pod, _ = make_pod(3)
    known = pod.workers[1].authorized
    pod.workers[1].authorized = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
    for worker in pod.workers[:2]:
        pod.run_coroutine(worker.drop_connections())
    pod.run_coroutine(pod.workers[1].listen())
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 6:
            published[:] = [w.host_key_line for w in pod.workers]
        if len(pauses) == 12:
            pod.workers[1].authorized = known
            pod.run_coroutine(pod.workers[1].drop_connections())
            for worker in pod.workers[:2]:
                pod.run_coroutine(worker.listen())

    fleet = again(pod, sleep, host_keys=lambda: published, warm_up_seconds=1e6)
    answers = fleet.warm_up()
    assert [answer["home"] for answer in answers] == [str(w.home) for w in pod.workers]
    assert len(pauses) >= 12


def test_a_worker_that_never_comes_is_given_up_and_one_of_a_pod_that_has_gone_is_not_waited_for(make_pod) -> None:
    pauses: list[float] = []
    pod, fleet = make_pod(2, sleep=pauses.append, warm_up_seconds=60.0)
    pod.run_coroutine(pod.workers[0].drop_connections())
    error = only(fleet.warm_up())
    assert (error.worker, error.kind) == (0, "refused")
    assert 60 <= sum(pauses) <= 66
    assert pauses == sorted(pauses)
    pauses.clear()
    assert only(fleet.warm_up(lambda: len(pauses) >= 3)).kind == "refused"
    assert len(pauses) == 3


# Who may change a worker


def test_a_worker_refuses_the_late_commands_of_a_controller_that_another_has_replaced(make_pod) -> None:
    """It slept between its look at the lease and its command."""
    _, fleet = make_pod(1)
    fleet.before_pod_write = lambda: ("bucket/pod", 7)
    fleet.call_all("stop", {"run": "none", "grace_seconds": 0.0})
    fleet.before_pod_write = lambda: ("bucket/pod", 6)
    for command in sorted(FENCED_COMMANDS):
        error = only(fleet.call_all(command, {}))
        assert error.kind == "agent", command
        assert "another controller has taken over this pod (lease 7, not 6)" in str(error)


def test_workers_that_take_minutes_are_left_alone_once_the_controller_is_to_end() -> None:
    """Whoever wants its lease must not wait for a set-up."""
    asked, closed = threading.Event(), threading.Event()

    class Slow:
        """A worker that answers when its connection is closed."""

        closed = False

        def call(self, command: Any, payload: Any) -> Any:
            asked.set()
            closed.wait(60)
            raise WorkerError(0, "worker", "dropped", "closed on this side")

        def close(self) -> None:
            self.closed = True
            closed.set()

    clock, links = Clock(), [Slow(), Slow()]
    parameters: Any = None
    fleets = Fleets(lambda pod: Fleet(parameters, links=links), lambda: ("", 0), print, clock.raise_if_interrupted)  # type: ignore[arg-type]
    threading.Thread(target=lambda: asked.wait(60) and clock.interrupt()).start()
    with pytest.raises(InterruptedSleepError):
        fleets.of(POD).call_all(TIDY, {})
    assert [link.closed for link in links] == [True, True]


# The fleets of several pods

NODE = NodeVms("projects/p/locations/z/nodes/pod")
POD = SshTarget("pod", NODE, "one", "z", "n", ("slipway",), (("10.0.0.2", None),))


def test_a_new_incarnation_closes_the_connections_to_the_old_one_and_a_repair_is_remembered_until_they_open() -> None:
    opened, closed, told = list[str](), list[str](), list[str]()

    def connect(pod: SshTarget) -> Any:
        opened.append(pod.uid)
        expect = lambda: told.append(pod.uid)  # noqa: E731
        return SimpleNamespace(close=lambda: closed.append(pod.uid), expect_new_host_keys=expect)

    fleets = Fleets(connect, lambda: ("bucket/pod", 7))
    fleets.expect_new_host_keys("one")
    assert told == []
    first = fleets.of(POD)
    assert fleets.of(POD) is first
    assert first.before_pod_write() == ("bucket/pod", 7)
    assert fleets.of(replace(POD, uid="two")) is not first
    assert (opened, closed, told) == (["one", "two"], ["one"], ["one"])
    fleets.expect_new_host_keys("two")
    assert told == ["one", "two"]
    fleets.close()
    assert closed == ["one", "two"]
