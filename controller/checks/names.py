"""Names: they are yours, and Google accepts them."""

import re
from collections.abc import Iterator
from typing import Any

from conf.schema.config import Config
from conf.schema.infra.topology import is_near
from controller.context import Context
from controller.core.finding import Issue, check
from controller.gcp.errors import ForbiddenError, NotFoundError
from controller.plan.project import bucket_name

PLACEHOLDER = re.compile(
    r"\?\?\?|\b(your|my)[-_](actual[-_])?(project|bucket|zone|key|token|account|name)(?!-\d)|<[A-Z_-]+>", re.I
)
"""`my-project-412345` is none: Google proposes such IDs for new projects."""
EXAMPLE_NAMES = ("alpine-aspect-459819-m4", "nanochat-training-data-2026", "trm-scaling-study-kellen")
"""Other people's projects and buckets, from published instructions."""
BUCKET = re.compile(r"[a-z0-9]([-_.a-z0-9]{1,61})[a-z0-9]")


@check("placeholder", "error", "KEY")
def no_placeholders(config: Config) -> Iterator[Issue]:
    """Leftovers from instructions, such as `your-bucket`, `???` and other people's names, fail late and obscurely."""
    for key, text in iter_strings(config.model_dump(mode="json", exclude={"data", "model", "loop", "optimizer"}), ""):
        if key.startswith("env.secrets.") and text.startswith("env:"):
            continue  # the name of a variable, which may be MY_TOKEN
        if found := PLACEHOLDER.search(text):
            yield Issue(f"{found[0]!r} in {text!r} is a placeholder; set the real value", key)
        elif name := next((name for name in EXAMPLE_NAMES if name in text), None):
            yield Issue(f"{name} belongs to someone else; use your own", key)


@check("bucket_name", "error", "cloud.bucket")
def bucket_name_is_valid(config: Config) -> Iterator[Issue]:
    """Google rejects other bucket names: https://cloud.google.com/storage/docs/buckets#naming."""
    name = config.cloud.bucket
    if name is None:
        return
    if not BUCKET.fullmatch(name) or ".." in name or name.startswith("goog") or "google" in name:
        yield Issue(
            f"{name!r} is not a valid bucket name: use 3 to 63 of a-z, 0-9, -, _ and ., with a letter or digit at "
            "both ends, without `google` and without gs://"
        )


@check("bucket_far", "error", "cloud.bucket", live=True)
def bucket_is_close(config: Config, context: Context) -> Iterator[Issue]:
    """Reads from an existing bucket in another region are slow and billed."""
    name = bucket_name(config, context.project)
    try:
        location = context.google.call("storage", "buckets.get", bucket=name, projection="noAcl").get("location", "")
    except (NotFoundError, ForbiddenError):
        return  # `up` creates it, or `bucket_taken` reports it
    if far := [region for region in config.regions if location and not is_near(location, region)]:
        yield Issue(
            f"{name} is in {location.lower()} and the TPU in {', '.join(far)}, so reads are slow and billed per GB; "
            "use a bucket there (null creates one), or set tpu.zone to the bucket's region"
        )


@check("bucket_taken", "error", "cloud.bucket", live=True)
def bucket_is_accessible(config: Config, context: Context) -> Iterator[Issue]:
    """Bucket names are global in Google Cloud; a name that is taken looks like a missing permission."""
    name = bucket_name(config, context.project)
    try:
        context.google.call("storage", "buckets.get", bucket=name, projection="noAcl")
    except NotFoundError:
        return
    except ForbiddenError:
        try:
            context.google.call("storage", "objects.list", bucket=name, maxResults=1)
        except ForbiddenError:
            yield Issue(
                f"{name} exists but you have no access; bucket names are global, so it may belong to someone else; "
                "use another name"
            )


def iter_strings(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield every string in plain data with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, child in value.items():
            yield from iter_strings(child, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for child in value:
            yield from iter_strings(child, key)
