"""Devices of a TPU topology as the TPU compiler describes them, without the hardware."""

import importlib.util
import os
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from conf.schema.infra.topology import Topology, find_topology
from conf.schema.training.run_yaml import RunFile
from trainer.distributed import mesh as meshes


class CompilerError(RuntimeError):
    """The compiler is missing, does not know the slice, or rejects a program for a reason other than its size."""


def slice_mesh(experiment: RunFile) -> Mesh:
    """Return the run's mesh over abstract devices of its slice.

    Raises CompilerError, or RunFileError if the mesh does not match the slice's devices.
    """
    require_compiler()
    slice_ = find_topology(experiment.pod.accelerator_type)
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is held, so two may compile at once
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": slice_.accelerator_type,
    }
    sizes = meshes.axis_sizes(experiment.mesh, slice_.devices)
    devices = np.array(_slice_devices(slice_)).reshape(tuple(sizes.values()))
    return Mesh(devices, meshes.MESH_AXES, axis_types=(AxisType.Auto,) * len(meshes.MESH_AXES))


def require_compiler() -> None:
    """Raise CompilerError if libtpu is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise CompilerError(
            "the TPU compiler is not installed: run `python -m pip install libtpu` (Linux on x86_64 only, 590 MB)"
        )


def _slice_devices(slice_: Topology) -> list[Any]:
    """Return the devices of a slice; v4's two cores are one device, as on hardware."""
    from jax.experimental import topologies

    options: dict[str, Any] = {"chip_config_name": "megacore"} if slice_.generation == "v4" else {}
    if slice_.chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    shape = slice_.shape or {4: "2x2"}.get(slice_.chips, "1x1")
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=f"{slice_.generation}:{shape}", **options)
    except Exception as error:  # libtpu raises arbitrary exceptions
        raise CompilerError(f"the TPU compiler does not support {slice_.accelerator_type}: {error}") from None
    if len(found.devices) != slice_.devices:
        raise CompilerError(
            f"the TPU compiler reports {len(found.devices)} devices for {slice_.accelerator_type}, JAX {slice_.devices}"
        )
    return found.devices
