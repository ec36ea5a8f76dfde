"""The pod: the slice itself."""

from __future__ import annotations

from conf.schema import Config
from controller.resources.node import Node


def node_resource(config: Config, needs: tuple[str, ...]) -> Node:
    return Node(
        name=config.pod_name,
        zone=config.tpu.zone,
        workers=config.topology.workers,
        service_account=config.cloud.service_account,
        max_create_attempts=config.recovery.max_create_attempts,
        create_seconds=60 * config.tpu.create_minutes,
        accelerator_type=config.tpu.accelerator_type,
        runtime_version=config.tpu.runtime_version or config.topology.runtime_version,
        capacity=config.tpu.capacity,
        network=config.network.name,
        subnetwork=config.network.subnet_in(config.region),
        external_ip=config.tpu.external_ip,
        needs=needs,
    )
