"""The way to one worker, its connection and the agent behind it, against SSH servers that behave badly; IAP."""

import io
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from email.message import Message
from types import SimpleNamespace
from typing import Any, cast
from urllib.error import HTTPError

import pytest

from conf.schema.cloud import IAP_RANGE
from controller.cli import main
from controller.emulator import Emulator
from controller.gcp.google_errors import GoogleError
from controller.resources.pod.tpu_api import NodeVms
from controller.ssh import agent_link, route
from controller.ssh.agent_link import build_bundle
from controller.ssh.fleet import SshTarget, WorkerError, failures
from controller.ssh.route import GuestAttributes, PodConnector, admits_ssh, choose_route, find_public_ip
from tests.controller.conftest import ECHO_COMMAND, ONE_WORKER, SlipwayCli
from tests.controller.localcloud.harness import wait_for


def test_the_agent_is_placed_when_it_is_first_missed(make_pod) -> None:
    pod, fleet = make_pod(fresh=True)
    assert fleet.call(0, "observe", {})["home"] == str(pod.workers[0].home)
    placed = pod.workers[0].home / ".slipway" / build_bundle().name
    assert placed.read_bytes() == build_bundle().content
    before = len(pod.workers[0].commands)
    fleet.call(0, "observe", {})
    assert pod.workers[0].commands[before:] == [build_bundle().shell("observe")]
    assert len(pod.workers[0].connections) == 1
    placed.unlink()
    shutil.rmtree(placed.with_suffix(""))
    assert fleet.call(0, "observe", {})["active"] is None, "and again, when someone has removed it"


def test_an_agent_that_cannot_be_placed_says_why(make_pod, monkeypatch: pytest.MonkeyPatch) -> None:
    from paramiko import SFTPClient

    pod, fleet = make_pod(2, fresh=True)
    whole = SFTPClient.putfo

    def half(sftp: SFTPClient, fl: io.BytesIO, *arguments: object, **options: object) -> None:
        whole(sftp, io.BytesIO(fl.read(1000)), *arguments, **options)
        raise EOFError("the upload was interrupted")

    def full(*_: object, **__: object) -> None:
        raise OSError("Failure")  # all that OpenSSH's SFTP server says

    monkeypatch.setattr(SFTPClient, "putfo", half)
    with pytest.raises(WorkerError, match="cannot install the agent: the upload was interrupted"):
        fleet.call(0, "observe", {})
    [draft] = (folder := pod.workers[0].home / ".slipway").iterdir()
    assert draft.name.startswith(f".{build_bundle().name}."), "what arrives incomplete is not placed"
    monkeypatch.setattr(SFTPClient, "putfo", full)
    (folder / ".space").symlink_to("/dev/full")
    with pytest.raises(WorkerError, match=r"cannot install the agent: No space left on device: ~/\.slipway$"):
        fleet.call(0, "observe", {})
    with pytest.raises(WorkerError, match=r"cannot install the agent: Failure$"):
        fleet.call(0, "observe", {})  # the disk has space again
    (pod.workers[1].home / ".slipway").write_text("in the way")
    with pytest.raises(WorkerError, match=r"cannot install the agent: mkdir: .*File exists") as caught:
        fleet.call(1, "observe", {})
    assert caught.value.kind == "agent"


def test_what_is_asked_never_passes_through_a_shell(make_pod) -> None:
    pod, fleet = make_pod()
    text = "; touch ~/evil # $(touch ~/evil)\n'\"`touch ~/evil`" + "x" * 8_000_000  # a large payload arrives whole
    fleet.call(0, "write_config", {"run_id": "r", "text": text, "env": {"A": text[:50]}})
    assert (pod.workers[0].home / ".slipway/runs/r/run.yaml").read_text() == text
    assert not (pod.workers[0].home / "evil").exists()
    assert not any("evil" in command for command in pod.workers[0].commands)


def test_what_the_agent_cannot_do_is_told_in_its_words(make_pod) -> None:
    _, fleet = make_pod()
    with pytest.raises(WorkerError, match=r"worker 0 \(10\.0\.0\.0\): '\.\./x' is not a valid name") as caught:
        fleet.call(0, "observe", {"code": "../x"})
    assert caught.value.kind == "agent"
    with pytest.raises(WorkerError, match="TypeError") as caught:
        fleet.call(0, "observe", {"nonsense": 1})
    assert "Traceback" in caught.value.detail


@pytest.mark.parametrize("answer", ["[1]", "1", "null", "nonsense"])
def test_an_answer_that_is_none_is_an_error_of_that_worker(make_pod, answer: str) -> None:
    """Whoever can replace the agent there, as the experiment's code can, may answer anything."""
    pod, fleet = make_pod()
    fleet.call(0, "observe", {})
    unpacked = pod.workers[0].home / ".slipway" / build_bundle().name.removesuffix(".pyz")
    (program := unpacked / "__main__.py").unlink()  # workers share it
    program.write_text(f"print({answer!r})")
    with pytest.raises(WorkerError, match="did not return JSON"):
        fleet.call(0, "observe", {})
    with pytest.raises(WorkerError, match="did not return JSON"):
        list(fleet.stream(0, "watch", {}))


def test_a_command_that_takes_too_long_is_a_timeout(make_pod, monkeypatch: pytest.MonkeyPatch) -> None:
    pod, fleet = make_pod()
    monkeypatch.setitem(agent_link.COMMAND_TIMEOUTS, "observe", 0.3)
    (pod.workers[0].home / "bin").mkdir()
    (fake := pod.workers[0].home / "bin/python3").write_text("#!/bin/sh\nsleep 5\n")
    fake.chmod(0o700)
    pod.workers[0].path = f"{fake.parent}:{pod.workers[0].path}"
    with pytest.raises(WorkerError, match=r"not finished after 0\.3 s") as caught:
        fleet.call(0, "observe", {})
    assert caught.value.kind == "timeout"


def test_a_frozen_connection_is_noticed(make_pod) -> None:
    pod, fleet = make_pod(1, silence_seconds=0.3, connect_seconds=1.0, sleep=lambda _: None)
    fleet.call(0, "observe", {})
    errors: list[WorkerError] = []

    def ask() -> None:
        try:
            fleet.connection(0).follow("sleep 600", print, print)
        except WorkerError as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while "sleep 600" not in pod.workers[0].commands:
        time.sleep(0.02)
    with pod.frozen():
        asking.join(240)
        assert [error.kind for error in errors] == ["dropped"]
        [error] = failures(fleet.call_all("observe", {}))
        assert error.kind in ("timeout", "refused", "dropped")
    assert fleet.call(0, "observe", {})["active"] is None


def test_a_silent_command_is_not_taken_for_a_frozen_one(make_pod) -> None:
    _, fleet = make_pod(1, silence_seconds=0.1)
    printed: list[bytes] = []
    assert fleet.connection(0).follow("sleep 0.3; echo done", printed.append, print) == 0
    assert printed == [b"done\n"]


def test_a_closed_fleet_answers_no_more(make_pod) -> None:
    _, fleet = make_pod()
    fleet.call(0, "observe", {})
    waiting = threading.Thread(target=fleet.call_all, args=("observe", {}))
    waiting.start()
    fleet.close()
    waiting.join(240)
    assert not waiting.is_alive()
    with pytest.raises(WorkerError, match="closed on this side"):
        fleet.call(0, "observe", {})


def lose(monkeypatch: pytest.MonkeyPatch, transport: Any) -> None:
    """Let a connection be lost, which is noticed at the next message."""

    def lost(*_: object) -> None:
        raise EOFError

    monkeypatch.setattr(transport.packetizer, "send_message", lost)


def test_a_connection_lost_during_a_command_is_a_drop_and_can_be_closed(
    make_pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that stops then, as when a run ends over its budget, raises nothing that the collector would print."""

    def reading() -> Iterator[None]:
        with fleet.connection(0).channel():
            yield

    _, fleet = make_pod(fresh=True)
    fleet.call(0, "observe", {})
    assert fleet.connection(0).connection()._sftp is not None, "the agent was placed over SFTP"
    reader = reading()
    next(reader)
    with (
        pytest.raises(WorkerError, match="the connection was lost") as caught,
        fleet.connection(0).channel() as channel,
    ):
        lose(monkeypatch, channel.get_transport())
    assert caught.value.kind == "dropped"
    reader.close()
    fleet.close()


def test_a_worker_that_nobody_reads_fills_a_small_buffer(make_pod) -> None:
    """64 of them at paramiko's 2 MiB each were a large part of a controller's memory."""
    _, fleet = make_pod()
    with fleet.connection(0)._start_command("head -c 3000000 /dev/zero", b"") as channel:
        wait_for(lambda: len(channel.in_buffer) >= 128 << 10, "the buffer fills")
        threading.Event().wait(0.1)
        assert len(channel.in_buffer) <= 256 << 10
        assert sum(map(len, fleet.connection(0).chunks(channel))) == 3_000_000


HERE = "8.8.4.4"


def rule(*sources: str, deny: bool = False, **other: Any) -> dict[str, Any]:
    speaks = [{"IPProtocol": "tcp", "ports": ["22"]}]
    return {"sourceRanges": list(sources), "denied" if deny else "allowed": speaks, **other}


def nobody_asks() -> str:
    raise AssertionError("our address does not matter here")


@pytest.mark.parametrize(
    ("rules", "external", "laptop", "way"),
    [
        ([rule(IAP_RANGE), rule(f"{HERE}/32")], True, lambda: HERE, "external"),
        ([rule(IAP_RANGE), rule("0.0.0.0/0")], True, lambda: HERE, "external"),
        ([rule(IAP_RANGE), rule("9.9.9.0/24")], True, lambda: HERE, "iap"),
        ([rule(IAP_RANGE), rule(f"{HERE}/32")], True, lambda: None, "iap"),
        ([rule(IAP_RANGE), rule(f"{HERE}/32")], False, nobody_asks, "iap"),
        ([rule(IAP_RANGE), rule("10.0.0.0/8")], True, nobody_asks, "iap"),
        ([rule(IAP_RANGE)], True, nobody_asks, "iap"),
        ([rule(f"{HERE}/32")], False, nobody_asks, "internal"),
        ([rule("10.0.0.0/8")], True, nobody_asks, "internal"),
        ([], True, nobody_asks, "internal"),
    ],
)
def test_the_way(rules: list[dict[str, Any]], external: bool, laptop: Callable[[], str | None], way: str) -> None:
    assert choose_route(rules, external=external, laptop=laptop) == way


@pytest.mark.parametrize(
    ("rules", "open_"),
    [
        ([rule(f"{HERE}/32")], True),
        ([rule(f"{HERE}/32", targetTags=["slipway"])], True),
        ([rule(f"{HERE}/32", targetTags=["other"])], False),
        ([rule(f"{HERE}/32", disabled=True)], False),
        ([rule(f"{HERE}/32"), rule("0.0.0.0/0", deny=True)], False),
        ([rule(f"{HERE}/32", priority=900), rule("0.0.0.0/0", deny=True)], True),
        ([rule(f"{HERE}/32"), rule("0.0.0.0/0", deny=True, priority=1001)], True),
        ([rule(f"{HERE}/32"), rule("9.9.9.0/24", deny=True, priority=1)], True),
    ],
)
def test_all_rules_decide_together(rules: list[dict[str, Any]], open_: bool) -> None:
    assert admits_ssh(rules, f"{HERE}/32", ("slipway",)) is open_


@pytest.mark.parametrize(("tags", "way"), [(("slipway",), "external"), (("theirs",), "iap"), ((), "iap")])
def test_the_tags_of_the_pod_itself_decide(tags: tuple[str, ...], way: str) -> None:
    """An adopted pod need not bear the tag that Slipway's own rules aim at."""
    google = SimpleNamespace(list_all=lambda *_, **__: [
        {**rule(f"{HERE}/32", targetTags=["slipway"]), "network": "n"}, {**rule(IAP_RANGE), "network": "n"}
    ])  # fmt: skip
    config = SimpleNamespace(ssh=SimpleNamespace(method="auto"))
    connector = PodConnector(
        cast(Any, config), cast(Any, google), cast(Any, None), cast(Any, SimpleNamespace(project="p")), lambda: HERE
    )
    pod = SshTarget(
        "pod", NodeVms("projects/p/locations/z/nodes/pod"), "one", "z", "n", tags, (("10.0.0.2", "34.0.0.2"),)
    )
    assert connector.route_to(pod) == way


@pytest.mark.parametrize(
    ("asked", "found"),
    [("good", "8.8.4.4"), ("down good", "8.8.4.4"), ("html six good", "8.8.4.4"), ("html down", None)],
)
def test_the_first_service_that_knows_our_address_is_believed(
    monkeypatch: pytest.MonkeyPatch, asked: str, found: str | None
) -> None:
    answers = {"good": b"8.8.4.4\n", "html": b"<html>", "six": b"2001:db8::1\n"}

    def answer(_: object, service: str, timeout: float) -> io.BytesIO:
        if service not in answers:
            raise HTTPError(service, 500, "", Message(), None)
        return io.BytesIO(answers[service])

    monkeypatch.setattr("urllib.request.OpenerDirector.open", answer)
    assert find_public_ip(tuple(asked.split())) == found


KEEP = [ECHO_COMMAND, ONE_WORKER, "cleanup.on_success=keep"]
HIDDEN = [f"network.ssh_source_ranges=[{IAP_RANGE}]"]


def tunnels(cloud: Emulator) -> int:
    return sum(request["api"] == "iap" for request in cloud.requests())


@pytest.mark.e2e
def test_a_pod_without_external_addresses_runs_a_program(slipway: SlipwayCli) -> None:
    code, out, err = slipway("up", *KEEP, *HIDDEN)
    assert (code, err) == (0, "")
    assert "hello from worker 0" in out
    cloud = slipway.cloud()
    assert tunnels(cloud) == 1
    [node] = cloud.get("state")["node"].values()
    assert not any("accessConfig" in endpoint for endpoint in node["networkEndpoints"])
    [worker, *_] = cloud.get("state")["worker"].values()
    with pytest.raises(ConnectionRefusedError):  # there is no other way
        socket.create_connection((worker["host"], worker["port"]), timeout=5)
    words = "head -c 4000000 /dev/zero | tr '\\0' x"
    assert main.run(["exec", "--worker", "0", "--json", "--", words]) == 0  # many windows of the tunnel
    assert "x" * 4_000_000 in slipway.capsys.readouterr().out
    what_goes_wrong_is_told_apart(cloud)


def target(cloud: Emulator, **changed: object) -> route.IapTarget:
    [node] = cloud.get("state")["node"].values()
    plain = {"project": "slipway-local", "zone": node["name"].split("/")[3], "instance": f"t1v-n-{node['id']}-w-0"}
    return route.IapTarget(**{**plain, **changed})  # pyright: ignore[reportArgumentType]


def what_goes_wrong_is_told_apart(cloud: Emulator) -> None:
    tunnel = route.open_tunnel(target(cloud), lambda: cloud.token, 10, cloud.iap)
    tunnel.settimeout(10)
    assert tunnel.recv(4) == b"SSH-"
    assert tunnel.recv(1000).startswith(b"2.0-")
    tunnel.settimeout(0.05)
    with pytest.raises(TimeoutError):
        tunnel.recv(1)
    tunnel.close()
    assert tunnel.recv(1) == b""
    with pytest.raises(BrokenPipeError):
        tunnel.send(b"x")
    with pytest.raises(PermissionError, match="401"):
        route.open_tunnel(target(cloud), lambda: "wrong", 10, cloud.iap)
    for changed, words in [
        ({"instance": "t1v-n-1-w-0"}, "cannot find the VM"),
        ({"zone": "us-east1-c"}, "cannot find the VM"),
        ({"port": 80}, "does a firewall rule allow"),
    ]:
        with pytest.raises(ConnectionRefusedError, match=words):
            route.open_tunnel(target(cloud, **changed), lambda: cloud.token, 10, cloud.iap)


@pytest.mark.e2e
def test_a_host_that_is_no_proxy_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"ws://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TimeoutError):
            route.open_tunnel(route.IapTarget("p", "z", "i"), lambda: "t", 0.2, where)
    with pytest.raises(OSError, match="refused"):
        route.open_tunnel(route.IapTarget("p", "z", "i"), lambda: "t", 5, where)


DISABLED = "Constraint constraints/compute.disableGuestAttributesAccess violated"


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (412, DISABLED, PermissionError),
        (400, DISABLED, PermissionError),
        (503, "backend error", ConnectionRefusedError),
        (412, "no attributes yet", None),
        (404, "not found", None),
    ],
)
def test_guest_attributes_that_a_policy_forbids_are_not_waited_for(
    status: int, message: str, kind: type[OSError] | None
) -> None:
    def refuse(_: object) -> None:
        raise GoogleError("getGuestAttributes", status, "ERROR", message)

    target: Any = SimpleNamespace(vms=SimpleNamespace(guest_attributes=refuse), zone="z")
    guests = GuestAttributes(cast(Any, None), target, "p", "")
    if kind is None:
        assert guests.host_keys() == []  # nothing is published yet
        return
    with pytest.raises(kind, match=re.escape(message)):
        guests.host_keys()
