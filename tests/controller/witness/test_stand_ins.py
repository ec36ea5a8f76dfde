"""No secret survives, in whatever form; what belongs to others is left out, what the replay needs is kept."""

import base64
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from controller.core.this_process import Clock
from controller.gcp.answers import LABEL
from controller.resources.pod.provisioner import startup_script, switch_part
from controller.witness.recording import RecordedConnection, Recording
from controller.witness.stand_ins import StandIns, omit_others
from tests.controller.witness.test_recording import Wire

PROJECT, BUCKET = "lab-anna-412345", "lab-anna-412345-slipway-us-central1"
ACCOUNT = f"slipway-witness@{PROJECT}.iam.gserviceaccount.com"
NUMBER, MAIL, ADDRESS, UNIQUE_ID = "903412345678", "anna.b@lab.edu", "34.91.20.7", "104718293746501928374"
TOKEN, BILLING = "ya29.a0AfB_byC1234567890abcdefghij", "01AB23-45CD67-89EF01"
KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIJ0q" + "kZ3x9T5m" * 5
SECRETS = (
    PROJECT, BUCKET, NUMBER, MAIL, ADDRESS, UNIQUE_ID, TOKEN, BILLING, KEY, "annab_user", "lab.example.org",
    "55512345678",
)  # fmt: skip


def in_base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


PLANTED: dict[str, Any] = {
    "in a URL": f"https://tpu.googleapis.com/v2/projects/{PROJECT}/locations/us-central1-a/nodes/pod",
    "as a number": {"name": f"projects/{NUMBER}", "projectNumber": NUMBER},
    "quoted in a URL": f"https://x/o?prefix={quote(f'gs://{BUCKET}/{MAIL}', safe='')}",
    "in a header": {"x-goog-user-project": PROJECT, "www-authenticate": f"Bearer {TOKEN}"},
    "in a body": {"serviceAccount": {"email": ACCOUNT, "uniqueId": UNIQUE_ID}, "billing": f"billingAccounts/{BILLING}"},
    "as a key of an object": {MAIL: {ADDRESS: 1}},
    "in base64": in_base64(f"owner {MAIL} of {PROJECT}"),
    "in base64 of JSON": in_base64(json.dumps({"token": TOKEN, "who": [MAIL]})),
    "in nested JSON strings": json.dumps({"inner": json.dumps({"deep": [ADDRESS, {"key": f"ssh-ed25519 {KEY}"}]})}),
    "in an error message": {"error": {"message": f"Denied on {PROJECT} (or {NUMBER}) for {MAIL} at {ADDRESS}."}},
    "in worker facts": {"metadata": f"annab_user:ssh-ed25519 {KEY} anna", "home": "/home/annab_user", "ip": ADDRESS},
    "in a policy": {
        "members": ["domain:lab.example.org", "group:g@lab.example.org"],
        "org": "organizations/55512345678",
    },
    "in a script": f"curl -H 'Authorization: Bearer {TOKEN}' https://x/projects/{PROJECT}\nhost {ADDRESS}/32",
}


@pytest.fixture
def made() -> StandIns:
    stand_ins = StandIns()
    stand_ins.add("project", PROJECT)
    stand_ins.add("bucket", BUCKET)
    stand_ins.add("user", "annab_user")
    stand_ins.learn(PLANTED)
    return stand_ins


@pytest.mark.parametrize("where", PLANTED)
def test_a_planted_secret_does_not_survive(made: StandIns, where: str) -> None:
    assert made.leaks(json.dumps(PLANTED[where])), "the scan sees it before"
    clean = json.dumps(made.scrub(PLANTED[where]))
    assert made.leaks(clean) == []
    assert [secret for secret in SECRETS if secret in clean] == []


def test_the_same_value_becomes_the_same_stand_in(made: StandIns) -> None:
    text = made.scrub(f"{MAIL} {MAIL} other@gmail.com projects/{PROJECT} {ACCOUNT}")
    person, account = "person-1@example.com", "account-1@project-1.iam.gserviceaccount.com"
    assert text == f"{person} {person} other@gmail.com projects/project-1 {account}"
    made.learn("other@gmail.com")
    assert made.scrub("other@gmail.com") == "person-3@example.com"
    assert made.scrub({"bucket": BUCKET, "n": int(NUMBER)}) == {"bucket": "bucket-1", "n": 100000000001}


def test_what_identifies_nobody_stays_and_values_of_secret_keys_do_not(made: StandIns) -> None:
    values = ("169.254.169.254", "us-central1-a", "2.0.0", "d41d8cd98f00b204e9800998ecf8427e", True, 12, None)
    plain: dict[str, Any] = {
        "ranges": ["10.0.0.0/20", "35.235.240.0/20", "0.0.0.0/0"],
        "time": "2026-11-22T16:59:29.236Z",
    }
    plain |= {"values": [*values]}
    made.learn(plain)
    assert made.scrub(plain) == plain
    removed = dict.fromkeys(("payload", "accessToken"), "removed")
    assert made.scrub({"payload": {"data": "aGVsbG8="}, "accessToken": "x"}) == removed


def test_the_scan_sees_what_scrubbing_missed(made: StandIns) -> None:
    glued = base64.b64encode(f"??{BUCKET}??".encode()).decode()
    for text in (f"x{PROJECT.upper()}x", f"log: {glued}trailing", f"a\\nprojects\\n{NUMBER}"):
        assert made.leaks(text), text
    assert made.leaks("project-1 person-1@example.com 192.0.2.1") == []


def test_users_of_ssh_keys_are_replaced_even_if_their_names_are_short() -> None:
    made = StandIns()
    made.learn({"ssh-keys": f"kai:ssh-ed25519 {KEY}\nroot:ssh-rsa {KEY}\nx:ssh-rsa {KEY}"})
    assert made.scrub("/home/kai, kai: kai.") == "/home/user-1, user-1: user-1."
    assert made.leaks("/home/kai") == ["user-1"]
    other = "kaikai us-kai1 a-kai kai-b kai.py root x"
    assert made.scrub(other) == other
    assert made.leaks(other) == []
    unknown = StandIns()
    unknown.add("bucket", "kai")
    assert unknown.scrub("kai") == "kai", "a short value that is no user"


def test_what_only_its_neighbours_tell() -> None:
    made = StandIns()
    documents = [
        {"kind": "storage#bucket", "name": "acme-payroll", "id": "acme-payroll"},
        {"projectNumber": NUMBER, "parent": {"type": "organization", "id": "987654321098"}},
        {"parent": {"type": "folder", "id": "4321"}, "name": "folders/4321"},
        {"name": "Jane Doe", "given_name": "Jane"},
    ]
    made.learn(documents)
    assert made.scrub(documents) == [
        {"kind": "storage#bucket", "name": "bucket-1", "id": "bucket-1"},
        {"projectNumber": "100000000001", "parent": {"type": "organization", "id": "200000000001"}},
        {"parent": {"type": "folder", "id": "200000000002"}, "name": "folders/200000000002"},
        {"name": "SECRET-1", "given_name": "removed"},
    ]
    assert made.scrub({"posixAccounts": [{"gecos": "Jane Doe"}]}) == {"posixAccounts": [{"gecos": "removed"}]}


PARENT = "projects/p/locations/us-central1-a"
OUR_SCRIPT = startup_script(switch_part(900, [f"https://tpu.googleapis.com/v2/{PARENT}/nodes/pod"]))
THEIR_SCRIPT = "#!/bin/bash\nexport WANDB_API_KEY=0123456789abcdef"
OURS = {
    "ssh-keys": f"kai:ssh-ed25519 {KEY} kai@kais-laptop", "startup-script": OUR_SCRIPT, "token": "mine-0123",
    "enable-guest-attributes": "TRUE",
}  # fmt: skip
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
THEIR_SECRETS = (
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
    assert [secret for secret in THEIR_SECRETS if secret not in before] == []
    everything = "".join(file.read_text() for file in folder.iterdir())
    assert [secret for secret in THEIR_SECRETS if secret in everything] == []


def test_what_the_replay_needs_is_kept(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()[1:]]
    answers = {line["method_id"]: line["answer"] for line in lines}
    [node] = answers["tpu.projects.locations.nodes.list"]["nodes"]
    assert node["state"] == "READY"
    assert node["metadata"] == OUR_NODE["metadata"] | {
        "ssh-keys": node["metadata"]["ssh-keys"], "startup-script": "removed", "token": "removed",
    }  # fmt: skip
    assert node["metadata"]["ssh-keys"].startswith("user-1:ssh-ed25519 AAAAstandin0001")
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
        "response": {**OUR_NODE, "metadata": {"enable-guest-attributes": "TRUE"}},
    }
    assert omit_others("tpu.projects.locations.operations.get", operation) == operation
    stored = {"name": "index/run.json", "metadata": {"row": "{}"}}
    assert omit_others("storage.objects.get", stored) == stored
    held = omit_others("tpu.projects.locations.operations.get", {**operation, "response": THEIR_NODE})
    assert held["response"]["metadata"] == {"startup-script": "removed"}


def test_others_of_every_kind_are_left_out_of_lists() -> None:
    nodes, instances = "tpu.projects.locations.nodes.list", "compute.instances.aggregatedList"
    assert omit_others(nodes, {"nodes": [THEIR_NODE]}) == {}, "as an empty list"
    refusal = {"error": {"code": 403, "message": "no"}}
    assert [omit_others(instances, answer) for answer in (refusal, None)] == [refusal, None]
    for kind in ("instanceGroupManagers", "instanceTemplates", "resourcePolicies"):
        listed = {"items": {"zones/z": {kind: [{"name": "payroll"}, {"name": "pod", "properties": {"labels": LABEL}}]}}}
        kept = omit_others(f"compute.{kind}.aggregatedList", listed)["items"]["zones/z"][kind]
        assert [item["name"] for item in kept] == ["pod"]


def test_the_name_of_an_operation_of_service_usage_holds_the_number_of_the_project() -> None:
    made, name = StandIns(), f"operations/acf.p2-{NUMBER}-1f8a1e52-0c3c-4d1b-b5a1-0d3f3a4a9d6e"
    answer = {"name": name, "metadata": {"resourceNames": ["services/tpu.googleapis.com"]}}
    made.learn(answer)
    assert made.leaks(name)
    clean = made.scrub(answer)
    assert clean["name"] == name.replace(NUMBER, "100000000001")
    assert made.leaks(json.dumps(clean)) == []
