"""Which of Google's APIs the project has enabled. A fresh project has few, and one just enabled flaps for a moment."""

import time
from collections import Counter

from controller.localcloud.http.call import PROJECT_NUMBER
from controller.localcloud.http.errors import ApiError
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store

ENABLED_BY_DEFAULT = frozenset({"logging", "monitoring", "serviceusage", "storage"})
"""Those of our APIs that a new project has: https://cloud.google.com/service-usage/docs/enabled-service#default."""
_WITHOUT_SERVICE = frozenset({"oauth2", "serviceusage"})
"""oauth2 is no service of a project, and no project can do without serviceusage."""
_FLAPPING_OPERATIONS = 2.5
"""Counted from the request to enable it, whose own operation takes one."""


class EnabledApis:
    """States of the services (kind "service"), by names such as `tpu.googleapis.com`."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._refused = Counter[str]()

    def is_enabled(self, service: str) -> bool:
        from_the_start = not self._settings.is_strict or service.partition(".")[0] in ENABLED_BY_DEFAULT
        default = "ENABLED" if from_the_start else "DISABLED"
        return (self._store.get("service", service) or {"state": default})["state"] == "ENABLED"

    def set_enabled(self, service: str, enabled: bool) -> None:
        fresh = enabled and not self.is_enabled(service)
        former = self._store.get("service", service) or {}
        steady = time.time() + self._settings.delay(_FLAPPING_OPERATIONS) if fresh else former.get("steadyAt", 0.0)
        self._store.put("service", service, {"state": "ENABLED" if enabled else "DISABLED", "steadyAt": steady})

    def check(self, api: str) -> None:
        """Raise ApiError 403 for a disabled API. One just enabled refuses every other request: frontends differ."""
        service = f"{api}.googleapis.com"
        if api in _WITHOUT_SERVICE:
            return
        if self.is_enabled(service):
            if time.time() >= (self._store.get("service", service) or {}).get("steadyAt", 0.0):
                return
            self._refused[service] += 1
            if self._refused[service] % 2 == 0:
                return
        message = (
            f"{service} has not been used in project {PROJECT_NUMBER} before or it is disabled. Enable it by visiting "
            f"https://console.developers.google.com/apis/api/{service}/overview?project={PROJECT_NUMBER} then retry. "
            "If you enabled this API recently, wait a few minutes for the action to propagate to our systems and retry."
        )
        metadata = {"service": service, "consumer": f"projects/{PROJECT_NUMBER}"}
        info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "SERVICE_DISABLED"}
        info |= {"domain": "googleapis.com", "metadata": metadata}
        raise ApiError(403, message, reason="accessNotConfigured", details=[info])
