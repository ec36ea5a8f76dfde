"""What an organization's policies refuse, by Google's answers as its reference describes them."""

from typing import Any

import pytest

from controller.checks.account.organization import groups_of, is_refused
from controller.checks.preflight import examine_cloud
from controller.gcp.google_errors import ForbiddenError, GoogleError, NotFoundError
from tests.composed import config_of
from tests.fakes.context import make_context
from tests.fakes.google import Answers

ZONE = groups_of("us-central1-a")
ABSENT = NotFoundError("x", 404, "notFound", "no such thing")


@pytest.mark.parametrize(
    ("policy", "refused"),
    [
        ({}, False),
        ({"constraint": "c", "booleanPolicy": {}}, False),
        ({"booleanPolicy": {"enforced": True}}, True),
        ({"listPolicy": {"allValues": "ALLOW"}}, False),
        ({"listPolicy": {"allValues": "DENY"}}, True),
        ({"listPolicy": {"allowedValues": ["us-central1-a"]}}, False),
        ({"listPolicy": {"allowedValues": ["is:us-central1-a"]}}, False),
        ({"listPolicy": {"allowedValues": ["us-central1"]}}, True),  # a region does not stand for its zones
        ({"listPolicy": {"allowedValues": ["in:us-central1-locations"]}}, False),
        ({"listPolicy": {"allowedValues": ["in:eu-locations", "in:us-locations"]}}, False),
        ({"listPolicy": {"allowedValues": ["in:eu-locations", "europe-west4"]}}, True),
        ({"listPolicy": {"allowedValues": ["in:us-low-carbon-locations"]}}, None),
        ({"listPolicy": {"allowedValues": ["under:organizations/1"]}}, None),
        ({"listPolicy": {"deniedValues": ["in:eu-locations"]}}, False),
        ({"listPolicy": {"deniedValues": ["in:us-locations"]}}, True),
        ({"listPolicy": {"deniedValues": ["in:us-low-carbon-locations"]}}, None),
        ({"listPolicy": {"allowedValues": ["in:us-locations"], "deniedValues": ["us-central1-a"]}}, True),
    ],
)
def test_an_effective_policy_refuses_a_zone(policy: dict[str, Any], refused: bool | None) -> None:
    assert is_refused(policy, ZONE) is refused


def test_london_is_not_in_the_union() -> None:
    assert "in:eu-locations" in groups_of("europe-west4-b")
    assert "in:eu-locations" not in groups_of("europe-west2")
    assert groups_of("us") == {"us", "in:us-locations", "in:northamerica-locations"}


class Organization(Answers):
    """An organization with these policies; nothing of the project exists yet."""

    def __init__(self, **policies: Any) -> None:
        super().__init__({"buckets.get": ABSENT, "projects.serviceAccounts.get": ABSENT})
        self.policies = {name.replace("_", "."): answer for name, answer in policies.items()}
        self.asked: list[str] = []

    def call(self, api: str, method: str, **parameters: Any) -> dict[str, Any]:
        if method != "projects.getEffectiveOrgPolicy":
            return super().call(api, method, **parameters)
        name = parameters["body"]["constraint"].removeprefix("constraints/")
        self.asked.append(name)
        answer = self.policies.get(name, {})
        if isinstance(answer, Exception):
            raise answer
        return answer


def found(google: Organization, *overrides: str) -> tuple[str, list[str]]:
    config = config_of("cloud.project=acme", "program=command", "program.command=[a]", *overrides)
    answers = examine_cloud(config, make_context(google, project="acme"))
    [answer] = [answer for answer in answers if answer.rule.id == "organization"]
    return answer.outcome, [f"{f.severity} {f.key} {f.message.partition(':')[0]}" for f in answer.findings]


ON = {"booleanPolicy": {"enforced": True}}
NONE = {"listPolicy": {"allValues": "DENY"}}
SAYS = "your organization's policy"


@pytest.mark.parametrize(
    ("policies", "overrides", "said"),
    [
        (
            {"iam_disableServiceAccountCreation": ON},
            [],
            f"error cloud.service_account {SAYS} iam.disableServiceAccountCreation refuses the new account "
            "slipway-runner",
        ),
        (
            {"compute_restrictCloudNATUsage": NONE},
            [],
            f"warning network.nat {SAYS} compute.restrictCloudNATUsage refuses a new NAT",
        ),
        (
            {"compute_vmExternalIpAccess": {"listPolicy": {"allowedValues": ["projects/acme/zones/z/instances/one"]}}},
            ["tpu=v6e_8_ce", "tpu.external_ip=true"],
            f"error tpu.external_ip {SAYS} compute.vmExternalIpAccess refuses external addresses",
        ),
        (
            {"compute_trustedImageProjects": {"listPolicy": {"allowedValues": ["projects/debian-cloud"]}}},
            ["tpu=v6e_8_ce"],
            f"error tpu.plane {SAYS} compute.trustedImageProjects refuses Google's images for TPUs",
        ),
        (
            {"compute_disableGuestAttributesAccess": ON},
            [],
            f"warning ssh.host_keys {SAYS} compute.disableGuestAttributesAccess refuses the host keys that workers "
            "publish",
        ),
        (
            {"compute_requireOsLogin": ON},
            ["ssh.os_login=false"],
            f"error ssh.os_login {SAYS} compute.requireOsLogin refuses keys in the metadata of VMs",
        ),
        (
            {"gcp_restrictServiceUsage": {"listPolicy": {"deniedValues": ["tpu.googleapis.com"]}}},
            [],
            f"error cloud.apis {SAYS} gcp.restrictServiceUsage refuses the API tpu.googleapis.com",
        ),
    ],
)
def test_what_the_plan_makes_and_a_policy_refuses(policies: dict[str, Any], overrides: list[str], said: str) -> None:
    google = Organization(**policies)
    assert found(google, *overrides)[1] == [said]
    assert len(google.asked) == len(set(google.asked)), "each is asked for once"


def test_what_the_plan_does_not_make_is_not_asked_about() -> None:
    google = Organization()
    assert found(google) == ("ok", [])
    assert not {"compute.vmExternalIpAccess", "iam.disableServiceAccountKeyCreation"} & {*google.asked}
    assert found(Organization(compute_requireShieldedVm=ON)) == ("ok", [])  # the TPU API alone
    assert found(Organization(gcp_resourceLocations=NONE), "tpu.adopt=true", "tpu.name=theirs") == ("ok", [])


@pytest.mark.parametrize(
    "refusal", [ForbiddenError("x", 403, "PERMISSION_DENIED", "no"), GoogleError("x", 400, "INVALID_ARGUMENT", "what?")]
)
def test_what_cannot_be_read_is_not_fine(refusal: GoogleError) -> None:
    outcome, said = found(Organization(gcp_resourceLocations=refusal))
    assert (outcome, len(said)) == ("unknown", 1)
