"""Files of the web and builds: what a server refuses, who fetches each of them, and which build can run where."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from controller.checks.input_hugging_face import build_token, hub_file
from controller.context import Context, format_size
from controller.core.errors import ConfigError
from controller.core.finding import Issue, check
from controller.core.text import plural
from controller.gcp.google_errors import ServiceDisabledError
from controller.inputs.download import DownloadError, find_file, part_path, token_for
from controller.inputs.hub_sources import SourceError, hub_endpoint, list_source, lookup_problem, require_readable
from controller.inputs.resolved_assets import AssetFile, BuildRecipe, ResolvedAsset
from controller.plan.build import Plan, missing_assets
from controller.plan.worker_steps import describe_build, describe_fetch, fetched_on_pod
from controller.resources.uploads.source_assets import hub_with

THREADS = 8


@check("download", "error", "assets.KIND.NAME.files.FILE.url", also="note", of_plan=True)
def files_can_be_fetched(plan: Plan, context: Context) -> Iterator[Issue]:
    """A file that its server refuses would end a fetch of hours. A server that does not answer is a
    note, and so is who fetches the files.
    """
    for asset in missing_assets(plan, context):
        files = [file for file in asset.files if file.url is not None and not file.local.is_file()]
        if files:
            yield from _questions(plan, context, asset, files)


def _questions(plan: Plan, context: Context, asset: ResolvedAsset, files: list[AssetFile]) -> Iterator[Issue]:
    try:
        plan.vault.load(context.google)
        secrets = plan.vault.values()
    except (ConfigError, ServiceDisabledError):
        secrets = {}  # another check reports it
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        answers = list(pool.map(lambda file: _ask(file, token_for(file, secrets)), files))
    for file, answer in zip(files, answers, strict=True):
        key = f"assets.{asset.path}.files.{file.name}.url"
        if isinstance(answer, DownloadError) and not answer.permanent:
            yield Issue(f"was not checked: {answer}", key, "note")
        elif isinstance(answer, DownloadError) and hub_file(file.url or "") is None:  # `hugging_face` reports those
            yield Issue(str(answer), key)
    sizes = [answer for answer in answers if not isinstance(answer, DownloadError)]
    if len(sizes) == len(files):
        size = sum(one or 0 for one in sizes)
        yield from _disk(plan, asset, files, size)
        how = describe_fetch(plan.config, asset, size, context.clock.now())
        told = "of unknown size" if None in sizes else format_size(size)
        yield Issue(f"{plural(len(files), 'file')}, {told}: {how}", f"assets.{asset.path}.files", "note")


def _ask(file: AssetFile, token: str | None) -> int | DownloadError | None:
    """Return the size of a file, None if its server does not tell it; or why it cannot be fetched."""
    url = file.url or ""
    place = urlsplit(url)
    if problem := lookup_problem(f"{place.scheme}://{place.netloc.rpartition('@')[2]}"):
        return DownloadError(problem, permanent=False)
    try:
        return find_file(url, token)
    except DownloadError as error:
        return error


def _disk(plan: Plan, asset: ResolvedAsset, files: list[AssetFile], size: int) -> Iterator[Issue]:
    folder = Path(plan.config.run.state_dir).expanduser()
    free = shutil.disk_usage(folder if folder.is_dir() else Path.home()).free
    parts = sum(part.stat().st_size for part in map(part_path, (file.local for file in files)) if part.is_file())
    others = [file for file in files if hub_file(file.url or "") is None]  # the check `laptop_disk` adds those up
    if others and size - parts > free and not fetched_on_pod(plan.config, asset):
        message = f"{format_size(size)} are downloaded to {folder}, which has {format_size(free)} free"
        yield Issue(
            f"{message}; free some space, or set run.state_dir to a folder on a larger disk",
            f"assets.{asset.path}.files.{others[0].name}.url",
        )


@check("build_place", "error", "assets.KIND.NAME.build", also="note", of_plan=True)
def builds_run_where_they_can(plan: Plan, context: Context) -> Iterator[Issue]:
    """A build that reads files of this machine, or needs its programs, cannot run on the pod. What the Hub refuses it
    is found here. Who runs a build is a note.
    """
    for asset in missing_assets(plan, context):
        if (recipe := asset.recipe) is None or recipe.output.is_dir():
            continue
        key = f"assets.{asset.path}.build"
        if recipe.bound and plan.config.assets.fetch_on_of(asset.kind, asset.name) == "pod":
            yield Issue(f"cannot run on the pod: {recipe.bound}; set assets.{asset.path}.fetch_on=laptop", key)
            continue
        try:
            _require_sources(plan, context, asset, recipe)
        except SourceError as error:
            yield Issue(str(error), key) if error.permanent else Issue(f"was not checked: {error}", key, "note")
        else:
            yield Issue(describe_build(plan.config, asset, context.clock.now()), key, "note")


def _require_sources(plan: Plan, context: Context, asset: ResolvedAsset, recipe: BuildRecipe) -> None:
    """Raise SourceError if the build of an asset cannot read the files of the Hub that it names."""
    if not recipe.sources:
        return
    if problem := lookup_problem(hub_endpoint()):  # before the Hub's library is imported
        raise SourceError(problem, permanent=False)
    from huggingface_hub import get_token

    try:
        token = build_token(plan, context, asset)
    except (ConfigError, ServiceDisabledError):
        return  # another check reports it
    access = hub_with(get_token() if token is None else token)
    for address in recipe.sources:
        require_readable(address, *list_source(address, access), access)
