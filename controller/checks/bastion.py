"""Bastion: the VM has access to everything that it needs to finish the run."""

import os
from collections.abc import Iterator

from conf.schema.config import Config
from controller.context import Context
from controller.core.finding import Issue, check
from controller.gcp.errors import ForbiddenError, NotFoundError, ServiceDisabledError
from controller.inputs.secrets import MANAGER


@check("bastion_secrets", "error", "env.secrets.NAME", "notify.webhook")
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


@check("bastion_fetch", "error", "assets.fetch_on", "assets.KIND.NAME.fetch_on")
def bastion_has_assets(config: Config) -> Iterator[Issue]:
    """A bastion can use only assets that are already in the bucket."""
    if config.recovery.driver != "bastion":
        return
    message = "pod does not work with recovery.driver=bastion; use laptop or vm, which fetch before the handover"
    if config.assets.fetch_on == "pod":
        yield Issue(message)
    for kind, name, asset in config.assets.iter_assets():
        if asset.fetch_on == "pod":
            yield Issue(message, f"assets.{kind}s.{name}.fetch_on")


@check("bastion_adopt", "error", "recovery.driver")
def bastion_has_a_network(config: Config) -> Iterator[Issue]:
    """The bastion needs the network that slipway creates. For an adopted pod, slipway creates no network."""
    if config.recovery.driver == "bastion" and config.tpu.adopt:
        yield Issue("bastion needs the planned network, which tpu.adopt=true leaves out; use laptop")


@check("bastion_machine", "error", "cloud.driver_machine", live=True)
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


@check("bastion_way", "warning", "ssh.method")
def bastion_uses_internal_ssh(config: Config) -> Iterator[Issue]:
    """Inside the VPC, the bastion reaches workers at their internal addresses."""
    if config.recovery.driver == "bastion" and config.ssh.method == "external":
        yield Issue("external suits this machine, not the bastion; use auto, which picks internal addresses there")
