"""Which keys are whose; what ~/.ssh/config may say about the way to a worker, and what fabric does with it."""

import io
import shutil
import socket
import socketserver
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import asyncssh
import pytest

from controller.core.errors import ConfigError
from controller.core.this_process import Clock
from controller.gcp.google_errors import ConflictError, NotFoundError
from controller.resources.pod.tpu_api import NodeVms
from controller.ssh.connection import PortForward
from controller.ssh.fleet import Fleet, WorkerError
from controller.ssh.login import HostKeys, Login, private_key, public_key_line
from tests.controller.agent.conftest import wait_for
from tests.controller.ssh.sshserver import SshPod
from tests.fakes.loopback import free_port

LAX = "StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  User nobody\n  ConnectTimeout 1"
"""What must not count for a worker."""
RELAY = """
import os, socket, sys, threading
open(sys.argv[1], "w").write(sys.argv[2])
there = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
def up():
    while data := os.read(0, 65536):
        there.sendall(data)
threading.Thread(target=up, daemon=True).start()
while data := there.recv(65536):
    os.write(1, data)
"""
"""Stands for `nc`."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose ~/.ssh/config the test writes."""
    (tmp_path / "home/.ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def block(name: str, port: int, *lines: str) -> str:
    return "\n  ".join([f"Host {name}", "HostName 127.0.0.1", f"Port {port}", *lines]) + "\n"


def by_home(pod: SshPod, home: Path, fleets: list[Fleet], *blocks: str, **access: object) -> Fleet:
    (home / ".ssh/config").write_text("".join(blocks))
    fleets.append(Fleet(pod.access(ssh_config=None, **access), sleep=lambda _: None))
    return fleets[-1]


def test_host_name_and_port_count_and_the_policy_stays(make_pod, home: Path, fleets: list[Fleet]) -> None:
    pod, _ = make_pod(2)
    lines = [block(f"10.0.0.{i}", w.port, LAX) for i, w in enumerate(pod.workers)]
    published = [pod.workers[0].host_key_line] * 2
    fleet = by_home(pod, home, fleets, *lines, host_keys=lambda: published)
    assert fleet.call(0, "observe", {})["home"] == str(pod.workers[0].home)
    with pytest.raises(WorkerError, match="another machine answers at its address") as caught:
        fleet.connection(1).connection().run("true")
    assert caught.value.kind == "host_key"
    assert pod.workers[1].commands == []


def test_identity_file_is_tried_after_our_key(make_pod, home: Path, fleets: list[Fleet], tmp_path: Path) -> None:
    pod, _ = make_pod()
    stranger = private_key(tmp_path / "not-authorized")
    lines = ["IdentityFile ~/.ssh/missing", f"IdentityFile {private_key(pod.keys)}"]
    fleet = by_home(pod, home, fleets, block("10.0.0.0", pod.workers[0].port, *lines), key=stranger)
    assert fleet.connection(0).connection().run("echo in", hide=True).stdout == "in\n"
    rsa = home / ".ssh/id_rsa"
    asyncssh.generate_private_key("ssh-rsa", key_size=2048).write_private_key(rsa)
    fleet = by_home(pod, home, fleets, block("10.0.0.0", pod.workers[0].port, f"IdentityFile {rsa}"), key=stranger)
    with pytest.raises(WorkerError, match="does not accept user slipway") as caught:
        fleet.connection(0).connection().open()
    assert caught.value.kind == "auth"


def test_a_gateway_is_used_once_its_host_key_is_known(make_pod, home: Path, fleets: list[Fleet]) -> None:
    """`Host *` includes the gateways; they are visited in the order of `ProxyJump`."""
    pod, _ = make_pod(4)
    first, second, *behind = pod.workers
    login = ["User slipway", f"IdentityFile {private_key(pod.keys)}"]
    blocks = [block("first", first.port, *login), block("second", second.port, *login)]
    blocks += [block(f"10.0.0.{i + 2}", w.port) for i, w in enumerate(behind)]
    blocks += [f"Host *\n  ProxyJump first,second\n  {LAX}\n"]
    fleet = by_home(pod, home, fleets, *blocks)
    unknown = "gateway first has the host key .* not in ~/.ssh/known_hosts"
    with pytest.raises(WorkerError, match=unknown) as caught:
        fleet.call(2, "observe", {})
    assert caught.value.kind == "denied"
    known = [f"[127.0.0.1]:{w.port} {w.host_key_line}\n" for w in (first, second)]
    (home / ".ssh/known_hosts").write_text("".join(known))
    fleet = by_home(pod, home, fleets, *blocks)
    assert [a["home"] for a in fleet.call_all("observe", {}, workers=[2, 3])] == [str(w.home) for w in behind]
    assert first.forwarded == [second.port]
    assert sorted(second.forwarded) == sorted(w.port for w in behind)
    assert len(second.connections) == 1, "the workers share the gateways"
    fleet.close()
    with pytest.raises(WorkerError, match="closed on this side"):
        fleet.connection(2).connection().open()


def test_a_gateway_that_shows_another_key_or_is_down_is_told(make_pod, home: Path, fleets: list[Fleet]) -> None:
    pod, _ = make_pod(2)
    gateway, worker = pod.workers
    blocks = [block("first", gateway.port), block("10.0.0.1", worker.port, "ProxyJump me@first")]
    (home / ".ssh/known_hosts").write_text(f"[127.0.0.1]:{gateway.port} {worker.host_key_line}\n")
    for kind, said in (
        ("denied", r"gateway first \(me\): Host key for server"),
        ("refused", "no SSH connection: gateway first: "),
    ):
        with pytest.raises(WorkerError, match=said) as caught:
            by_home(pod, home, fleets, *blocks).call(1, "observe", {})
        assert caught.value.kind == kind
        pod.run_coroutine(gateway.drop_connections())
    words = r"cannot read the SSH config .*home/\.ssh/config.*line 1|home/\.ssh/config, line 1: 'Host'"
    with pytest.raises(ConfigError, match=words):
        by_home(pod, home, fleets, "Host\n").call(0, "observe", {})


@pytest.mark.skipif(shutil.which("ssh") is None, reason="OpenSSH is not installed")
def test_a_gateway_of_an_included_file_is_used_for_our_user(make_pod, home: Path, fleets: list[Fleet]) -> None:
    """As ssh reads it: `Match user` is about the user on the worker, and a hop has a user and a port of its own."""
    pod, _ = make_pod(2)
    gateway, worker = pod.workers
    (home / ".ssh/pods").write_text(
        f"Match user slipway host 10.*\n  HostName 127.0.0.1\n  Port {worker.port}\n"
        f"  ProxyJump slipway@127.0.0.1:{gateway.port}\n"
        f"Match user slipway originalhost 127.0.0.1\n  IdentityFile {private_key(pod.keys)}\n"
    )
    (home / ".ssh/known_hosts").write_text(f"[127.0.0.1]:{gateway.port} {gateway.host_key_line}\n")
    fleet = by_home(pod, home, fleets, "Include pods\n", "Match user nobody\n  ProxyJump nowhere.invalid\n")
    assert fleet.call(1, "observe", {})["home"] == str(worker.home)
    assert gateway.forwarded == [worker.port]


def test_a_proxy_command_is_used_and_none_means_none(make_pod, home: Path, fleets: list[Fleet]) -> None:
    pod, _ = make_pod(2)
    (home / "relay.py").write_text(RELAY)
    blocks = [block("10.0.0.0", pod.workers[0].port, f"ProxyCommand {sys.executable} {home}/relay.py {home}/used %p")]
    blocks += [block("10.0.0.1", pod.workers[1].port, "ProxyJump none"), "Host *\n  ProxyJump nowhere.invalid\n"]
    blocks[0] += "  ProxyJump none\n"
    fleet = by_home(pod, home, fleets, *blocks)
    for worker in (0, 1):
        assert fleet.connection(worker).connection().run("echo in", hide=True).stdout == "in\n"
    assert (home / "used").read_text() == str(pod.workers[0].port)


def test_files_go_up_and_come_down(make_pod, tmp_path: Path) -> None:
    pod, fleet = make_pod()
    connection = fleet.connection(0).connection()
    connection.put(io.BytesIO(b"x" * 300_000), "data.bin")
    assert (pod.workers[0].home / "data.bin").read_bytes() == b"x" * 300_000
    pod.run_coroutine(pod.workers[0].drop_connections())
    pod.run_coroutine(pod.workers[0].listen())
    wait_for(lambda: not connection.is_connected)  # paramiko hears of it in a thread of its own
    connection.get("data.bin", str(tmp_path / "back"))  # over a new connection
    assert (tmp_path / "back").read_bytes() == b"x" * 300_000


class Pages(socketserver.BaseRequestHandler):
    """Sends 3 MB of whatever byte it is sent."""

    def handle(self) -> None:
        self.request.sendall(self.request.recv(1) * 3_000_000)


@contextmanager
def serving(port: int) -> Iterator[None]:
    """A server on the loopback, which the workers share with us."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", port), Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def page(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=240) as connection:
        connection.sendall(b"x")
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def retried(act: Callable[[], bytes]) -> bytes:
    end = time.monotonic() + 240
    while True:
        try:
            return act()
        except ConnectionError:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_forward_outlives_what_refuses_and_what_breaks(make_pod) -> None:
    pod, fleet = make_pod()
    notes: list[str] = []
    remote = free_port()
    forward = PortForward(fleet.connection(0), 0, remote, notes.append)
    serve = threading.Thread(target=forward.serve, daemon=True)
    serve.start()
    with socket.create_connection(("127.0.0.1", forward.port), timeout=240) as refused:
        assert refused.recv(1) == b""
    assert [f"cannot connect to port {remote} of the worker" in note for note in notes] == [True]
    with serving(remote):
        assert page(forward.port) == b"x" * 3_000_000
        local, ends = free_port(), {"remote_port": remote, "local_host": "127.0.0.1", "remote_host": "127.0.0.1"}
        with fleet.connection(0).connection().forward_local(local, **ends):  # fabric's own, as a notebook uses it
            assert retried(lambda: page(local)) == b"x" * 3_000_000  # its thread may not have bound the port yet
        pod.run_coroutine(pod.workers[0].drop_connections())
        pod.run_coroutine(pod.workers[0].listen())
        assert retried(lambda: page(forward.port)) == b"x" * 3_000_000  # it may not know yet that the old one is gone
        before = len(pod.workers[0].forwarded)
        with socket.create_connection(("127.0.0.1", forward.port), timeout=240) as idle:
            while len(pod.workers[0].forwarded) == before:
                time.sleep(0.01)
            forward.close()
            assert idle.recv(1) == b""
    serve.join(240)
    assert not serve.is_alive()


VMS = NodeVms("projects/p/locations/z/nodes/pod")


class FakeTpu:
    """A node with metadata; `exists` is False for one that has gone."""

    def __init__(self) -> None:
        self.metadata: dict[str, str] = {"ssh-keys": "anna:ssh-ed25519 AAAA anna", "startup-script": "true"}
        self.exists = True
        self.gets = self.busy = 0

    def call(self, api: str, method: str, **parameters: Any) -> dict[str, Any]:
        assert (api, parameters["name"]) == ("tpu", VMS.node)
        if not self.exists:
            raise NotFoundError(method, 404, "NOT_FOUND", "gone")
        if method.endswith("patch"):
            assert parameters["updateMask"] == "metadata"
            if self.busy:
                self.busy -= 1
                self.metadata = self.metadata | {"ssh-keys": self.metadata["ssh-keys"] + "\nben:ssh-ed25519 BBBB ben"}
                raise ConflictError(method, 409, "ABORTED", "another operation is under way")
            self.metadata = parameters["body"]["metadata"]
            return {"done": True}
        self.gets += 1
        return {"metadata": self.metadata}


@pytest.fixture
def tpu() -> FakeTpu:
    return FakeTpu()


@pytest.fixture
def login(tpu: FakeTpu, tmp_path: Path) -> Login:
    return Login(cast(Any, tpu), Clock(), "p", "me", tmp_path, poll_seconds=0.0)


def test_our_key_is_added_once_and_others_stay(tpu: FakeTpu, login: Login) -> None:
    assert not login.is_authorized(VMS)
    login.authorize(VMS)
    keys = f"anna:ssh-ed25519 AAAA anna\n{login.key_line()}"
    assert tpu.metadata == {"ssh-keys": keys, "startup-script": "true"}
    assert login.is_authorized(VMS)
    assert login.user_name() == "me"


def test_google_is_asked_only_if_the_observed_keys_lack_ours(tpu: FakeTpu, login: Login) -> None:
    assert login.is_authorized(VMS, f"anna:ssh-ed25519 AAAA anna\n{login.key_line()}")
    assert tpu.gets == 0
    tpu.exists = False
    assert not login.is_authorized(VMS, "anna:ssh-ed25519 AAAA anna")


def test_two_clients_that_add_their_keys_at_once_both_get_in(tpu: FakeTpu, login: Login) -> None:
    tpu.busy = 1
    login.authorize(VMS)
    assert tpu.metadata["ssh-keys"].splitlines() == [
        "anna:ssh-ed25519 AAAA anna",
        "ben:ssh-ed25519 BBBB ben",
        login.key_line(),
    ]


def test_a_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    line = public_key_line(tmp_path / "keys", "slipway")
    path = private_key(tmp_path / "keys")
    assert line.split()[0] == "ssh-ed25519"
    assert line.endswith(" slipway")
    assert public_key_line(tmp_path / "keys", "slipway") == line
    assert asyncssh.read_private_key(path).export_public_key().split()[1].decode() == line.split()[1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no draft is left"


def test_several_processes_agree_on_one_key(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from controller.ssh.login import *; "
        "print(public_key_line(pathlib.Path(sys.argv[1]), 'u'))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "keys")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert len({process.communicate(timeout=300)[0] for process in processes}) == 1


A, B = {"ssh-ed25519": "A"}, {"ssh-ed25519": "B"}


@pytest.mark.parametrize(
    ("published", "expected", "reads"),
    [
        ([["ssh-ed25519 A", "ssh-ed25519 B"]], [A, B, A], 1),
        ([[], ["ssh-ed25519 A", "ssh-ed25519 B"]], [{}, B, A], 2),
        ([["", "ssh-ed25519 B"], ["ssh-ed25519 A", "ssh-ed25519 B"]], [{}, B, A], 2),
    ],
    ids=["all there", "none at first", "one late"],
)
def test_they_are_read_until_they_are_there(published: list, expected: list[dict[str, str]], reads: int) -> None:
    left = list(published)
    keys = HostKeys(lambda: left.pop(0))
    assert [keys.keys_of(worker) for worker in (0, 1, 0)] == expected
    assert len(published) - len(left) == reads


def test_what_is_known_once_stays_and_further_kinds_are_added(tmp_path: Path) -> None:
    published = [["ssh-ed25519 A", ""], ["ssh-ed25519 C\nssh-rsa R", "ssh-ed25519 B"]]
    keys = HostKeys(lambda: published.pop(0), tmp_path / "kept", "one")
    assert (keys.keys_of(0), keys.keys_of(1)) == (A, B)
    assert keys.keys_of(0) == {"ssh-ed25519": "A", "ssh-rsa": "R"}


def test_they_outlive_the_process_but_not_the_pod(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts" / "pod"
    assert HostKeys(lambda: ["ssh-ed25519 A"], file, "one").keys_of(0) == A
    assert HostKeys(lambda: pytest.fail("they are kept"), file, "one").keys_of(0) == A
    assert HostKeys(lambda: ["ssh-ed25519 B"], file, "two").keys_of(0) == B


def test_what_a_program_publishes_as_a_key_and_is_none_is_left_out(tmp_path: Path) -> None:
    hostile = "ssh-ed25519\nssh-ed25519 \nssh-ed25519\n../x y\n\nssh-ed25519 A\tB\nssh-rsa R\x1b[2J\n# incarnation one"
    assert HostKeys(lambda: [f"{hostile}\nssh-ed25519 A"], tmp_path / "kept", "one").keys_of(0) == A
    assert HostKeys(list, tmp_path / "kept", "one").cached(0) == A
    assert HostKeys(lambda: ["ssh-dss D\nssh-ed25519 A a comment"]).keys_of(0) == A, "kinds that cannot be checked"
