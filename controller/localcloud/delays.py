"""How long things take on Google Cloud: the one table of the emulated cloud's delays, as measured in the field.

`cloud.operation_seconds` is the pace: 30 is the field's, 0.1 a three-hundredth of it; 0 is no time at all, and no
limits on rates, which are otherwise never scaled.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FIELD_PACE = 30.0
"""`cloud.operation_seconds` with which the delays are those of the field."""
OTHER = "other operation"
LARGE_SLICE_VMS = 64
"""VMs of a slice that takes longer than others."""


@dataclass(frozen=True)
class Delay:
    """How long one thing takes at the field's pace, in seconds.

    Attributes:
        least, most: what it usually takes; drawn between them by the name of the thing.
        worst: the longest that was reported without an incident at Google; what a client must be able to wait for.
        how_sure: documented by Google, seen by others, or guessed.
        source: where, with its date.
        is_lag: Google says that it is done, but does not see it everywhere; none where realism is relaxed.
    """

    least: float
    most: float
    worst: float
    how_sure: Literal["documented", "seen", "guessed"]
    source: str
    is_lag: bool = False

    def seconds(self, name: str) -> float:
        """Return what it takes for the thing of this name, always the same."""
        share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) / 2**32
        return self.least + share * (self.most - self.least)


_TERRAFORM = "logs of `terraform apply` and `destroy` in public repositories, 2020 to 2026-09"
_SKYPILOT = "skypilot 1716, 2023-02: 210 and 259 s (v2-8)"
_MARIN = "marin 6098, 2026-06: 6 minutes (queued v4-32), 4792, 2026-04: longer with 64 VMs or more"
_GROUPS = "kubernetes 76492, 2019-04, an incident: 30 minutes"

DELAYS: Mapping[str, Delay] = {
    # operations, as `VERB COLLECTION`
    "insert networks": Delay(7, 26, 45, "seen", f"{_TERRAFORM}; magic-modules 5031, 2021-08"),
    "delete networks": Delay(11, 31, 60, "seen", _TERRAFORM),
    "insert subnetworks": Delay(11, 23, 30, "seen", _TERRAFORM),
    "delete subnetworks": Delay(11, 12, 30, "seen", _TERRAFORM),
    "insert routers": Delay(11, 22, 30, "seen", _TERRAFORM),
    "patch routers": Delay(11, 23, 30, "seen", f"{_TERRAFORM}: a NAT"),
    "insert firewalls": Delay(6, 22, 30, "seen", _TERRAFORM),
    "delete firewalls": Delay(11, 12, 30, "seen", _TERRAFORM),
    "insert instances": Delay(13, 28, 60, "seen", _TERRAFORM),
    "delete instances": Delay(21, 60, 180, "seen", f"{_TERRAFORM}; php-docs-samples 1361, 2021-05: 3 minutes"),
    "insert instanceGroupManagers": Delay(2, 23, 60, "seen", f"{_TERRAFORM}: with its VMs"),
    "delete instanceGroupManagers": Delay(60, 300, 1800, "seen", _GROUPS),
    "enable services": Delay(10, 28, 60, "seen", _TERRAFORM),
    "create nodes": Delay(150, 300, 600, "seen", f"{_SKYPILOT}; {_MARIN}"),
    "create large nodes": Delay(300, 900, 1500, "guessed", _MARIN),
    "delete nodes": Delay(60, 180, 900, "seen", "tensorflow/tpu 609, 2019-11: 10 to 15 minutes"),
    "delete queuedResources": Delay(60, 180, 900, "guessed", "as of the node"),
    "start nodes": Delay(60, 180, 600, "guessed", "less than a creation"),
    "stop nodes": Delay(30, 120, 300, "guessed", ""),
    "compute.instances.preempted instances": Delay(30, 90, 120, "seen", "skypilot 849, 2022-05: 30 s, then a minute"),
    OTHER: Delay(1, 12, 60, "guessed", "templates, policies, disks, metadata"),
    # steps of what is made
    "queue": Delay(10, 60, 60, "guessed", "where there is capacity; without, days"),
    "suspension": Delay(10, 60, 300, "guessed", ""),
    "another look for capacity": Delay(30, 30, 30, "guessed", ""),
    "staging": Delay(30, 180, 720, "seen", "field, 2026-06: an error of Google after 12 minutes; else guessed"),
    "topology": Delay(10, 60, 300, "guessed", ""),
    "boot to SSH": Delay(5, 24, 180, "seen", "skypilot 4981, 2025-03: 46 s, of which the creation took some 22"),
    # what shows late
    "guest attributes": Delay(
        5, 24, 180, "guessed", "written at boot, says compute-image-packages 763, 2019-04", is_lag=True,
    ),
    "role": Delay(
        60, 420, 420, "documented", "iam/docs/access-change-propagation, 2026-11: typically 2 minutes, up to 7 or more",
        is_lag=True,
    ),
    "service account": Delay(
        2, 60, 120, "documented", "iam/docs/service-accounts-create, 2026-11: 60 s or more; lists too: spinnaker 4234",
        is_lag=True,
    ),
    "service agent": Delay(
        30, 120, 300, "guessed", "made with the API or at its first use: cloud-foundation-fabric 3788, 2026-03",
        is_lag=True,
    ),
    "new API": Delay(
        30, 150, 330, "seen", "from the request; google-cloud-rust 5444, 2026-04: 1 minute; kubeflow 2422, 2019-10: 5",
        is_lag=True,
    ),
    "usage of quotas": Delay(60, 60, 300, "guessed", "", is_lag=True),
    "end of use": Delay(30, 90, 240, "guessed", "leftovers 6, 2018-03: that it comes late, not how much", is_lag=True),
}  # fmt: skip


def operation_kind(verb: str, target: str) -> str:
    """Return the row of an operation on what has this path, such as `projects/p/global/networks/n`."""
    collection = target.split("/")[-2] if "/" in target else ""
    kind = f"{verb} {collection}"
    return kind if kind in DELAYS else OTHER
