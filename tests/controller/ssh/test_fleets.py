"""Connections are kept per incarnation of a pod and opened once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from controller.resources.pod.tpu_api.plane import NodeVms
from controller.ssh.fleets import Fleets, SshTarget

POD = SshTarget(
    "pod", NodeVms("projects/p/locations/z/nodes/pod"), "one", "z", "n", ("slipway",), (("10.0.0.2", None),)
)


def test_a_new_incarnation_closes_the_connections_to_the_old_one() -> None:
    opened, closed = list[str](), list[str]()

    def connect(pod: SshTarget) -> Any:
        opened.append(pod.uid)
        return SimpleNamespace(close=lambda: closed.append(pod.uid))

    fleets = Fleets(connect, lambda: ("bucket/pod", 7))
    first = fleets.of(POD)
    assert fleets.of(POD) is first
    assert first.before_pod_write() == ("bucket/pod", 7)
    assert fleets.of(replace(POD, uid="two")) is not first
    assert (opened, closed) == (["one", "two"], ["one"])
    fleets.close()
    assert closed == ["one", "two"]


def test_a_repair_is_remembered_until_the_connections_open() -> None:
    told = list[str]()

    def connect(pod: SshTarget) -> Any:
        return SimpleNamespace(expect_new_host_keys=lambda: told.append(pod.uid), close=lambda: None)

    fleets = Fleets(connect, lambda: ("bucket/pod", 7))
    fleets.expect_new_host_keys("one")
    assert told == []
    fleets.of(POD)
    fleets.of(replace(POD, uid="two"))
    assert told == ["one"]
    fleets.expect_new_host_keys("two")
    assert told == ["one", "two"]
