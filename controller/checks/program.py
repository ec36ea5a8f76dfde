"""Is there a whole program, and do its parts fit the slice?"""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema.config import Config
from controller.core.finding import Finding


def trainer_is_complete(config: Config) -> Iterator[Finding]:
    """The bundled trainer has no defaults for what it trains."""
    if config.program.kind != "trainer":
        return
    for group in ("model", "data", "loop", "optimizer"):
        if getattr(config, group) is None:
            yield Finding("complete", "error", group, f"program=trainer needs one; choose {group}=… or +experiment=…")


def command_is_given(config: Config) -> Iterator[Finding]:
    """Without a command there is nothing to launch."""
    if config.program.kind == "command" and not config.program.command:
        yield Finding("command", "error", "program.command", "is empty; e.g. 'program.command=[python, train.py]'")


def mesh_covers_devices(config: Config) -> Iterator[Finding]:
    """JAX refuses a mesh whose product is not the number of devices, after the pod has been paid for."""
    if config.program.kind != "trainer":
        return
    devices = config.topology.devices
    axes = {"data": config.mesh.data, "fsdp": config.mesh.fsdp, "tensor": config.mesh.tensor}
    product = 1
    for size in axes.values():
        product *= size if size > 0 else 1
    words = " x ".join(str(size) for size in axes.values())
    free = -1 in axes.values()
    if (free and devices % product) or (not free and product != devices):
        fitting = f"choose sizes whose product {'divides' if free else 'is'} {devices}, or mesh.data=-1"
        yield Finding(
            "mesh",
            "error",
            "mesh",
            f"{words} does not make the {devices} devices of {config.tpu.accelerator_type}; {fitting}",
        )


def stand_in_is_local(config: Config) -> Iterator[Finding]:
    """A stand-in only plays the program's part; on a real pod it would do nothing and be paid for."""
    if config.code.stand_in and config.cloud.kind != "local":
        words = (
            "stand-ins are for the emulated cloud (`slipway rehearse`, cloud=local); scale=full runs the program itself"
        )
        yield Finding("stand_in", "error", "code.stand_in", words)


CHECKS = (
    stand_in_is_local,
    trainer_is_complete,
    command_is_given,
    mesh_covers_devices,
)
