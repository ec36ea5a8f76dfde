"""What only Compute Engine needs to know of a slice."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.schema.config import Config
from controller.resources.pod.provisioner import SliceSpec

MAX_RUN_MARGIN_SECONDS = 600.0
"""By how much Google's own limit on a pod's life exceeds the budget, so that the controller ends the run first."""


@dataclass(frozen=True)
class VmSpec:
    """The VMs of a slice; see `SliceSpec.own`.

    Attributes:
        machine_type: their type.
        shape: the slice's topology, `2x4`.
        max_run_seconds: after how long Google itself deletes them; None: never.
    """

    machine_type: str = ""
    shape: str = ""
    boot_disk_gb: int = 0
    max_run_seconds: float | None = None

    @property
    def compared(self) -> Mapping[str, Any]:
        return {"machine_type": self.machine_type} if self.machine_type else {}


def slice_spec(config: Config) -> SliceSpec:
    """Return the slice that a config asks of Compute Engine."""
    topology = config.topology
    own = VmSpec(topology.machine_type, topology.shape or "", config.tpu.boot_disk_gb, max_run_seconds(config))
    return SliceSpec.of(config, topology.image_family, own)


def vm_spec(spec: SliceSpec) -> VmSpec:
    """Return the part of a spec that `slice_spec` made."""
    assert isinstance(spec.own, VmSpec)
    return spec.own


def max_run_seconds(config: Config) -> float | None:
    """Return after how long Google itself shall delete a pod of Compute Engine; None: never.

    Without tpu.max_run_hours it follows from the budget of the run. A pod of a sweep serves many runs, so there it
    does not.
    """
    tpu, budget, sweep = config.tpu, config.budget, config.sweep
    if tpu.max_run_hours is not None:
        return 3600 * tpu.max_run_hours
    if sweep.params or sweep.cases or sweep.search is not None:
        return None
    spot = tpu.capacity[0] in ("spot", "preemptible")
    price = (
        budget.usd_per_hour if budget.usd_per_hour is not None else config.topology.usd_per_hour(tpu.zone, spot=spot)
    )
    hours = [budget.max_hours] if budget.max_hours is not None else []
    if budget.max_usd is not None and price:
        hours.append(budget.max_usd / price)
    return 3600 * min(hours) + MAX_RUN_MARGIN_SECONDS if hours else None
