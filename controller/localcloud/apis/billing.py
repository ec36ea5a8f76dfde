"""Billing: cloudbilling v1, billingbudgets v1, and the quotas of serviceusage v1beta1."""

from controller.localcloud.apis.quotas import Quotas
from controller.localcloud.http.call import (
    PROJECT,
    ApiCall,
    Handler,
    check_project,
    merge_patch,
    paginate,
)
from controller.localcloud.http.errors import ApiError, not_found
from controller.localcloud.store import Document, Store

BILLING_ACCOUNT = "012345-6789AB-CDEF01"
"""The only billing account."""
_BUDGETS = "billingbudgets.v1:billingAccounts.budgets."


class Billing:
    """Handlers of the three APIs. Budgets are stored by full name, kind "budget"."""

    def __init__(self, store: Store, quotas: Quotas) -> None:
        self._store = store
        self._quotas = quotas

    def handlers(self) -> dict[str, Handler]:
        return {
            "cloudbilling.v1:projects.getBillingInfo": self._info,
            "cloudbilling.v1:billingAccounts.list": lambda call: paginate(
                call, [_billing_account()], "billingAccounts"
            ),
            "cloudbilling.v1:billingAccounts.testIamPermissions": self._test_permissions,
            "serviceusage.v1beta1:services.consumerQuotaMetrics.list": self._quota_metrics,
            f"{_BUDGETS}create": self._create,
            f"{_BUDGETS}get": self._get,
            f"{_BUDGETS}list": self._list,
            f"{_BUDGETS}patch": self._patch,
            f"{_BUDGETS}delete": self._delete,
        }

    def _info(self, call: ApiCall) -> Document:
        check_project(call.path["projectsId"])
        return {
            "name": f"projects/{PROJECT}/billingInfo",
            "projectId": PROJECT,
            "billingAccountName": f"billingAccounts/{BILLING_ACCOUNT}",
            "billingEnabled": True,
        }

    def _quota_metrics(self, call: ApiCall) -> Document:
        check_project(call.path["v1beta1Id1"])
        listed = {"tpu.googleapis.com": self._quotas.tpu_metrics, "compute.googleapis.com": self._quotas.pool_metrics}
        metrics = listed.get(call.path["servicesId"])
        return paginate(call, metrics(), "metrics") if metrics else {}

    def _test_permissions(self, call: ApiCall) -> Document:
        held = call.held_permissions(list(call.body.get("permissions", ())), self._parent(call))
        return {"permissions": held} if held else {}

    def _create(self, call: ApiCall) -> Document:
        parent = self._parent(call)
        if "amount" not in call.body:
            raise ApiError(400, "Budget amount is required.")
        name = f"{parent}/budgets/{self._store.next_number('budget'):08d}"
        budget = {**call.body, "name": name, "etag": "1"}
        self._store.put("budget", name, budget)
        return budget

    def _get(self, call: ApiCall) -> Document:
        name = f"{self._parent(call)}/budgets/{call.path['budgetsId']}"
        budget = self._store.get("budget", name)
        if budget is None:
            raise not_found(name)
        return budget

    def _list(self, call: ApiCall) -> Document:
        return paginate(
            call, [budget for _, budget in self._store.items("budget", f"{self._parent(call)}/")], "budgets"
        )

    def _patch(self, call: ApiCall) -> Document:
        budget = self._get(call)
        mask = [name for name in call.query.get("updateMask", "").split(",") if name]
        change = {key: value for key, value in call.body.items() if not mask or key in mask}
        changed = merge_patch(budget, change) | {"name": budget["name"], "etag": str(int(budget["etag"]) + 1)}
        self._store.put("budget", budget["name"], changed)
        return changed

    def _delete(self, call: ApiCall) -> Document:
        self._store.delete("budget", self._get(call)["name"])
        return {}

    def _parent(self, call: ApiCall) -> str:
        account = call.path["billingAccountsId"]
        if account != BILLING_ACCOUNT:
            raise ApiError(403, f"The caller does not have permission on billing account '{account}'")
        return f"billingAccounts/{account}"


def _billing_account() -> Document:
    return {
        "name": f"billingAccounts/{BILLING_ACCOUNT}",
        "open": True,
        "displayName": "Emulated",
        "masterBillingAccount": "",
    }
