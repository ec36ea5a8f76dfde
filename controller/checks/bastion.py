"""Bastion: another machine can finish the run with what it can reach."""

import os
from collections.abc import Iterator

from conf.schema.config import Config
from controller.core.finding import Issue, check
from controller.inputs.secrets import MANAGER


@check("bastion_secrets", "error", "env.secrets.NAME")
def bastion_has_secrets(config: Config) -> Iterator[Issue]:
    """Secrets of this machine are sent to the workers only; a bastion reads its own from Secret Manager."""
    if config.recovery.driver != "bastion":
        return
    for name, source in config.env.secrets.items():
        if source and not source.startswith(MANAGER) and (source != "env" or os.environ.get(name)):
            message = (
                f"the bastion of recovery.driver=bastion cannot have {source} of this machine; use null, or "
                f"{MANAGER}projects/P/secrets/NAME with roles/secretmanager.secretAccessor in cloud.driver_roles"
            )
            yield Issue(message, f"env.secrets.{name}")


@check("bastion_fetch", "error", "assets.fetch_on")
def bastion_has_assets(config: Config) -> Iterator[Issue]:
    """This machine's plan asks the pod to fetch; a bastion has only what is in the bucket."""
    if config.recovery.driver == "bastion" and config.assets.fetch_on == "pod":
        yield Issue("pod does not go with recovery.driver=bastion; laptop copies to the bucket before it hands over")


@check("bastion_adopt", "error", "recovery.driver")
def bastion_has_a_network(config: Config) -> Iterator[Issue]:
    """The bastion is in the network that slipway makes; for an adopted pod, in any network, none is made."""
    if config.recovery.driver == "bastion" and config.tpu.adopt:
        yield Issue("bastion makes its VM in the network of the plan, which tpu.adopt=true leaves out; use laptop")


@check("bastion_way", "warning", "ssh.method")
def bastion_uses_internal_ssh(config: Config) -> Iterator[Issue]:
    """From inside the VPC, workers are reached by their internal addresses."""
    if config.recovery.driver == "bastion" and config.ssh.method == "external":
        yield Issue("external was meant for this machine; the bastion goes by internal addresses with ssh.method=auto")
