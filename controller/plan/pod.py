"""The pod: the slice itself."""

from __future__ import annotations

from itertools import product

from conf.schema.config import Config
from conf.schema.infra.topology import region
from controller.resources.pod.data_disk import disk_type
from controller.resources.pod.node import Node, Place


def node_resource(config: Config, needs: tuple[str, ...]) -> Node:
    tpu = config.tpu
    places = tuple(
        Place(zone, tier, config.network.subnet_in(region(zone)), queued=tpu.is_queued(tier))
        for zone, tier in product(tpu.all_zones, tpu.capacity)
    )
    return Node(
        name=config.pod_name,
        zone=config.tpu.zone,
        workers=config.topology.workers,
        service_account=config.cloud.service_account,
        max_create_attempts=config.recovery.max_create_attempts,
        create_seconds=60 * config.tpu.create_timeout_minutes,
        accelerator_type=config.tpu.accelerator_type,
        runtime_version=config.tpu.runtime_version or config.topology.runtime_version,
        capacity=places[0].capacity,
        network=config.network.name,
        subnetwork=places[0].subnetwork,
        external_ip=config.tpu.external_ip,
        places=places,
        valid_until_seconds=None if tpu.valid_until_hours is None else 3600 * tpu.valid_until_hours,
        reservation=tpu.reservation,
        data_disk_gb=tpu.data_disk_gb,
        data_disk_kind=disk_type(config.topology.generation),
        adopt=tpu.adopt,
        needs=needs,
    )
