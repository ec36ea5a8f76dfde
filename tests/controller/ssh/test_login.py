"""Our key reaches the metadata of a node beside the keys that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from controller.core.clock import Clock
from controller.gcp.errors import ConflictError, NotFoundError
from controller.resources.pod.tpu_api.plane import NodeVms
from controller.ssh.login import Login

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


def test_our_key_is_added_once_and_others_stay(tmp_path: Path) -> None:
    tpu = FakeTpu()
    login = Login(cast(Any, tpu), Clock(), "p", "me", tmp_path)
    assert not login.is_authorized(VMS)
    login.authorize(VMS)
    assert tpu.metadata == {
        "ssh-keys": f"anna:ssh-ed25519 AAAA anna\n{login.key_line()}",
        "startup-script": "true",
    }
    assert login.is_authorized(VMS)
    assert login.user_name() == "me"


def test_google_is_asked_only_if_the_observed_keys_lack_ours(tmp_path: Path) -> None:
    tpu = FakeTpu()
    login = Login(cast(Any, tpu), Clock(), "p", "me", tmp_path)
    assert login.is_authorized(VMS, f"anna:ssh-ed25519 AAAA anna\n{login.key_line()}")
    assert tpu.gets == 0
    tpu.exists = False
    assert not login.is_authorized(VMS, "anna:ssh-ed25519 AAAA anna")


def test_two_clients_that_add_their_keys_at_once_both_get_in(tmp_path: Path) -> None:
    tpu = FakeTpu()
    tpu.busy = 1
    login = Login(cast(Any, tpu), Clock(), "p", "me", tmp_path, poll_seconds=0.0)
    login.authorize(VMS)
    assert tpu.metadata["ssh-keys"].splitlines() == [
        "anna:ssh-ed25519 AAAA anna",
        "ben:ssh-ed25519 BBBB ben",
        login.key_line(),
    ]
