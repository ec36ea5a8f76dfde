"""Preview a plan without changing anything: the current state of each resource and its difference from the plan."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from controller.context import Context
from controller.core.errors import WorkersDisagreeError
from controller.gcp.errors import ForbiddenError, NoCredentialsError, ServiceDisabledError
from controller.inputs.assets import ResolvedAsset
from controller.plan.build import Plan
from controller.reconcile.reconciler import topological_order
from controller.reconcile.resource import Absent, Diff, NotEnabled, Pending, Resource, Unknown
from controller.resources.uploads.assets import AssetInBucket
from controller.resources.workers.worker import WorkerResource
from controller.ssh.fleet import WorkerError, WorkersFailedError


@dataclass(frozen=True)
class ResourcePreview:
    """Preview of one resource: its observed state and the difference that `up` would apply (None: not observed)."""

    resource: Resource
    observed: Any
    diff: Diff | None

    @property
    def title(self) -> str:
        """What the resource is, and what is known of it because it exists."""
        return self.resource.title_of(self.observed) if self.action == "none" else self.resource.title

    @property
    def action(self) -> str:
        if self.diff is not None:
            return self.diff.action
        if isinstance(self.observed, NotEnabled):
            return "create"
        return "wait" if isinstance(self.observed, Pending) else "unknown"


def preview_resources(resources: tuple[Resource, ...], context: Context) -> list[ResourcePreview]:
    """Observe every resource, independent ones concurrently, and compute what would change."""
    observed: dict[str, Any] = {}
    rows: dict[str, ResourcePreview] = {}
    left = topological_order(resources)
    with ThreadPoolExecutor(max_workers=16) as pool:
        while left:
            ready = [r for r in left if set(r.depends_on) <= set(observed)]
            left = [r for r in left if r not in ready]
            for resource, current in zip(ready, pool.map(lambda r: _observe(r, context, observed), ready), strict=True):
                observed[resource.id] = current
                known = not isinstance(current, Pending | Unknown)
                rows[resource.id] = ResourcePreview(resource, current, resource.diff(current) if known else None)
    return [rows[r.id] for r in resources]


def _observe(resource: Resource, context: Context, observed: dict[str, Any]) -> Any:
    if isinstance(resource, WorkerResource):
        node = observed[resource.node]
        if isinstance(node, Absent):
            return Absent()
        if isinstance(node, Pending):
            return Unknown(f"the node is {node.why}")
        if isinstance(node, Unknown):
            return node
        if not node.is_ready:
            return Absent()  # the node will be replaced, and this resource with it
    try:
        return resource.observe(context, observed)
    except NoCredentialsError as error:
        return Unknown(str(error))
    except ServiceDisabledError as error:
        return NotEnabled(f"{error.service} is not enabled yet; `up` enables it", error.service)
    except ForbiddenError as error:
        return Unknown(error.message)  # the check of permissions says all that is missing
    except (WorkerError, WorkersFailedError, WorkersDisagreeError) as error:
        return Unknown(str(error))


def missing_assets(plan: Plan, context: Context) -> Iterator[ResolvedAsset]:
    """Yield the assets that are not in the bucket, as far as this user can see."""
    for resource in plan.resources:
        if isinstance(resource, AssetInBucket):
            try:
                seen = resource.observe(context, {})
            except (NoCredentialsError, ForbiddenError, ServiceDisabledError):
                seen = Absent()
            if isinstance(seen, Absent):
                yield resource.content
