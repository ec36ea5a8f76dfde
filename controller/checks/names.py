"""Are the names yours, and can they be had?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from conf.schema.config import Config
from conf.schema.infra.regions import covers
from controller.core.finding import Finding
from controller.gcp.client import Forbidden, NotFound
from controller.plan.project import bucket_name

if TYPE_CHECKING:
    from controller.context import Context

PLACEHOLDER = re.compile(
    r"\?\?\?|\b(your|my)[-_](actual[-_])?(project|bucket|zone|key|token|account|name)|<[A-Z_-]+>", re.I
)
FOREIGN = ("alpine-aspect-459819-m4", "nanochat-training-data-2026", "trm-scaling-study-kellen")
"""Projects and buckets of others, as their published instructions have them."""
BUCKET = re.compile(r"[a-z0-9]([-_.a-z0-9]{1,61})[a-z0-9]")


def no_placeholders(config: Config) -> Iterator[Finding]:
    """`your-bucket`, `???` and other people's names are left over from instructions; they fail late and obscurely."""
    for key, text in strings(config.model_dump(mode="json", exclude={"data", "model", "loop", "optimizer"}), ""):
        if key.startswith("env.secrets.") and text.startswith("env:"):
            continue  # the name of a variable, which may well be MY_TOKEN
        if found := PLACEHOLDER.search(text):
            yield Finding("placeholder", "error", key, f"{found[0]!r} in {text!r} is a placeholder; set what is meant")
        elif name := next((name for name in FOREIGN if name in text), None):
            yield Finding("placeholder", "error", key, f"{name} belongs to someone else; set your own")


def bucket_can_be_called_so(config: Config) -> Iterator[Finding]:
    """https://cloud.google.com/storage/docs/buckets#naming: Google refuses other names of buckets."""
    name = config.cloud.bucket
    if name is None:
        return
    if not BUCKET.fullmatch(name) or ".." in name or name.startswith("goog") or "google" in name:
        words = (
            f"{name!r} cannot be the name of a bucket: 3 to 63 of a-z, 0-9, -, _ and ., letters or digits at both "
            "ends, no google in it and no gs:// before it"
        )
        yield Finding("bucket_name", "error", "cloud.bucket", words)


def bucket_is_ours_to_use(config: Config, world: Context) -> Iterator[Finding]:
    """Bucket names are shared by all of Google Cloud: one that is taken looks like a missing permission."""
    name = bucket_name(config, world.project)
    try:
        answer = world.google.call("storage", "buckets.get", bucket=name, projection="noAcl")
    except NotFound:
        return
    except Forbidden:
        try:
            world.google.call("storage", "objects.list", bucket=name, maxResults=1)
        except Forbidden:
            words = (
                f"{name} is there, and you may not use it: names are shared by all of Google Cloud, and someone else "
                "may have taken it; set another name"
            )
            yield Finding("bucket_taken", "error", "cloud.bucket", words)
        return
    location = answer.get("location", "")
    far = [region for region in config.regions if location and not covers(location, region)]
    if far:
        words = (
            f"{name} is in {location.lower()}, the TPU in {', '.join(far)}: reading across is slow and billed per GB; "
            "set it to a bucket there (null: one is made), or tpu.zone to a zone of the bucket's region"
        )
        yield Finding("bucket_far", "error", "cloud.bucket", words)


def strings(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every string in plain data with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, child in value.items():
            yield from strings(child, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for child in value:
            yield from strings(child, key)


CHECKS = (
    no_placeholders,
    bucket_can_be_called_so,
)
PROBES = (bucket_is_ours_to_use,)
