"""Sources of assets: a repository, bucket or file that cannot be read is found before anything is billed."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from conf.schema.infra.assets import parse_source
from controller.context import Context
from controller.core.errors import ConfigError
from controller.core.finding import Issue, check
from controller.core.text import plural
from controller.gcp.errors import NoCredentialsError, ServiceDisabledError
from controller.inputs.assets import ResolvedAsset
from controller.inputs.hub import SourceError, hub_endpoint, list_source, lookup_problem, require_readable
from controller.plan.build import Plan
from controller.plan.fetching import describe_fetch, fetcher_of
from controller.plan.preview import missing_assets
from controller.progress import format_size
from controller.resources.uploads.sources import THREADS, hub_access, list_objects


@check("source", "error", "assets.KIND.NAME.source", also="note", of_plan=True)
def sources_can_be_read(plan: Plan, context: Context) -> Iterator[Issue]:
    """A repository that is gated, absent or without such a file is found here, and not by a fetch of hours. A Hub that
    does not answer is a note.
    """
    for asset in missing_assets(plan, context):
        if asset.source is None:
            continue
        key = f"assets.{asset.path}.source"
        try:
            yield from _questions(plan, context, asset, key)
        except SourceError as error:
            yield Issue(str(error), key) if error.lasting else Issue(f"was not checked: {error}", key, "note")


def _questions(plan: Plan, context: Context, asset: ResolvedAsset, key: str) -> Iterator[Issue]:
    source = asset.source or ""
    address = parse_source(source)
    if address.kind == "bucket":
        if plan.config.cloud.kind == "here":
            yield Issue(f"{source} is in a bucket, which cloud=here does not reach; use path, or hf://", key)
            return
        try:
            list_objects(context.google, address)
        except (NoCredentialsError, ServiceDisabledError):
            return  # another check reports it
        return
    try:
        plan.vault.load(context.google)
    except (ConfigError, ServiceDisabledError):
        return  # another check reports it
    endpoint = hub_endpoint()
    if endpoint.startswith("https:") and (problem := lookup_problem(endpoint)):  # before the Hub's library is imported
        raise SourceError(f"{address.repository}: {problem}", lasting=False)
    access = hub_access(plan.vault)
    commit, files = list_source(address, access)
    require_readable(address, commit, files, access)
    folder = Path(plan.config.run.state_dir).expanduser()
    free = shutil.disk_usage(folder if folder.is_dir() else Path.home()).free
    size = sum(file.size for file in files)
    most = sum(sorted((file.size for file in files), reverse=True)[:THREADS])
    if most > free and fetcher_of(plan.config, asset, size) == "laptop":
        message = f"its {THREADS} largest files take {format_size(most)}; {folder} has {format_size(free)} free"
        yield Issue(f"{message}. Free some, or set run.state_dir to a folder on a larger disk", key)
    how = describe_fetch(plan.config, asset, size, context.clock.now())
    yield Issue(f"{plural(len(files), 'file')}, {format_size(size)}, of commit {commit[:12]}: {how}", key, "note")
