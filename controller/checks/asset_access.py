"""Assets and bastion: input files exist or can be downloaded, by whom, and which build or bastion can run where."""

import ipaddress
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from conf.schema.assets import RemoteFile
from conf.schema.config import Config
from controller.checks.input_hugging_face import build_token, free_here, hub_file, known_secrets
from controller.context import Context, format_size
from controller.core.errors import ConfigError
from controller.core.finding import Issue, check
from controller.core.text import plural
from controller.gcp.google_errors import ForbiddenError, NotFoundError, ServiceDisabledError
from controller.inputs.download import DownloadError, find_file, part_path, token_for
from controller.inputs.env_inputs import MANAGER
from controller.inputs.hub_sources import SourceError, hub_endpoint, list_source, lookup_problem, require_readable
from controller.inputs.resolved_assets import AssetFile, BuildRecipe, ResolvedAsset, path_exists
from controller.plan.build import Plan, missing_assets
from controller.plan.worker_steps import describe_build, describe_fetch, fetched_on_pod
from controller.resources.uploads.source_assets import hub_with

THREADS = 8
SIGNED = re.compile(r"[?&](x-(amz|goog)-signature|signature|sig|token|access_token|api_?key|key)=", re.IGNORECASE)
"""Parameters that give access to a file."""


@check("asset_here", "error", "assets.KIND.NAME.path")
def local_files_are_here(config: Config) -> Iterator[Issue]:
    """A file that is missing on this machine would be missing on a billed TPU; a home folder would upload its keys."""
    for kind, name, asset in config.assets.iter_assets():
        if asset.path is not None and re.match(r"gs:?/", asset.path):
            message = f"{asset.path} is in a bucket already, and assets are copied from this machine; name it where it "
            yield Issue(f"{message}is read, e.g. data.path or model.weights", f"assets.{kind}s.{name}.path")
        elif asset.path is not None and not path_exists(Path(asset.path).expanduser()):
            cure = "name it as source, not as path" if ":/" in asset.path else "set it to an existing file or folder"
            message = f"no file at {asset.path}; {cure}"
            yield Issue(message, f"assets.{kind}s.{name}.path")
        elif asset.path is not None and _holds_home(Path(asset.path).expanduser()):
            message = f"{asset.path} contains your home folder, with its keys; set it to the folder of the data alone"
            yield Issue(message, f"assets.{kind}s.{name}.path")


@check("asset_token", "error", "assets.KIND.NAME.files.FILE.token_secret")
def tokens_are_secrets(config: Config) -> Iterator[Issue]:
    """A download token must be listed in `env.secrets`."""
    for key, file in _downloads(config):
        if file.token_secret is not None and config.env.secrets.get(file.token_secret) is None:
            message = f"{file.token_secret} is not in env.secrets; add it, e.g. env.secrets.{file.token_secret}=env"
            yield Issue(message, f"{key}.token_secret")


@check("asset_clear", "error", "assets.KIND.NAME.files.FILE.url", also="warning")
def tokens_are_encrypted(config: Config) -> Iterator[Issue]:
    """A token is never sent unencrypted, and an address on record in the bucket holds no password or signature."""
    for key, file in _downloads(config):
        if file.token_secret is not None and file.url.startswith("http://") and not _is_loopback(file.url):
            yield Issue("would send the token unencrypted; use https", f"{key}.url")
        if "@" in urlsplit(file.url).netloc:
            yield Issue("contains a password or token, which would be on record; use token_secret", f"{key}.url")
        elif SIGNED.search(file.url):
            message = "its query is a key to the file, and is on record in the bucket; use token_secret if you can"
            yield Issue(message, f"{key}.url", "warning")


@check("fetch_on", "warning", "assets.fetch_on", "assets.KIND.NAME.fetch_on")
def pod_has_something_to_fetch(config: Config) -> Iterator[Issue]:
    """The pod fetches what is on the net, and runs builds. Local files are always uploaded from this machine."""
    if config.assets.fetch_on == "pod" and not any(asset.is_remote for _, _, asset in config.assets.iter_assets()):
        yield Issue("pod has no effect: every asset is on this machine or in a bucket")
    for kind, name, asset in config.assets.iter_assets():
        if asset.fetch_on == "pod" and not asset.is_remote:
            key = f"assets.{kind}s.{name}.fetch_on"
            yield Issue("pod has no effect: its files are on this machine or in a bucket", key)


def _downloads(config: Config) -> Iterator[tuple[str, RemoteFile]]:
    for kind, name, asset in config.assets.iter_assets():
        for file, remote in (asset.files or {}).items():
            yield f"assets.{kind}s.{name}.files.{file}", remote


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _holds_home(path: Path) -> bool:
    """Return whether a folder is this user's home, or above it."""
    folder, home = path.resolve(), Path.home().resolve()
    return folder == home or folder in home.parents


@check("bastion_secrets", "error", "env.secrets.NAME", "notify.webhook", of_pods=True)
def bastion_has_secrets(config: Config) -> Iterator[Issue]:
    """This machine's secrets go only to the workers. A bastion reads its secrets from Secret Manager."""
    if config.recovery.driver != "bastion":
        return
    for name, source in config.secret_sources.items():
        if source and not source.startswith(MANAGER) and (source != "env" or os.environ.get(name)):
            message = (
                f"recovery.driver=bastion cannot read {source} from this machine; use null, or "
                f"{MANAGER}projects/P/secrets/NAME with roles/secretmanager.secretAccessor in cloud.driver_roles"
            )
            yield Issue(message, name if "." in name else f"env.secrets.{name}")


@check("bastion_fetch", "error", "assets.fetch_on", "assets.KIND.NAME.fetch_on", of_pods=True)
def bastion_has_assets(config: Config) -> Iterator[Issue]:
    """A bastion can use only assets that are already in the bucket."""
    if config.recovery.driver != "bastion":
        return
    message = "pod does not work with recovery.driver=bastion; use laptop, which fetches before the handover"
    if config.assets.fetch_on == "pod":
        yield Issue(message)
    for kind, name, asset in config.assets.iter_assets():
        if asset.fetch_on == "pod":
            yield Issue(message, f"assets.{kind}s.{name}.fetch_on")


@check("bastion_adopt", "error", "recovery.driver", of_pods=True)
def bastion_has_a_network(config: Config) -> Iterator[Issue]:
    """The bastion needs the network that slipway creates. For an adopted pod, slipway creates no network."""
    if config.recovery.driver == "bastion" and config.tpu.adopt:
        yield Issue("bastion needs the planned network, which tpu.adopt=true leaves out; use laptop")


@check("bastion_machine", "error", "cloud.driver_machine", live=True, of_pods=True)
def bastion_machine_is_offered(config: Config, context: Context) -> Iterator[Issue]:
    """Not every zone has every machine type; us-central2 has no E2 machines."""
    where = {"project": context.project, "zone": config.tpu.zone}
    if config.recovery.driver != "bastion":
        return
    try:
        context.google.call("compute", "machineTypes.get", **where, machineType=config.bastion_machine)
    except (ForbiddenError, ServiceDisabledError):
        return
    except NotFoundError:
        yield Issue(
            f"{config.tpu.zone} has no {config.bastion_machine}; use null, or one of `gcloud compute "
            f"machine-types list --zones={config.tpu.zone}`"
        )


@check("bastion_way", "warning", "ssh.method", of_pods=True)
def bastion_uses_internal_ssh(config: Config) -> Iterator[Issue]:
    """Inside the VPC, the bastion reaches workers at their internal addresses."""
    if config.recovery.driver == "bastion" and config.ssh.method == "external":
        yield Issue("external suits this machine, not the bastion; use auto, which picks internal addresses there")


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
    secrets = known_secrets(plan, context)
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
    folder, free = free_here(plan)
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
