"""Base of the services: what they stand on, and which method of an API each of their methods answers."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from controller.localcloud.apis.catalog import Catalog
from controller.localcloud.apis.networks import Networks
from controller.localcloud.apis.operations import Effect, Operations
from controller.localcloud.apis.quotas import Quotas
from controller.localcloud.faults.faults import Faults
from controller.localcloud.http.call import ApiCall, Handler
from controller.localcloud.iam import Policies, requested_version
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store
from controller.localcloud.vms.workers import EmulatedWorkers


@dataclass(eq=False)
class Service:
    """Part of the cloud that answers requests.

    Attributes:
        methods: names of the API methods that it answers, by the beginning that they share; `_set_labels` answers
            `setLabels`, `_operations_get` answers `operations.get`.
        root: URL of the Compute API.
    """

    methods: ClassVar[Mapping[str, str]] = {}
    store: Store
    settings: Settings
    catalog: Catalog
    operations: Operations
    faults: Faults
    networks: Networks
    quotas: Quotas
    policies: Policies
    workers: EmulatedWorkers
    root: str

    def handlers(self) -> dict[str, Handler]:
        return {
            f"{start}{name}": getattr(self, "_" + re.sub(r"\.|(?=[A-Z])", "_", name).lower())
            for start, names in self.methods.items()
            for name in names.split()
        }

    def of_policies(self, methods: str, resource: Callable[[ApiCall], str], conflict: int = 409) -> dict[str, Handler]:
        """Return the handlers of the policy of what `resource` finds."""
        return {
            f"{methods}getIamPolicy": lambda call: self.policies.get(resource(call), requested_version(call)),
            f"{methods}setIamPolicy": lambda call: self.policies.set(
                resource(call), call.body.get("policy", {}), conflict=conflict
            ),
            f"{methods}testIamPermissions": lambda call: call.test_permissions(resource(call)),
        }

    def effects(self) -> dict[str, Effect]:
        """Return what operations end with, by name."""
        return {}
