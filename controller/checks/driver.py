"""Can another machine see the run through, with what it can have there?"""

from __future__ import annotations

import os
from collections.abc import Iterator

from conf.schema.config import Config
from controller.core.finding import Finding
from controller.inputs.secrets import MANAGER


def bastion_has_secrets(config: Config) -> Iterator[Finding]:
    """Secrets of this machine are sent nowhere but to the workers; a bastion reads its own from Secret Manager."""
    if config.recovery.driver != "bastion":
        return
    for name, source in config.env.secrets.items():
        if source and not source.startswith(MANAGER) and (source != "env" or os.environ.get(name)):
            words = (
                f"the bastion of recovery.driver=bastion cannot have {source} of this machine; use null, or "
                f"{MANAGER}projects/P/secrets/NAME with roles/secretmanager.secretAccessor in cloud.driver_roles"
            )
            yield Finding("bastion_secrets", "error", f"env.secrets.{name}", words)


def bastion_has_assets(config: Config) -> Iterator[Finding]:
    """What the pod is to fetch is asked for by this machine's plan; a bastion has but what is in the bucket."""
    if config.recovery.driver == "bastion" and config.assets.fetch_on == "pod":
        words = "pod does not go with recovery.driver=bastion; laptop copies to the bucket before it hands over"
        yield Finding("bastion_fetch", "error", "assets.fetch_on", words)


def bastion_has_a_network(config: Config) -> Iterator[Finding]:
    """An adopted pod may be in any network; the bastion is in the one that slipway makes, which is not made then."""
    if config.recovery.driver == "bastion" and config.tpu.adopt:
        words = "bastion makes its VM in the network of the plan, which tpu.adopt=true leaves out; use laptop"
        yield Finding("bastion_adopt", "error", "recovery.driver", words)


def bastion_is_reached_by_no_one(config: Config) -> Iterator[Finding]:
    """From inside the VPC the way to the workers is not the one from here."""
    if config.recovery.driver == "bastion" and config.ssh.method == "external":
        words = "external was meant for this machine; the bastion goes by internal addresses with ssh.method=auto"
        yield Finding("bastion_way", "warning", "ssh.method", words)


CHECKS = (
    bastion_has_secrets,
    bastion_has_assets,
    bastion_has_a_network,
    bastion_is_reached_by_no_one,
)
