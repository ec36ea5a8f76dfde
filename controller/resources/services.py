"""What the project itself has: Google APIs that must be enabled, and a budget on its billing account.

The budget sends e-mail at its thresholds. It stops nothing: `budget.max_usd` does.
"""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from controller.context import Context
from controller.core.errors import CloudError
from controller.gcp.answers import wait_rpc
from controller.gcp.google_errors import ForbiddenError, NotFoundError, ServiceDisabledError
from controller.reconcile import Absent, Diff, ObservedResources, Resource, Scope

MAX_BATCH = 20
"""APIs per request: https://cloud.google.com/service-usage/docs/reference/rest/v1/services/batchEnable"""


@dataclass(frozen=True, kw_only=True)
class Services(Resource):
    """Enabled APIs (https://cloud.google.com/service-usage/docs/reference/rest/v1/services/batchEnable)."""

    kind: ClassVar[str] = "services"
    scope: ClassVar[Scope] = "external"
    marked: bool = field(default=False, compare=False)
    apis: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{len(self.apis)} Google APIs enabled"

    def observe(self, context: Context, observed: ObservedResources) -> Self:
        parent = f"projects/{context.project}"
        on: set[str] = set()
        for apis in _batches(self.apis):
            names = [f"{parent}/services/{api}" for api in apis]
            try:
                answer = context.google.call("serviceusage", "services.batchGet", parent=parent, names=names)
            except ForbiddenError as error:
                if self.id not in context.permission_denied:  # the first request to a disabled API will show it
                    context.permission_denied.add(self.id)
                    context.events.note(
                        self.id, f"cannot see which APIs are enabled, so all are taken to be: {error.message}"
                    )
                return self
            except ServiceDisabledError as error:
                command = f"gcloud services enable {error.service} --project={context.project}"
                raise CloudError(
                    f"{error.service} is off, and it is what enables the others; run `{command}`"
                ) from None
            on |= {s["name"].rsplit("/", 1)[-1] for s in answer.get("services", []) if s.get("state") == "ENABLED"}
        return replace(self, apis=tuple(api for api in self.apis if api in on))

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        missing = [api for api in self.apis if api not in (diff.changes[0].old or ())]
        parent = f"projects/{context.project}"
        for apis in _batches(missing):
            try:
                operation = context.google.call(
                    "serviceusage", "services.batchEnable", parent=parent, body={"serviceIds": list(apis)}
                )
            except ForbiddenError as error:
                raise CloudError(
                    f"you may not enable {', '.join(missing)} ({error.message}); ask a project admin to run: gcloud "
                    f"services enable {' '.join(missing)} --project={context.project}"
                ) from None
            wait_rpc(context, "serviceusage", operation, "operations.get")

    def disable_command(self, context: Context) -> str:
        """Return the command that disables them again."""
        return f"gcloud services disable {' '.join(self.apis)} --project={context.project}"


def _batches(apis: tuple[str, ...] | list[str]) -> list[tuple[str, ...]]:
    return [tuple(apis[i : i + MAX_BATCH]) for i in range(0, len(apis), MAX_BATCH)]


BUDGETS = "billingAccounts.budgets"
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
            listed = list(context.google.list_all("billingbudgets", f"{BUDGETS}.list", "budgets", parent=parent))
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
            context.google.call("billingbudgets", f"{BUDGETS}.create", parent=parent, body=self.body(context))
            return
        current = self.observe(context, observed)
        if not isinstance(current, Absent):
            changed = {"updateMask": "amount,thresholdRules", "body": self.body(context)}
            context.google.call("billingbudgets", f"{BUDGETS}.patch", name=current.path, **changed)

    def destroy(self, context: Context) -> None:
        current = self.observe(context, {})
        if not isinstance(current, Absent):
            with suppress(NotFoundError):
                context.google.call("billingbudgets", f"{BUDGETS}.delete", name=current.path)

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
