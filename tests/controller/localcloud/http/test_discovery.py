"""Routes and request validation out of the discovery documents."""

from typing import Any

import pytest

from controller.localcloud.http.call import select_fields
from controller.localcloud.http.discovery import Discovery, Validation
from controller.localcloud.http.errors import ApiError

LOCATION = "tpu/v2/projects/p/locations/z"
CRM = "cloudresourcemanager"
LISTING = {"items": [{"name": "a", "size": "1", "meta": {"k": 1, "l": 2}}, {"name": "b", "size": "2"}], "next": "t"}


@pytest.fixture(scope="module")
def discovery() -> Discovery:
    return Discovery()


@pytest.fixture(scope="module")
def validation(discovery: Discovery) -> Validation:
    return Validation(discovery)


@pytest.mark.parametrize(
    ("http", "path", "key", "parameters"),
    [
        ("POST", f"{LOCATION}/nodes", "tpu.v2:projects.locations.nodes.create", {}),
        ("POST", f"{LOCATION}/nodes/n:stop", "tpu.v2:projects.locations.nodes.stop", {"nodesId": "n"}),
        ("GET", f"{LOCATION}/nodes/n", "tpu.v2:projects.locations.nodes.get", {"nodesId": "n"}),
        ("GET", "storage/v1/b/bucket/o/a%2Fb%3Ac", "storage.v1:objects.get", {"object": "a/b:c"}),
        ("POST", "serviceusage/v1/projects/p/services:batchEnable", "serviceusage.v1:services.batchEnable", {}),
        ("GET", "serviceusage/v1/operations/x", "serviceusage.v1:operations.get", {"operationsId": "x"}),
        ("GET", f"{CRM}/v3/projects/p", f"{CRM}.v3:projects.get", {"projectsId": "p"}),
        (
            "POST",
            f"{CRM}/v1/projects/p:getIamPolicy",
            f"{CRM}.v1:projects.getIamPolicy",
            {"resource": "p"},
        ),
        ("POST", "compute/v1/projects/p/global/operations/o/wait", "compute.v1:globalOperations.wait", {}),
    ],
)
def test_a_path_leads_to_its_method(
    discovery: Discovery, http: str, path: str, key: str, parameters: dict[str, str]
) -> None:
    found = discovery.match(http, path)
    assert found is not None
    assert found[0].key == key
    assert parameters.items() <= found[1].items()


@pytest.mark.parametrize(("http", "path"), [("GET", "tpu/v2/nonsense"), ("PUT", f"{LOCATION}/nodes/n"), ("GET", "")])
def test_what_google_does_not_have_is_not_found(discovery: Discovery, http: str, path: str) -> None:
    assert discovery.match(http, path) is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"acceleratorTyp": "v4-8"}, 'Unknown name "acceleratorTyp": Cannot find field.'),
        (
            {"networkConfig": {"enableExternalIp": True}},
            "Unknown name \"enableExternalIp\" at 'networkConfig': Cannot find field.",
        ),
        ({"tags": "a"}, "Invalid value at 'tags'"),
        ({"acceleratorConfig": {"type": "V9"}}, "Invalid value at 'acceleratorConfig.type'"),
        ([], "Root element must be"),
    ],
)
def test_a_wrong_body_is_refused(discovery: Discovery, validation: Validation, body: Any, words: str) -> None:
    found = discovery.match("POST", f"{LOCATION}/nodes")
    assert found is not None
    with pytest.raises(ApiError) as refusal:
        validation.check_body(found[0], body)
    assert refusal.value.code == 400
    assert words in refusal.value.message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            f"{LOCATION}/nodes",
            {
                "acceleratorType": "v4-8", "description": None, "labels": {"a": "b"},
                "schedulingConfig": {"spot": True},
                "dataDisks": [{"mode": "READ_ONLY"}], "bootDiskConfig": {"customerEncryptionKey": {"kmsKeyName": "k"}},
            },
        ),
        ("storage/v1/b", {"name": "b", "metageneration": 7}),  # a 64-bit integer may be a number or a string
        ("storage/v1/b", {"name": "b", "metageneration": "7"}),
    ],
)  # fmt: skip
def test_a_right_body_passes(discovery: Discovery, validation: Validation, path: str, body: Any) -> None:
    found = discovery.match("POST", path)
    assert found is not None
    assert validation.check_body(found[0], body) == body


@pytest.mark.parametrize(
    ("path", "body", "writable"),
    [
        (f"{LOCATION}/nodes", {"description": "d", "state": "READY", "id": "7"}, {"description": "d"}),
        (
            f"{LOCATION}/queuedResources",
            {"name": "q", "tpu": {"nodeSpec": [{"nodeId": "n", "node": {"name": "n", "tags": ["t"]}}]}},
            {"tpu": {"nodeSpec": [{"nodeId": "n", "node": {"tags": ["t"]}}]}},
        ),
        (
            "compute/v1/projects/p/zones/z/instances",
            {"name": "i", "status": "RUNNING", "networkInterfaces": [{"name": "nic0", "network": "n"}]},
            {"name": "i", "networkInterfaces": [{"network": "n"}]},
        ),
        ("iam/v1/projects/p/serviceAccounts", {"accountId": "a", "serviceAccount": {"email": "e"}},
         {"accountId": "a", "serviceAccount": {}}),
        (f"{CRM}/v1/projects/p:setIamPolicy", {"policy": {"etag": "e", "bindings": [{"role": "r"}]}}, None),
    ],
)  # fmt: skip
def test_what_only_google_writes_is_ignored(
    discovery: Discovery, validation: Validation, path: str, body: Any, writable: Any
) -> None:
    found = discovery.match("POST", path)
    assert found is not None
    assert validation.check_body(found[0], body) == (body if writable is None else writable)


@pytest.mark.parametrize("name", ["Upper", "has_underscore", "ends-", "x" * 64, ""])
def test_a_name_beyond_the_pattern_is_refused(discovery: Discovery, validation: Validation, name: str) -> None:
    found = discovery.match("POST", "compute/v1/projects/p/zones/z/disks")
    assert found is not None
    with pytest.raises(ApiError, match=r"Invalid value for field 'resource.name'.*Must be a match of regex"):
        validation.check_body(found[0], {"name": name})


@pytest.mark.parametrize(
    ("http", "path", "query", "missing"),
    [
        ("POST", "compute/v1/projects/p/zones/z/instanceGroupManagers/g/resize", {"size": ""}, "size"),
        ("GET", "storage/v1/b", {}, "project"),
        ("GET", "storage/v1/b/x/iam/testPermissions", {}, "permissions"),
    ],
)
def test_a_missing_parameter_is_refused(
    discovery: Discovery, validation: Validation, http: str, path: str, query: dict[str, str], missing: str
) -> None:
    found = discovery.match(http, path)
    assert found is not None
    with pytest.raises(ApiError, match=f"Required parameter: {missing}"):
        validation.check_query(found[0], query)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"nodeID": "n"}, 'Unknown name "nodeID": Cannot bind query parameter'),
        ({"prettyPrint": "maybe"}, "Invalid value at 'prettyPrint'"),
    ],
)
def test_a_wrong_query_is_refused(
    discovery: Discovery, validation: Validation, query: dict[str, str], words: str
) -> None:
    found = discovery.match("POST", f"{LOCATION}/nodes")
    assert found is not None
    assert validation.check_query(found[0], {"nodeId": "n", "alt": "json", "prettyPrint": "True"}) is None
    with pytest.raises(ApiError) as refusal:
        validation.check_query(found[0], query)
    assert words in refusal.value.message


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ("items/name", {"items": [{"name": "a"}, {"name": "b"}]}),
        ("next,items(name,size)", {"next": "t", "items": [{"name": "a", "size": "1"}, {"name": "b", "size": "2"}]}),
        ("items/meta/k,missing", {"items": [{"meta": {"k": 1}}, {}]}),
        ("*", LISTING),
    ],
)
def test_partial_responses(fields: str, kept: Any) -> None:
    assert select_fields(LISTING, fields) == kept


@pytest.mark.parametrize("fields", ["items(name", "items)", "a,,b", "a/"])
def test_a_broken_field_selection_is_refused(fields: str) -> None:
    with pytest.raises(ApiError, match="Invalid field selection"):
        select_fields({}, fields)
