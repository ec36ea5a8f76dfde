"""Plan the pod: the TPU slice itself."""

from itertools import product

from conf.schema.config import Config
from conf.schema.infra.topology import zone_region
from controller.resources.pod.node import Node
from controller.resources.pod.provisioner import Place, SliceSpec


def node_resource(config: Config, needs: tuple[str, ...]) -> Node:
    """Return the pod of a config; `needs` are the ids of the resources that must exist first."""
    tpu = config.tpu
    places = tuple(
        Place(zone, tier, config.network.subnet_name(zone_region(zone)), "queued" if tpu.is_queued(tier) else "node")
        for zone, tier in product(tpu.all_zones, tpu.capacity)
    )
    return Node(
        name=config.pod_name,
        spec=SliceSpec.of(config),
        places=places,
        max_create_attempts=config.recovery.max_create_attempts,
        create_seconds=60 * tpu.create_timeout_minutes,
        adopt=tpu.adopt,
        needs=needs,
    )
