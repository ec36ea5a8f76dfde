"""Program: it is complete, its code can be shipped, and it fits the slice."""

from collections.abc import Iterator

from conf.schema.config import Config
from controller.agent.commands.code import MAX_BYTES
from controller.core.finding import Issue, check
from controller.inputs.git import strip_password


@check("stand_in", "error", "code.stand_in")
def stand_in_runs_locally(config: Config) -> Iterator[Issue]:
    """A stand-in only plays the program's part; on a real pod it would do nothing and be billed."""
    if config.code.stand_in and config.cloud.kind != "local":
        yield Issue(
            "stand-ins are for the emulated cloud (`slipway rehearse`, cloud=local); scale=full runs the program itself"
        )


@check("complete", "error", "model", "data", "loop", "optimizer")
def trainer_is_complete(config: Config) -> Iterator[Issue]:
    """The bundled trainer has no defaults for what it trains."""
    if config.program.kind != "trainer":
        return
    for group in ("model", "data", "loop", "optimizer"):
        if getattr(config, group) is None:
            yield Issue(f"program=trainer needs one; choose {group}=… or +experiment=…", group)


@check("command", "error", "program.command")
def command_is_given(config: Config) -> Iterator[Issue]:
    """Without a command there is nothing to launch."""
    if config.program.kind == "command" and not config.program.command:
        yield Issue("is empty; e.g. 'program.command=[python, train.py]'")


@check("mesh", "error", "mesh")
def mesh_covers_devices(config: Config) -> Iterator[Issue]:
    """JAX refuses a mesh whose product is not the number of devices, after the pod has been paid for."""
    if config.program.kind != "trainer":
        return
    devices = config.topology.devices
    axes = {"data": config.mesh.data, "fsdp": config.mesh.fsdp, "tensor": config.mesh.tensor}
    product = 1
    for size in axes.values():
        product *= size if size > 0 else 1
    shape = " x ".join(str(size) for size in axes.values())
    free = -1 in axes.values()
    if (free and devices % product) or (not free and product != devices):
        fitting = f"choose sizes whose product {'divides' if free else 'is'} {devices}, or mesh.data=-1"
        yield Issue(f"{shape} does not make the {devices} devices of {config.tpu.accelerator_type}; {fitting}")


@check("repository_unused", "error", "code.repository")
def repository_is_shipped(config: Config) -> Iterator[Issue]:
    """`program=trainer` ships slipway's own trainer, whatever repository is named."""
    if config.code.repository is not None and config.program.kind == "trainer":
        yield Issue("program=trainer ships the bundled trainer; choose program=command, or take the repository out")


@check("repository_password", "error", "code.repository.url")
def repository_has_no_password(config: Config) -> Iterator[Issue]:
    """The config is recorded with the results; git finds passwords by its credential helpers and by SSH."""
    url = config.code.repository.url if config.code.repository else ""
    if strip_password(url) != url:
        yield Issue(
            "holds a password or token, which would be recorded; leave it to git's credential helper, or use SSH"
        )


@check("exclude", "error", "code.exclude")
def exclusions_can_be_read(config: Config) -> Iterator[Issue]:
    """https://git-scm.com/docs/gitignore: an invalid pattern would silently exclude nothing."""
    import pathspec

    for pattern in config.code.exclude:
        try:
            pathspec.GitIgnoreSpec.from_lines([pattern])
        except ValueError:
            yield Issue(f"{pattern!r} is no pattern as in .gitignore")


@check("code_limit", "error", "code.max_mb")
def archive_limit_is_allowed(config: Config) -> Iterator[Issue]:
    """Workers unpack no more than this, so that a mistake does not fill their disks."""
    if config.code.max_mb > MAX_BYTES / 1e6:
        yield Issue(f"workers unpack at most {MAX_BYTES / 1e6:.0f} MB of code; what is larger is an asset")
