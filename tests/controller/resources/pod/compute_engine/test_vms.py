"""SSH keys and host keys of the VMs of a slice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from controller.gcp.errors import NotFoundError
from controller.resources.pod.compute_engine.vms import InstanceVms
from tests.controller.resources.pod.compute_engine.fake import ZONE, FakeGoogle, context_of

VMS = InstanceVms("p1", ZONE, ("pod-0", "pod-1"))


def with_keys(*keys: str) -> FakeGoogle:
    google = FakeGoogle()
    for index, lines in enumerate(keys):
        items = [{"key": "ssh-keys", "value": lines}, {"key": "other", "value": "stays"}]
        google.held["instances", f"pod-{index}"] = {"metadata": {"fingerprint": f"f{index}", "items": items}}
    return google


def test_a_key_counts_if_every_vm_has_it(tmp_path: Path) -> None:
    google: Any = with_keys("a:1\nb:2", "b:2\nc:3")
    assert VMS.ssh_keys(google) == "b:2"


def test_a_key_is_added_where_it_is_missing_and_all_else_stays(tmp_path: Path) -> None:
    google = with_keys("a:1\nb:2", "c:3")
    sent: list[dict[str, Any]] = []
    plain = google.call

    def call(api: str, method: str, **parameters: Any) -> dict[str, Any]:
        if method == "instances.setMetadata":
            sent.append(parameters)
        return plain(api, method, **parameters)

    google.call = call  # type: ignore[method-assign]
    VMS.add_ssh_key(context_of(google, tmp_path), "b:2")
    [one] = sent
    assert one["instance"] == "pod-1"
    items = [{"key": "ssh-keys", "value": "c:3\nb:2"}, {"key": "other", "value": "stays"}]
    assert one["body"] == {"fingerprint": "f1", "items": items}


def test_the_name_of_a_vm_is_known_before_it_publishes_anything() -> None:
    published = [{"namespace": "hostkeys", "key": "ssh-ed25519", "value": "AAAA"}]

    class Google:
        def call(self, api: str, method: str, **parameters: Any) -> dict[str, Any]:
            assert parameters["queryPath"] == "hostkeys/"
            if parameters["instance"] == "pod-1":
                raise NotFoundError(method, 404, "notFound", "nothing yet")
            return {"queryValue": {"items": published}}

    google: Any = Google()
    first, second = VMS.guest_attributes(google)
    name = {"namespace": "guestInventory", "key": "hostname"}
    assert first == [*published, {**name, "value": "pod-0"}]
    assert second == [{**name, "value": "pod-1"}]
