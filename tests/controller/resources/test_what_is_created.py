"""The page that lists what is created lists all of it."""

import re
from typing import cast

from conf.extension import OwnStep
from controller.plan.project_steps import OwnResource, bastion_resources
from controller.reconcile import Resource
from tests.composed import config_of
from tests.controller.gcloud.conftest import desired_resources
from tests.paths import ROOT

PAGE = ROOT / "docs" / "what-is-created.md"


def everything() -> list[Resource]:
    """What a run may have, on a pod and with a bastion."""
    config = config_of("cloud=local", "program=command", "recovery.driver=bastion")
    budget = "cloud.billing_budget={account: 012345-6789AB-CDEF01, usd: 10, thresholds: [0.5]}"
    return [
        *desired_resources(budget),
        *bastion_resources(config, "a-bucket", "a-run", ()),
        OwnResource(name="lab-key", reference="my_secret:LabSecret", step=cast(OwnStep, None)),
    ]


def test_every_kind_has_a_row_and_every_row_a_kind() -> None:
    found = everything()
    rows = re.findall(r"^\| ([a-zA-Z ,]+) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)
    listed = {kind for row in rows if row[0] != "What" for kind in row[0].split(", ")}
    assert listed == {resource.kind for resource in found} | {"disk"}
    by_down_all = {kind for row in rows if "down --all" in row[3] for kind in row[0].split(", ")}
    assert by_down_all == {resource.kind for resource in found if resource.scope == "shared"}


def test_names_are_those_of_the_page() -> None:
    page = PAGE.read_text()
    for resource in desired_resources():
        if resource.scope == "shared":
            name = resource.name.replace("us-central1", "R").replace("slipway-local", "P")
            assert f"`{name}`" in page or f"`{name}:" in page or resource.kind in ("private Google access",), name
