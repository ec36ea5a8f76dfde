"""What the plan still has to fetch or make on this machine before a pod can use it."""

from collections.abc import Iterator

from controller.context import Context
from controller.gcp.errors import ForbiddenError, NoCredentialsError, ServiceDisabledError
from controller.inputs.assets import ResolvedAsset
from controller.plan.build import Plan
from controller.reconcile.resource import Absent
from controller.resources.uploads.assets import AssetInBucket


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
