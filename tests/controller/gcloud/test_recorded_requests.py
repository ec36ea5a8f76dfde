"""The controller's requests, field by field, beside those that gcloud was seen to send for the same ends.

Each case names the command and every field in which we differ, with the reason. A difference that is not listed
fails, and so does a listed one that is none. Names are made equal first; a resource may be named in full or in short.
"""

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from conf.schema.config import Config
from controller.checks.preflight import probe_cloud
from controller.context import Context
from controller.gcp.client import GoogleClient
from controller.gcp.methods import _discovery_document
from controller.localcloud.http.discovery import Validation, load_discovery
from controller.reconcile import destroy, reconcile
from controller.resources.accounts import AccountRoles, BastionRoles, ServiceAccount
from controller.resources.bastion_vm import POD_LABEL, RUN_LABEL, Bastion
from controller.resources.pod.planes import planes_for
from tests.composed import config_of
from tests.controller.gcloud.cases import CASES, NOT_COMPARED, ON_DEMAND, RECORDED, Case
from tests.controller.gcloud.conftest import desired_resources, make_context
from tests.controller.gcloud.record import record_requests
from tests.controller.localcloud.harness import COMPUTE, PROJECT, EmulatedCloud, run_localcloud

REGION, ZONE = "us-central2", "us-central2-b"
COMMON = [
    "cloud.apis=[tpu.googleapis.com,compute.googleapis.com,storage.googleapis.com]",
    "network.ssh_source_ranges=[35.235.240.0/20]",
    f"tpu.zone={ZONE}",
    "tpu.accelerator_type=v4-8",
    "tpu.runtime_version=tpu-ubuntu2204-base",
    "mesh.data=4",
]
MINE = [
    *COMMON,
    "network.cidr=10.0.0.0/24",
    "network.name=net1",
    "network.subnet=sub1",
    "cloud.service_account=sa-runner",
    "cloud.bucket=bk1",
    "cloud.roles=[roles/storage.admin]",
    "cloud.bucket_roles=[roles/storage.objectAdmin]",
]
SPOT = ["tpu.provisioner=node", "tpu.capacity=spot", "tpu.external_ip=false", "tpu.name=n1"]
DEFAULT = [*COMMON, "network=default", "network.nat=false", "cloud.service_account=default", "cloud.bucket=bk1"]
ON_DEMAND_POD = [*DEFAULT, "tpu.provisioner=node", "tpu.capacity=on_demand", "tpu.name=n1"]
GROUP_POD = [
    *("tpu=v6e_8_ce", "tpu.zone=us-east5-b", "tpu.capacity=spot", "tpu.name=n1", "mesh.data=8", COMMON[0], COMMON[1]),
    *DEFAULT[len(COMMON) :],
]
VM_POD = [
    *("tpu=v6e_1", "tpu.plane=compute_engine", "tpu.zone=us-east5-b", "tpu.capacity=spot", "tpu.name=n1"),
    *("tpu.data_disk_gb=10", COMMON[0], COMMON[1], "mesh.data=1", *DEFAULT[len(COMMON) :]),
]
QUEUED_POD = [*DEFAULT, "tpu.provisioner=queued", "tpu.capacity=spot", "tpu.valid_until_hours=6", "tpu.name=n1"]

SAME = {
    "/r1": f"/net1-{REGION}",
    '"r1"': f'"net1-{REGION}"',
    '"nat1"': f'"net1-{REGION}"',
    "fw1": "net1-allow-ssh",
    "/q1": "/n1",
    '"q1"': '"n1"',
    '"qn1"': '"n1"',
    '"email": "default"': '"email": "sa-runner@slipway-local.iam.gserviceaccount.com"',
}
"""gcloud's words in the recording, and ours for the same thing. The longest is put in first."""


Answered = list[tuple[str, str, Any]]


@pytest.fixture(scope="module")
def answered() -> Iterator[Answered]:
    """API, method and answer of each request that the fixture `sent` makes."""
    found: Answered = []
    once = GoogleClient._execute_once

    def noted(client: GoogleClient, api: str, method: str, *rest: Any, **more: Any) -> Any:
        found.append((api, method, answer := once(client, api, method, *rest, **more)))
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GoogleClient, "_execute_once", noted)
        yield found


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory, answered: Answered) -> Iterator[list[dict[str, Any]]]:
    """The requests of making and deleting everything: in a network of our own, and in `default` made by hand."""
    folder = tmp_path_factory.mktemp("parity")
    cloud = EmulatedCloud(folder / "state")
    cloud.start("--operation-seconds=0")
    for api in ("tpu", "compute", "storage"):  # which the recorded command enables
        cloud.call_ok("POST", f"serviceusage/v1/{PROJECT}/services/{api}.googleapis.com:disable", {})
    told = len(cloud.request_log())
    context = make_context(cloud, folder)
    for overrides in ([*MINE, *SPOT], ON_DEMAND_POD, QUEUED_POD, GROUP_POD, VM_POD):
        resources = desired_resources(*overrides)
        reconcile(resources, context)
        ask(config_of("cloud=local", "program=command", *overrides, "recovery.driver=bastion"), context)
        destroy(resources, context)
    # A subnet made by hand, whose private access was left off.
    cloud.call_and_wait("POST", f"{COMPUTE}/global/networks", {"name": "default"})
    reconcile(desired_resources(*DEFAULT)[:-1], context)
    machine, account = bastion(), ServiceAccount(name="sa-runner")
    of_its_own = BastionRoles(
        name="sa-runner", account=account, on="i1", zone=ZONE, roles=("roles/compute.instanceAdmin.v1",)
    )
    driver = ServiceAccount(name="sa-driver")
    acts = AccountRoles(
        name="sa-driver",
        account=driver,
        on="sa-runner",
        roles=("roles/iam.serviceAccountUser",),
        depends_on=(account.id, driver.id),
    )
    reconcile([account, driver, acts, machine], context)
    reconcile([account, of_its_own], context)
    machine.serial_output(context)
    destroy([account, driver, acts, machine, of_its_own], context)
    yield cloud.request_log()[told:]
    context.close()
    run_localcloud("wipe", cloud.state)


def ask(config: Config, context: Context) -> None:
    """Ask what the checks and the list of pods ask."""
    probe_cloud(config, context)
    for plane in planes_for(config):
        list(plane.slices(context))


def bastion() -> Bastion:
    """The machine that the recorded command makes."""
    return Bastion(
        name="i1", zone=ZONE, machine_type="g1-small", network="default", subnetwork="default",
        external_ip=False, account=ServiceAccount(name="sa-runner"), script="#!/bin/true", orders="{}", run_id="run-1",
        labels={RUN_LABEL: "run-1", POD_LABEL: "n1"}, max_seconds=30 * 86_400,
    )  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, ON_DEMAND], ids=str)
def test_field_by_field(case: Case, sent: list[dict[str, Any]]) -> None:
    theirs = flat(recorded(case))
    candidates = [flat(entry) for entry in sent if entry["method"] == theirs["method"]]
    same_path = [entry for entry in candidates if entry["path"] == theirs["path"] or "path" in case.differs]
    ours = min(same_path, key=lambda entry: len(unlike(theirs, entry).keys() ^ case.differs.keys()), default=None)
    assert ours is not None, f"we never sent {theirs['method']} {theirs['path']}"
    found = unlike(theirs, ours)
    unlisted = {name: pair for name, pair in found.items() if name not in case.differs}
    assert not unlisted, "gcloud's and ours"
    assert set(case.differs) == set(found), "a listed difference is none"


def recorded(case: Case) -> dict[str, Any]:
    """gcloud's request in our names."""
    [found, *_] = [
        entry
        for entry in RECORDED
        if entry["label"].startswith(case.command)
        and entry["method"] == case.method
        and entry["path"].endswith(case.path)
        and not (case is ON_DEMAND and "--spot" in entry["label"])
    ]
    text = json.dumps({key: found[key] for key in ("method", "path", "query", "body") if key in found})
    words = sorted(SAME, key=len, reverse=True)
    pattern = "|".join(re.escape(word) for word in words)
    renamed = json.loads(re.sub(pattern, lambda match: SAME[match[0]], text))
    if "net1" not in case.command and case.command.startswith("gcloud compute networks create default"):
        renamed["body"]["name"] = "default"
    return renamed


def flat(entry: dict[str, Any]) -> dict[str, str]:
    """A request as one value per field: `body.nats[0].name`, `query.alt`."""
    query = {f"query.{k}": (v[0] if isinstance(v, list) else v).lower() for k, v in entry["query"].items()}
    body = dict(_fields("body", entry.get("body"))) if entry.get("body") else {}
    return {"method": entry["method"], "path": entry["path"], **query, **body}


def _fields(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _fields(f"{name}.{key}", one)
    elif isinstance(value, list) and value:
        for index, one in enumerate(value):
            yield from _fields(f"{name}[{index}]", one)
    elif value not in ({}, None):  # an empty message says nothing
        named = re.search(r"(\.network|\.subnetwork|\.machineType|\.scope\[\d+\])$", name)
        text = str(value).lower()
        yield name, text.rpartition("/")[2] if named else text


def unlike(theirs: dict[str, str], ours: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """The fields that differ: gcloud's value and ours."""
    names = {*theirs, *ours}
    return {n: (theirs.get(n), ours.get(n)) for n in sorted(names) if theirs.get(n) != ours.get(n)}


def test_every_kind_of_request_is_compared_or_named(sent: list[dict[str, Any]]) -> None:
    discovery = load_discovery()
    found = [discovery.match(one["method"], one["path"]) for one in map(recorded, (*CASES, ON_DEMAND))]
    compared = {match[0].name for match in found if match}
    assert {request["call"] for request in sent} - compared == set(NOT_COMPARED)


def test_no_request_was_refused_as_malformed(sent: list[dict[str, Any]]) -> None:
    """Each was judged by Google's discovery documents."""
    assert [r for r in sent if r["status"] in (400, 405, 500, 501)] == []


def test_every_answer_is_as_discovery_describes_it(sent: list[dict[str, Any]], answered: Answered) -> None:
    assert len({(api, method) for api, method, _ in answered}) > 60
    wrong = set[str]()
    for api, method, answer in answered:
        document = method_place = _discovery_document(api)
        *parents, leaf = method.split(".")
        for parent in parents:
            method_place = method_place["resources"][parent]
        schema = method_place["methods"][leaf.removesuffix("_media")].get("response", {})
        wrong |= set(misfits(answer, schema, document["schemas"], f"{api} {method}: "))
    assert not wrong


KINDS: dict[str, Any] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list,
}  # fmt: skip


def misfits(value: Any, schema: dict[str, Any], schemas: dict[str, Any], at: str) -> Iterator[str]:
    """What in an answer the schema does not have: fields, types and words of an enumeration."""
    schema = schemas.get(schema.get("$ref", ""), schema)
    kind = schema.get("type", "any")
    if kind == "any":
        return
    if not isinstance(value, KINDS[kind]) or ("enum" in schema and value not in schema["enum"]):
        yield f"{at} {value!r}"
    elif isinstance(value, list):
        for item in value:
            yield from misfits(item, schema["items"], schemas, f"{at}[]")
    elif isinstance(value, dict):
        for name, item in value.items():
            known = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            yield from [f"{at}.{name}"] if known is None else misfits(item, known, schemas, f"{at}.{name}")


@pytest.mark.parametrize(
    "answer",
    [
        {"name": 1},
        {"apis": []},
        {"lifecycleState": "GONE"},
        {"labels": {"a": 1}},
        {"projectNumber": 7},
    ],
    ids=str,
)
def test_what_discovery_does_not_describe_is_found(answer: dict[str, Any]) -> None:
    schemas = _discovery_document("cloudresourcemanager")["schemas"]
    assert len(list(misfits(answer, {"$ref": "Project"}, schemas, ""))) == 1


def test_we_send_nothing_that_google_ignores(sent: list[dict[str, Any]]) -> None:
    """An output-only field in a request would be a wish that nobody grants."""
    discovery = load_discovery()
    validation = Validation(discovery)
    for request in sent:
        found = discovery.match(request["method"], request["path"].strip("/"))
        if found and isinstance(request["body"], dict):
            body = _without_redaction(request["body"])
            assert validation.check_body(found[0], body) == body, request["path"]


def _without_redaction(body: Any) -> Any:
    """Return a body without metadata, of which the log shows the keys alone."""
    if isinstance(body, list):
        return [_without_redaction(item) for item in body]
    if not isinstance(body, dict):
        return body
    return {key: _without_redaction(value) for key, value in body.items() if key != "metadata"}


@pytest.mark.deep
@pytest.mark.wide  # it changes with gcloud, not with a commit
def test_the_gcloud_that_is_installed_sends_what_was_recorded() -> None:
    """All but its polls, whose number is chance. If another version sends something else: record it again, and see."""
    if shutil.which("gcloud") is None:
        pytest.skip("gcloud is not installed")
    assert without_polls(record_requests()) == without_polls(RECORDED)


def without_polls(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [request for request in requests if "/operations/" not in request["path"]]
