"""What belongs to others in the project does not get into a recording; what the replay needs does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controller.core.clock import Clock
from controller.gcp.names import LABEL
from controller.resources.pod.startup_script import startup_script, switch_part
from controller.witness.omissions import omit_others
from controller.witness.recording import RecordedConnection, Recording
from controller.witness.stand_ins import StandIns
from tests.controller.witness.test_recording import Wire

KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIJ0q" + "kZ3x9T5m" * 5
PARENT = "projects/p/locations/us-central1-a"
OUR_SCRIPT = startup_script(switch_part(900, [f"https://tpu.googleapis.com/v2/{PARENT}/nodes/pod"]))
THEIR_SCRIPT = "#!/bin/bash\nexport WANDB_API_KEY=0123456789abcdef"
OURS = {"ssh-keys": f"kai:ssh-ed25519 {KEY} kai@kais-laptop", "startup-script": OUR_SCRIPT, "token": "mine-0123"}
OUR_NODE = {"name": f"{PARENT}/nodes/pod", "state": "READY", "labels": LABEL, "metadata": OURS}
THEIR_NODE = {"name": f"{PARENT}/nodes/jane-llm", "labels": {"team": "x"}, "metadata": {"startup-script": THEIR_SCRIPT}}
PASSWORD = {"key": "DB_PASSWORD", "value": "hunter2hunter2"}
THEIR_VM = {"name": "payroll-db", "metadata": {"kind": "compute#metadata", "items": [PASSWORD]}}
ANSWERS: dict[str, Any] = {
    "tpu.projects.locations.nodes.list": {"nodes": [THEIR_NODE, OUR_NODE]},
    "tpu.projects.locations.nodes.get": {**THEIR_NODE, "name": f"{PARENT}/nodes/pod"},
    "tpu.projects.locations.queuedResources.list": {
        "queuedResources": [
            {"name": f"{PARENT}/queuedResources/jane-llm", "tpu": {"nodeSpec": [{"node": THEIR_NODE}]}},
            {"name": f"{PARENT}/queuedResources/pod", "tpu": {"nodeSpec": [{"node": OUR_NODE}]}},
        ]
    },
    "compute.instances.aggregatedList": {"items": {"zones/z": {"instances": [THEIR_VM]}}},
    "compute.disks.aggregatedList": {
        "items": {"zones/z": {"disks": [{"name": "payroll-disk"}, {"name": "pod-data", "labels": LABEL}]}}
    },
    "compute.instances.get": {**THEIR_VM, "name": "pod-bastion"},
    "compute.projects.get": {
        "commonInstanceMetadata": {
            "items": [
                PASSWORD,
                {"key": "startup-script", "value": THEIR_SCRIPT},
                {"key": "ssh-keys", "value": f"kai:ssh-rsa {KEY} kai@kais-laptop"},
                {"key": "enable-oslogin", "value": "TRUE"},
            ]
        }
    },
    "storage.buckets.list": {
        "items": [
            {"kind": "storage#bucket", "name": "acme-payroll"},
            {"kind": "storage#bucket", "name": "jane-runs-slipway", "labels": LABEL},
        ]
    },
    "oslogin.users.getLoginProfile": {"posixAccounts": [{"username": "jane_lab", "gecos": "Jane Doe"}]},
    "cloudresourcemanager.projects.get": {"parent": {"type": "organization", "id": "987654321098"}},
}
SECRETS = (
    "WANDB_API_KEY", "0123456789abcdef", "hunter2", "acme-payroll", "jane", "Jane Doe", "987654321098", "kai",
    "payroll", "mine-0123", KEY,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recording of answers that hold other people's resources and secrets."""
    made = Recording(tmp_path / "recorded", Clock(), StandIns())
    for method_id, answer in ANSWERS.items():
        RecordedConnection(Wire(content=json.dumps(answer).encode()), made, method_id, "https://x/").request(
            "https://x/v1/y"
        )
    assert made.save() == []
    return made.folder


def test_secrets_of_others_are_in_no_file(folder: Path) -> None:
    before = json.dumps(ANSWERS)
    assert [secret for secret in SECRETS if secret not in before] == []
    everything = "".join(file.read_text() for file in folder.iterdir())
    assert [secret for secret in SECRETS if secret in everything] == []


def test_what_the_replay_needs_is_kept(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    answers = {line["method_id"]: line["answer"] for line in lines}
    [node] = answers["tpu.projects.locations.nodes.list"]["nodes"]
    assert node["state"] == "READY"
    assert node["metadata"].keys() == {"ssh-keys", "startup-script", "token"}
    assert node["metadata"]["ssh-keys"].startswith("user-1:ssh-ed25519 AAAAstandin0001")
    assert "END_OF_DEAD_MANS_SWITCH" in node["metadata"]["startup-script"]
    [queued] = answers["tpu.projects.locations.queuedResources.list"]["queuedResources"]
    assert queued["tpu"]["nodeSpec"][0]["node"] == node
    assert answers["compute.instances.aggregatedList"] == {"items": {}}
    disks = answers["compute.disks.aggregatedList"]["items"]["zones/z"]["disks"]
    assert [disk["name"] for disk in disks] == ["pod-data"]
    common = answers["compute.projects.get"]["commonInstanceMetadata"]["items"]
    kept = [item["value"] for item in common if item["key"] in ("startup-script", "enable-oslogin")]
    assert kept == ["removed", "TRUE"]
    assert [bucket["name"] for bucket in answers["storage.buckets.list"]["items"]] == ["bucket-1"]


def test_metadata_of_operations_and_objects_stays() -> None:
    operation = {
        "name": f"{PARENT}/operations/operation-1",
        "done": True,
        "metadata": {"@type": "type.googleapis.com/google.cloud.tpu.v2.OperationMetadata", "verb": "create"},
        "response": {**OUR_NODE, "metadata": {"startup-script": OUR_SCRIPT}},
    }
    assert omit_others("tpu.projects.locations.operations.get", operation) == operation
    stored = {"name": "index/run.json", "metadata": {"row": "{}"}}
    assert omit_others("storage.objects.get", stored) == stored
    held = omit_others("tpu.projects.locations.operations.get", {**operation, "response": THEIR_NODE})
    assert held["response"]["metadata"] == {"startup-script": "removed"}


def test_a_list_that_has_only_resources_of_others_is_as_an_empty_one() -> None:
    assert omit_others("tpu.projects.locations.nodes.list", {"nodes": [THEIR_NODE]}) == {}
    refusal = {"error": {"code": 403, "message": "no"}}
    assert omit_others("compute.instances.aggregatedList", refusal) == refusal
    assert omit_others("compute.instances.aggregatedList", None) is None


def test_a_script_of_ours_is_known_by_its_text_or_the_label() -> None:
    def shown(script: str, **values: Any) -> str:
        body = {"metadata": {"startup-script": script}, **values}
        return omit_others("tpu.projects.locations.nodes.patch", body)["metadata"]["startup-script"]

    assert shown(OUR_SCRIPT) == OUR_SCRIPT
    assert shown("mount", labels=LABEL) == "mount"
    assert shown("mount") == "removed"
