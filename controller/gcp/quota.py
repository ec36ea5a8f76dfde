"""Quotas as Google's Service Usage API shows them."""

from collections.abc import Iterator
from typing import Any, Protocol

from controller.gcp.client import GoogleClient


class Caller(Protocol):
    """Who asks: a client and its project."""

    @property
    def google(self) -> GoogleClient: ...

    @property
    def project(self) -> str: ...


def quota_metrics(caller: Caller, service: str) -> Iterator[dict[str, Any]]:
    """Yield the quota metrics of an API.

    https://cloud.google.com/service-usage/docs/reference/rest/v1beta1/services.consumerQuotaMetrics/list
    """
    method, parent = "services.consumerQuotaMetrics.list", f"projects/{caller.project}/services/{service}"
    return caller.google.list_all("serviceusage:v1beta1", method, "metrics", parent=parent, view="FULL", pageSize=500)
