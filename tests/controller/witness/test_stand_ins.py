"""No secret survives, in whatever form it comes; and the same value always becomes the same stand-in."""

from __future__ import annotations

import base64
import json
from typing import Any
from urllib.parse import quote

import pytest

from controller.witness.stand_ins import StandIns

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


def test_what_identifies_nobody_stays(made: StandIns) -> None:
    values = ("169.254.169.254", "us-central1-a", "2.0.0", "d41d8cd98f00b204e9800998ecf8427e", True, 12, None)
    plain: dict[str, Any] = {
        "ranges": ["10.0.0.0/20", "35.235.240.0/20", "0.0.0.0/0"],
        "time": "2026-11-22T16:59:29.236Z",
    }
    plain |= {"values": [*values]}
    made.learn(plain)
    assert made.scrub(plain) == plain


def test_values_of_secret_keys_are_removed(made: StandIns) -> None:
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
