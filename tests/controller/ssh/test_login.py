"""Which keys are whose: ours, private and on every node; those of the workers, and for how long."""

import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import asyncssh
import pytest

from controller.core.clock import Clock
from controller.gcp.errors import ConflictError, NotFoundError
from controller.resources.pod.tpu_api.plane import NodeVms
from controller.ssh.host_keys import HostKeys
from controller.ssh.login import Login, private_key, public_key_line

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
