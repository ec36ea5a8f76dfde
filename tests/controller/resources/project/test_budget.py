"""The life of a budget on the billing account: made, seen, changed, deleted; off by default."""

from __future__ import annotations

from typing import Any

import pytest

from controller.core.errors import CloudError
from controller.plan.preview import preview_resources
from controller.reconcile.reconciler import destroy, reconcile
from controller.resources.project.budget import BillingBudget
from tests.controller.resources.conftest import EmulatedProject


def budget(usd: int = 100, account: str = "012345-6789AB-CDEF01") -> BillingBudget:
    return BillingBudget(name="slipway", account=account, usd=usd, thresholds=(0.5, 0.9))


def state(project: EmulatedProject) -> dict[str, Any]:
    return project.cloud.call_ok("GET", "emulator/state").get("budget", {})


def test_its_life(project: EmulatedProject) -> None:
    assert preview_resources((budget(),), project.context)[0].action == "create"
    reconcile([budget()], project.context)
    [made] = state(project).values()
    assert made["displayName"] == "slipway slipway-local"
    assert made["budgetFilter"] == {"projects": ["projects/314159265358"], "calendarPeriod": "MONTH"}
    assert made["amount"]["specifiedAmount"] == {"currencyCode": "USD", "units": "100"}
    assert [rule["thresholdPercent"] for rule in made["thresholdRules"]] == [0.5, 0.9]
    assert preview_resources((budget(),), project.context)[0].action == "none"
    assert preview_resources((budget(200),), project.context)[0].action == "update"
    reconcile([budget(200)], project.context)
    [changed] = state(project).values()
    assert changed["amount"]["specifiedAmount"]["units"] == "200"
    destroy([budget()], project.context)
    assert state(project) == {}
    destroy([budget()], project.context)


def test_an_account_that_is_not_yours_is_explained(project: EmulatedProject) -> None:
    with pytest.raises(CloudError, match=r"roles/billing\.costsManager, or set cloud\.billing_budget=null"):
        reconcile([budget(account="FFFFFF-000000-FFFFFF")], project.context)


def test_it_is_part_of_the_plan_where_it_is_asked_for(project: EmulatedProject) -> None:
    wanted = "cloud.billing_budget={account: 012345-6789AB-CDEF01, usd: 50, thresholds: [1.0]}"
    kinds = [resource.kind for resource in project.shared_resources(wanted)]
    assert "billing budget" in kinds
    services = next(resource for resource in project.shared_resources(wanted) if resource.kind == "services")
    assert "billingbudgets.googleapis.com" in services.spec_fields()["apis"]
    assert "billing budget" not in [resource.kind for resource in project.shared_resources()]
