"""Budget on the billing account, which sends e-mail at its thresholds. It stops nothing: `budget.max_usd` does."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from controller.context import Context
from controller.core.errors import CloudError
from controller.gcp.errors import ForbiddenError, NotFoundError
from controller.reconcile.resource import Absent, Diff, ObservedResources, Resource, Scope

BUDGET_APIS = ("billingbudgets.googleapis.com", "cloudbilling.googleapis.com")


@dataclass(frozen=True, kw_only=True)
class BillingBudget(Resource):
    """Billing budget (https://cloud.google.com/billing/docs/reference/budget/rest/v1/billingAccounts.budgets).

    Budgets have no labels; ours is the one with our display name and only this project.
    """

    kind: ClassVar[str] = "billing budget"
    scope: ClassVar[Scope] = "shared"
    account: str = field(compare=False)
    usd: int
    thresholds: tuple[float, ...]
    path: str = field(default="", compare=False)

    @property
    def title(self) -> str:
        return f"budget of ${self.usd} per month on billing account {self.account}"

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        parent = f"billingAccounts/{self.account}"
        try:
            listed = list(
                context.google.list_all("billingbudgets", "billingAccounts.budgets.list", "budgets", parent=parent)
            )
        except ForbiddenError as error:
            raise CloudError(
                f"{self.title}: you may not view its budgets ({error.message}); ask an admin of the account for "
                "roles/billing.costsManager, or set cloud.billing_budget=null"
            ) from None
        for budget in listed:
            if budget.get("displayName") == self.display_name(context):
                return self._read(budget)
        return Absent()

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        if diff.action == "create":
            parent = f"billingAccounts/{self.account}"
            context.google.call(
                "billingbudgets", "billingAccounts.budgets.create", parent=parent, body=self.body(context)
            )
            return
        current = self.observe(context, observed)
        if not isinstance(current, Absent):
            mask = "amount,thresholdRules"
            context.google.call(
                "billingbudgets",
                "billingAccounts.budgets.patch",
                name=current.path,
                updateMask=mask,
                body=self.body(context),
            )

    def destroy(self, context: Context) -> None:
        current = self.observe(context, {})
        if isinstance(current, Absent):
            return
        try:
            context.google.call("billingbudgets", "billingAccounts.budgets.delete", name=current.path)
        except NotFoundError:
            return

    def display_name(self, context: Context) -> str:
        return f"slipway {context.project}"

    def body(self, context: Context) -> dict[str, Any]:
        return {
            "displayName": self.display_name(context),
            "budgetFilter": {"projects": [f"projects/{context.project_number}"], "calendarPeriod": "MONTH"},
            "amount": {"specifiedAmount": {"currencyCode": "USD", "units": str(self.usd)}},
            "thresholdRules": [{"thresholdPercent": share} for share in self.thresholds],
        }

    def _read(self, budget: dict[str, Any]) -> Self:
        amount = budget.get("amount", {}).get("specifiedAmount", {})
        shares = tuple(rule.get("thresholdPercent", 0.0) for rule in budget.get("thresholdRules", []))
        return replace(self, usd=int(amount.get("units", 0)), thresholds=shares, path=budget["name"])
