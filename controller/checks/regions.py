"""Do the zones, the subnets and the bucket lie together?"""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema.config import Config
from conf.schema.infra.regions import covers, subnet_range
from controller.core.finding import Finding


def subnet_has_a_range(config: Config) -> Iterator[Finding]:
    """A subnet that is created needs a range, and conf/regions.yaml holds one per region known to it."""
    unknown = [region for region in config.regions if subnet_range(region) is None]
    if unknown and config.network.cidr is None and config.network.mode == "custom":
        words = f"conf/regions.yaml has no block for {', '.join(unknown)}; set a range such as 10.80.0.0/20"
        yield Finding("subnet_range", "error", "network.cidr", words)


def ranges_do_not_overlap(config: Config) -> Iterator[Finding]:
    """Google refuses two subnets of one network with the same range."""
    if config.network.cidr is not None and len(config.regions) > 1:
        words = f"is one range, and the zones are in {len(config.regions)} regions; leave it null: each has its own"
        yield Finding("subnet_overlap", "error", "network.cidr", words)


def bucket_is_near(config: Config) -> Iterator[Finding]:
    """Reading across regions is slow and billed, so a bucket that is created must serve every zone."""
    if config.cloud.bucket is not None:
        return  # where it is, only Google knows; `up` and `plan` ask
    location = config.cloud.bucket_location or config.region
    far = [region for region in config.regions if not covers(location, region)]
    if far:
        words = (
            f"{location} does not serve {', '.join(far)}; set it to a multi-region (us, eu, asia) or drop those zones"
        )
        yield Finding("bucket_near", "error", "cloud.bucket_location", words)


def soft_delete_is_possible(config: Config) -> Iterator[Finding]:
    """https://cloud.google.com/storage/docs/soft-delete: off, or at least a week."""
    if 0 < config.cloud.soft_delete_days < 7:
        yield Finding("soft_delete_days", "error", "cloud.soft_delete_days", "must be 0 or 7 to 90")


CHECKS = (
    subnet_has_a_range,
    ranges_do_not_overlap,
    bucket_is_near,
    soft_delete_is_possible,
)
