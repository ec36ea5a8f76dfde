"""Pods of both planes. A test that takes the fixture `plane` runs on each: on one of them always, on the other deep.

`pytest.mark.always_on("compute_engine")` chooses the plane of the fast suite; it is the TPU API's otherwise.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Plane:
    """Overrides that choose a pod of one, two or four workers, and the requests that make and delete one."""

    name: str
    one: tuple[str, ...]
    two: tuple[str, ...]
    four: tuple[str, ...]
    collections: str
    """Pattern of the collections that hold pods, in the paths of requests."""

    def __str__(self) -> str:
        return self.name

    @property
    def is_compute_engine(self) -> bool:
        return self.name == "compute_engine"

    def creations(self, mutations: Iterable[str]) -> list[str]:
        """Return the requests that create a pod."""
        return [line for line in mutations if re.fullmatch(rf"POST .*/({self.collections})", line)]

    def deletions(self, mutations: Iterable[str]) -> list[str]:
        """Return the requests that delete a pod."""
        return [line for line in mutations if re.fullmatch(rf"DELETE .*/({self.collections})/[^/]+", line)]


PLANES = (
    Plane(
        "tpu_api",
        one=("tpu=v6e_1", "tpu.plane=tpu_api"),
        two=("tpu.accelerator_type=v4-16", "tpu.zone=us-central2-b"),
        four=("tpu.accelerator_type=v5litepod-16",),
        collections="nodes|queuedResources",
    ),
    Plane(
        "compute_engine",
        one=("tpu=v6e_1", "tpu.plane=compute_engine"),
        two=("tpu=v6e_8_ce",),
        four=("tpu=v6e_8_ce", "tpu.accelerator_type=v6e-16"),
        collections="instances|instanceGroupManagers",
    ),
)

EITHER = Plane(
    "auto",
    one=("tpu=v6e_1",),
    two=("tpu=v6e_1", "tpu.accelerator_type=v5p-16", "tpu.zone=us-east5-a"),
    four=("tpu=v6e_8", "tpu.accelerator_type=v6e-16"),
    collections="|".join(plane.collections for plane in PLANES),
)
"""Pods that both planes have, with as many workers on either; a test asks for it by name."""


def pods(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an emulated cloud's pods consist of: nodes, requests, groups, and VMs with TPUs."""
    parts = {
        path: part
        for path, part in state["compute"].items()
        if "/instanceGroupManagers/" in path
        or ("/instances/" in path and re.search(r"/machineTypes/(ct|tpu)\d", part["machineType"]))
    }
    return {**state["node"], **state["queued"], **parts}


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Run a test with the fixture `plane` on both planes. A test that lists the values itself has said which."""
    listed = any("plane" in str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
    if listed or "plane" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("always_on")
    always = marker.args[0] if marker else PLANES[0].name
    marks = [pytest.mark.deep, *([pytest.mark.wide] if metafunc.definition.get_closest_marker("one_plane") else [])]
    values = [p if p.name == always else pytest.param(p, marks=marks) for p in PLANES]
    metafunc.parametrize("plane", values, ids=str)
