"""Files of the web and builds: what a server refuses, who fetches each of them, and which build can run where."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from conf.schema.config import Config
from controller.checks.input_hugging_face import hub_file
from controller.context import Context, format_size
from controller.core.errors import ConfigError
from controller.core.finding import Issue, check
from controller.core.text import plural
from controller.gcp.google_errors import ServiceDisabledError
from controller.inputs.download import (
    CHECK_SECONDS,
    DownloadError,
    FoundFile,
    TokenNeededError,
    find_file,
    find_open_file,
    part_path,
    token_for,
)
from controller.inputs.hub_sources import SourceError, hub_endpoint, lookup_problem
from controller.inputs.resolved_assets import AssetFile, BuildRecipe, ResolvedAsset
from controller.plan.build import Plan, missing_assets
from controller.plan.worker_steps import describe_build, describe_fetch, fetched_nearby, fetcher_of
from controller.resources.uploads.errands import source_bytes

THREADS = 8


@check("download", "error", "assets.KIND.NAME.files.FILE.url", also="note", of_plan=True)
def files_can_be_fetched(plan: Plan, context: Context) -> Iterator[Issue]:
    """A file that its server refuses is found here, and not by a fetch of hours. A server that does not answer is a
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
        answers = list(pool.map(lambda file: _ask(plan.config, asset, file, token_for(file, secrets)), files))
    found, bound = list[FoundFile](), ""
    for file, answer in zip(files, answers, strict=True):
        key = f"assets.{asset.path}.files.{file.name}.url"
        if isinstance(answer, FoundFile):
            found.append(answer)
        elif isinstance(answer, TokenNeededError):
            if plan.config.assets.fetch_on_of(asset.kind, asset.name) != "vm":
                bound = str(answer)
            else:
                yield Issue(f"{answer}; assets.{asset.path}.fetch_on=laptop fetches it through this machine", key)
        elif not answer.permanent:
            yield Issue(f"was not checked: {answer}", key, "note")
        elif hub_file(file.url or "") is None:  # the check `hugging_face` reports those
            yield Issue(str(answer), key)
    if len(found) == len(files):
        size = sum(file.size or 0 for file in found)
        yield from _disk(plan, asset, files, size)
        how = describe_fetch(plan.config, asset, size, context.clock.now())
        told = format_size(size) if all(file.size is not None for file in found) else "of unknown size"
        yield Issue(f"{plural(len(files), 'file')}, {told}: {how}", f"assets.{asset.path}.files", "note")
    elif bound:
        yield Issue(f"through this machine: {bound}", f"assets.{asset.path}.files", "note")


def _ask(config: Config, asset: ResolvedAsset, file: AssetFile, token: str | None) -> FoundFile | SourceError:
    """Ask as the machine that will fetch the file does."""
    url = file.url or ""
    place = urlsplit(url)
    if problem := lookup_problem(f"{place.scheme}://{place.netloc.rpartition('@')[2]}"):
        return DownloadError(problem, permanent=False)
    try:
        if fetched_nearby(config, asset):
            return find_open_file(url, token, CHECK_SECONDS)
        return find_file(url, token, CHECK_SECONDS)
    except SourceError as error:
        return error


def _disk(plan: Plan, asset: ResolvedAsset, files: list[AssetFile], size: int) -> Iterator[Issue]:
    folder = Path(plan.config.run.state_dir).expanduser()
    free = shutil.disk_usage(folder if folder.is_dir() else Path.home()).free
    parts = sum(part.stat().st_size for part in map(part_path, (file.local for file in files)) if part.is_file())
    others = [file for file in files if hub_file(file.url or "") is None]  # the check `laptop_disk` adds those up
    if others and size - parts > free and fetcher_of(plan.config, asset, size) == "laptop":
        message = f"{format_size(size)} are downloaded to {folder}, which has {format_size(free)} free"
        yield Issue(
            f"{message}; free some space, or set run.state_dir to a folder on a larger disk",
            f"assets.{asset.path}.files.{others[0].name}.url",
        )


@check("build_place", "error", "assets.KIND.NAME.build", also="note", of_plan=True)
def builds_run_where_they_can(plan: Plan, context: Context) -> Iterator[Issue]:
    """A build that reads files of this machine, or needs its programs or a token, cannot run on a VM or the pod. Who
    runs a build, and why, is a note.
    """
    for asset in missing_assets(plan, context):
        if (recipe := asset.recipe) is None or recipe.output.is_dir():
            continue
        key = f"assets.{asset.path}.build"
        wanted = plan.config.assets.fetch_on_of(asset.kind, asset.name)
        bound = {"pod": recipe.bound, "vm": recipe.vm_bound}.get(wanted)
        if bound:
            yield Issue(f"cannot run on the {wanted}: {bound}; set assets.{asset.path}.fetch_on=laptop", key)
            continue
        size, why_here = 0, ""
        if fetched_nearby(plan.config, asset):
            try:
                size = _source_bytes(recipe)
            except TokenNeededError as error:
                if wanted == "vm":
                    yield Issue(f"{error}; assets.{asset.path}.fetch_on=laptop builds it on this machine", key)
                    continue
                why_here = str(error)
            except SourceError as error:
                yield Issue(str(error), key) if error.permanent else Issue(f"was not checked: {error}", key, "note")
                continue
        yield Issue(describe_build(plan.config, asset, size, why_here, context.clock.now()), key, "note")


def _source_bytes(recipe: BuildRecipe) -> int:
    if recipe.sources and (problem := lookup_problem(hub_endpoint())):  # before the Hub's library is imported
        raise SourceError(problem, permanent=False)
    return source_bytes(recipe)
