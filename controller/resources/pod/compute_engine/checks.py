"""What Compute Engine can tell of a config before anything is made."""

from collections.abc import Iterator

from conf.schema.config import Config
from conf.schema.infra.topology import Topology, tpu_type_table
from controller.context import Context
from controller.core.finding import Issue
from controller.gcp.errors import ForbiddenError, NotFoundError
from controller.resources.pod.compute_engine import quota
from controller.resources.pod.compute_engine.requests import API
from controller.resources.pod.compute_engine.spec import MAX_RUN_MARGIN_SECONDS, max_run_seconds
from controller.resources.pod.messages import no_listing, zone_key

FLEX_SECONDS = 7 * 24 * 3600
"""Longest life of a flex-start pod: https://cloud.google.com/compute/docs/instances/about-flex-start-vms."""


class ComputeEngineChecks:
    """Implements `PlaneChecks`."""

    def offers(self, topology: Topology) -> bool:
        return bool(topology.image_family and topology.machine_type)

    def obstacles(self, config: Config) -> Iterator[Issue]:
        topology, tpu, generations = config.topology, config.tpu, tpu_type_table()["generations"]
        if not topology.image_family:
            others = ", ".join(name for name, facts in generations.items() if "image_family" in facts)
            message = f"Compute Engine has no {topology.generation}; set it to auto or tpu_api, or choose {others}"
            yield Issue(message, "tpu.plane")
        elif not topology.machine_type:
            machines = ", ".join(generations[topology.generation]["machine_types"].values())
            message = f"Compute Engine has no VM type for {tpu.accelerator_type}; it has {machines}"
            yield Issue(message, "tpu.accelerator_type")
        if tpu.provisioner != "auto":
            message = f"{tpu.provisioner} is a way of the TPU API; set it to auto, or tpu.plane to tpu_api"
            yield Issue(message, "tpu.provisioner")

    def tier_obstacles(self, config: Config, tier: str) -> Iterator[Issue]:
        if tier == "preemptible":
            yield Issue("Compute Engine has no preemptible TPUs; choose spot", "tpu.capacity")
        if tier == "reserved" and config.tpu.reservation is None:
            yield Issue("tpu.capacity=reserved needs the name of the reservation", "tpu.reservation")
        if tier != "flex_start":
            return
        seconds = max_run_seconds(config)
        if not seconds:
            message = "flex_start needs a duration: set it to at most 168, or set budget.max_hours"
            yield Issue(message, "tpu.max_run_hours")
        elif seconds > FLEX_SECONDS + MAX_RUN_MARGIN_SECONDS:
            message = f"Google ends a flex_start pod after 168 hours, and this is {seconds / 3600:.0f}; set it to at"
            yield Issue(f"{message} most 168", "tpu.max_run_hours")

    def image(self, config: Config) -> Iterator[Issue]:
        """Google does not refuse an image of the TPU API by its name, but does not find it."""
        wanted, documented = config.tpu.runtime_version, config.topology.image_family
        if wanted in (None, documented):
            return
        generation, generations = config.topology.generation, tpu_type_table()["generations"]
        if any(wanted == facts["runtime_version"] for facts in generations.values()):
            message = f"{wanted} is an image of the TPU API; on Compute Engine use {documented}, or null"
            yield Issue(message, "tpu.runtime_version", "error")
        elif config.tpu.plane == "auto" and "/" not in wanted:
            message = f"{wanted} is not known as an image of Compute Engine; set tpu.plane, or use null"
            yield Issue(message, "tpu.runtime_version", "error")
        elif made_for := [name for name, facts in generations.items() if wanted == facts.get("image_family")]:
            message = f"{wanted} is an image for {', '.join(made_for)}, not for {generation}; use {documented}, or null"
            yield Issue(message, "tpu.runtime_version", "error")
        else:
            yield Issue(f"{wanted} is not the documented image for {generation}; use {documented}, or null")

    def offered_types(self, config: Config, context: Context) -> Iterator[Issue]:
        wanted = config.topology.machine_type
        for zone in config.tpu.all_zones:
            try:
                context.google.call(API, "machineTypes.get", project=context.project, zone=zone, machineType=wanted)
            except NotFoundError:
                message = f"Compute Engine offers no {wanted} in {zone}; choose another zone, or set tpu.plane"
                yield Issue(message, zone_key(config, zone))

    def offered_images(self, config: Config, context: Context) -> Iterator[Issue]:
        """Yield nothing: Google rejects a mistyped image at once."""
        return iter(())

    def listing(self, config: Config, context: Context) -> Iterator[Issue]:
        zone = config.tpu.zone
        try:
            context.google.call(API, "instances.list", project=context.project, zone=zone, maxResults=1)
        except ForbiddenError as error:
            yield no_listing(zone, "roles/compute.instanceAdmin.v1", error)

    def quota(self, config: Config, context: Context, chips: int | None = None) -> Iterator[Issue]:
        yield from quota.check_quota(config, context, chips)
