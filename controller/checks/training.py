"""Training: the settings of the bundled trainer fit the mesh, and the model can learn."""

from collections.abc import Iterator

from conf.schema.config import Config
from conf.schema.training.data import JsonlData, ParquetData, TextData
from conf.schema.training.loop import GrpoLoop, LmLoop, UnevenError
from conf.schema.training.schedule import DecaySchedule, PiecewiseSchedule, WarmupStableDecaySchedule
from controller.core.finding import Issue, check

STREAMED = TextData | JsonlData | ParquetData


@check("weights_split", "error", "model.NAME")
def weights_split_evenly(config: Config) -> Iterator[Issue]:
    """A weight is split evenly over a mesh axis or not at all; the trainer refuses a remainder."""
    if config.program.kind != "trainer" or config.model is None:
        return
    sizes = mesh_axes(config)
    if sizes is None:
        return
    for axis, names in (("tensor", ("num_heads", "num_kv_heads", "mlp_dim", "vocab_size")), ("fsdp", ("dim",))):
        for name in names:
            value = getattr(config.model, name)
            if value % sizes[axis]:
                message = (
                    f"{value} cannot be split evenly over mesh.{axis}={sizes[axis]}; make one a multiple of the other"
                )
                yield Issue(message, f"model.{name}")


@check("batch_split", "error", "loop.KEY")
def batch_splits_evenly(config: Config) -> Iterator[Issue]:
    """Every device takes the same number of rows of each batch."""
    sizes = mesh_axes(config) if config.program.kind == "trainer" else None
    if sizes is None:
        return
    parts = sizes["data"] * sizes["fsdp"]
    if config.loop is not None:
        try:
            config.loop.accumulation(parts)
        except UnevenError as error:
            yield Issue(error.words, error.key)


@check("streams", "error", "data.streams")
def streams_share_rows(config: Config) -> Iterator[Issue]:
    """Each logical stream of the data gives the same number of rows of each batch, on any number of workers."""
    data, loop = config.data, config.loop
    if config.program.kind != "trainer" or not isinstance(loop, LmLoop) or not isinstance(data, STREAMED):
        return
    if data.packing != "windows" and loop.rows % data.streams:
        message = f"{data.streams} streams cannot share the {loop.rows} rows of a batch evenly"
        yield Issue(f"{message}; take a divisor of {loop.rows}")


@check("data_path", "warning", "data.NAME")
def data_are_reachable(config: Config) -> Iterator[Issue]:
    """The program reads its data on the workers, which get this machine's files only as an asset."""
    if config.program.kind != "trainer" or config.data is None:
        return
    for name in ("path", "eval_path", "tokenizer"):
        value = getattr(config.data, name, None)
        if value and value not in ("bytes", "characters") and "://" not in value and not value.startswith("/"):
            message = (
                f"{value} is no path of the workers; make it an asset: assets.datasets.mine.path={value} "
                f"data.{name}=assets://mine/{value.rpartition('/')[2]}"
            )
            yield Issue(message, f"data.{name}")


@check("schedule", "warning", "optimizer.schedule.horizon_steps", "optimizer.schedule.points")
def schedule_ends_late(config: Config) -> Iterator[Issue]:
    """A learning rate that falls to 0 over exactly the run, or before its end, stops RL as it begins to learn."""
    if config.optimizer is None or config.loop is None:
        return
    schedule, total = config.optimizer.schedule, total_updates(config)
    end = schedule.zero_after
    if end is not None and end < total:
        message = f"the learning rate is 0 after {end} updates, and there are {total}"
        key = "points" if isinstance(schedule, PiecewiseSchedule) else "horizon_steps"
        yield Issue(message, f"optimizer.schedule.{key}")
    elif (
        isinstance(config.loop, GrpoLoop)
        and isinstance(schedule, DecaySchedule | WarmupStableDecaySchedule)
        and schedule.horizon_steps == total
        and schedule.final_fraction < 0.05
    ):
        yield Issue(
            f"the learning rate falls to {schedule.final_fraction:.0%} over exactly the {total} updates of the run; RL "
            "wants it nearly constant: schedule.kind=constant, or a horizon far behind the end"
        )


@check("checkpoints", "warning", "checkpoint.save_interval")
def checkpoints_are_frequent_enough(config: Config) -> Iterator[Issue]:
    """A pod that is taken away before the first checkpoint starts over; Spot pods are taken away."""
    if config.program.kind != "trainer" or config.loop is None or config.tpu.capacity == ("on_demand",):
        return
    total = total_updates(config)
    if config.checkpoint.save_interval > max(1, total // 2):
        first = config.checkpoint.save_interval
        yield Issue(f"no checkpoint before update {first} of {total}: a pod taken away begins anew")


@check("random_weights", "warning", "model.weights")
def policy_is_pretrained(config: Config) -> Iterator[Issue]:
    """GRPO reinforces what the policy sometimes does right; a policy with random weights does nothing right."""
    if config.program.kind != "trainer" or not isinstance(config.loop, GrpoLoop) or config.model is None:
        return
    if config.cloud.kind == "local":
        return  # where nothing is billed, the road may be all that is tested
    if config.loop.warm_start_steps == 0 and config.model.weights is None:
        yield Issue(
            "the policy starts from random weights, which no reward can teach; name a folder of Hugging Face's, or one "
            "of `python -m trainer.convert`, or set loop.warm_start_steps"
        )


def mesh_axes(config: Config) -> dict[str, int] | None:
    """Return the sizes of the mesh axes on the slice, -1 filled in; None if they do not make its devices."""
    sizes = {"data": config.mesh.data, "fsdp": config.mesh.fsdp, "tensor": config.mesh.tensor}
    product = 1
    for size in sizes.values():
        product *= size if size > 0 else 1
    left, rest = divmod(config.topology.devices, product)
    if rest or (-1 not in sizes.values() and left != 1):
        return None
    return {name: size if size > 0 else left for name, size in sizes.items()}


def total_updates(config: Config) -> int:
    """Return the optimizer updates of the whole run, without a warm start."""
    return config.loop.steps if config.loop else 0
