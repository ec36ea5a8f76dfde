"""Assets and bastion: the program's input files exist or can be downloaded, and a bastion can finish the run."""

import ipaddress
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from conf.schema.assets import RemoteFile
from conf.schema.config import Config
from controller.context import Context
from controller.core.finding import Issue, check
from controller.gcp.google_errors import ForbiddenError, NotFoundError, ServiceDisabledError
from controller.inputs.env_inputs import MANAGER
from controller.inputs.resolved_assets import path_exists

SIGNED = re.compile(r"[?&](x-(amz|goog)-signature|signature|sig|token|access_token|api_?key|key)=", re.IGNORECASE)
"""Parameters that give access to a file."""


@check("asset_here", "error", "assets.KIND.NAME.path")
def local_files_are_here(config: Config) -> Iterator[Issue]:
    """A file that is missing on this machine would be missing on a billed TPU; a home folder would upload its keys."""
    for kind, name, asset in config.assets.iter_assets():
        if asset.path is not None and asset.path.startswith("gs://"):
            message = f"{asset.path} is in a bucket already, and assets are copied from this machine; name it where it "
            yield Issue(f"{message}is read, e.g. data.path or model.weights", f"assets.{kind}s.{name}.path")
        elif asset.path is not None and not path_exists(Path(asset.path).expanduser()):
            message = f"no file at {asset.path}; set it to an existing file or folder"
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
