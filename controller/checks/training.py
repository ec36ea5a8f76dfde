"""Does what the bundled trainer is told fit the mesh, and will it learn?"""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema.config import Config
from conf.schema.training.data import JsonlData, ParquetData, TextData
from conf.schema.training.loop import GrpoLoop, LmLoop, UnevenError
from conf.schema.training.schedule import DecaySchedule, PiecewiseSchedule, WarmupStableDecaySchedule
from controller.core.finding import Finding

STREAMED = TextData | JsonlData | ParquetData


def weights_split_evenly(config: Config) -> Iterator[Finding]:
    """A weight is split evenly over a mesh axis or not at all; the trainer refuses what is left over."""
    if config.program.kind != "trainer" or config.model is None:
        return
    sizes = axes(config)
    if sizes is None:
        return
    for axis, names in (("tensor", ("num_heads", "num_kv_heads", "mlp_dim", "vocab_size")), ("fsdp", ("dim",))):
        for name in names:
            value = getattr(config.model, name)
            if value % sizes[axis]:
                words = (
                    f"{value} cannot be split evenly over mesh.{axis}={sizes[axis]}; make one a multiple of the other"
                )
                yield Finding("weights_split", "error", f"model.{name}", words)


def batch_splits_evenly(config: Config) -> Iterator[Finding]:
    """Every device takes the same number of rows of each batch."""
    sizes = axes(config) if config.program.kind == "trainer" else None
    if sizes is None:
        return
    parts = sizes["data"] * sizes["fsdp"]
    if config.loop is not None:
        try:
            config.loop.accumulation(parts)
        except UnevenError as error:
            yield Finding("batch_split", "error", error.key, error.words)


def streams_share_rows(config: Config) -> Iterator[Finding]:
    """Each logical stream of the data gives the same number of rows of each batch, on any number of workers."""
    data, loop = config.data, config.loop
    if config.program.kind != "trainer" or not isinstance(loop, LmLoop) or not isinstance(data, STREAMED):
        return
    if data.packing != "windows" and loop.rows % data.streams:
        words = f"{data.streams} streams cannot share the {loop.rows} rows of a batch evenly"
        yield Finding("streams", "error", "data.streams", f"{words}; take a divisor of {loop.rows}")


def data_are_reachable(config: Config) -> Iterator[Finding]:
    """The program reads its data on the workers, where this machine's files are only if they are sent as an asset."""
    if config.program.kind != "trainer" or config.data is None:
        return
    for name in ("path", "eval_path", "tokenizer"):
        value = getattr(config.data, name, None)
        if value and value not in ("bytes", "characters") and "://" not in value and not value.startswith("/"):
            words = (
                f"{value} is no path of the workers; make it an asset: assets.datasets.mine.path={value} "
                f"data.{name}=assets://mine/{value.rpartition('/')[2]}"
            )
            yield Finding("data_path", "warning", f"data.{name}", words)


def schedule_ends_late(config: Config) -> Iterator[Finding]:
    """A learning rate that falls to nothing over exactly the run, or before its end, stops what RL has just begun."""
    if config.optimizer is None or config.loop is None:
        return
    schedule, total = config.optimizer.schedule, updates(config)
    end = schedule.zero_after
    if end is not None and end < total:
        words = f"the learning rate is 0 after {end} updates, and there are {total}"
        key = "points" if isinstance(schedule, PiecewiseSchedule) else "horizon_steps"
        yield Finding("schedule", "warning", f"optimizer.schedule.{key}", words)
    elif (
        isinstance(config.loop, GrpoLoop)
        and isinstance(schedule, DecaySchedule | WarmupStableDecaySchedule)
        and schedule.horizon_steps == total
        and schedule.final_fraction < 0.05
    ):
        words = (
            f"the learning rate falls to {schedule.final_fraction:.0%} over exactly the {total} updates of the run; RL "
            "wants it nearly constant: schedule.kind=constant, or a horizon far behind the end"
        )
        yield Finding("schedule", "warning", "optimizer.schedule.horizon_steps", words)


def checkpoints_come(config: Config) -> Iterator[Finding]:
    """A pod that is taken away before the first checkpoint begins anew; Spot pods are taken away."""
    if config.program.kind != "trainer" or config.loop is None or config.tpu.capacity == ("on_demand",):
        return
    total = updates(config)
    if config.checkpoint.save_interval > max(1, total // 2):
        words = (
            f"no checkpoint before update {config.checkpoint.save_interval} of {total}: a pod taken away begins anew"
        )
        yield Finding("checkpoints", "warning", "checkpoint.save_interval", words)


def policy_knows_something(config: Config) -> Iterator[Finding]:
    """GRPO reinforces what the policy does right now and then; one with random weights does nothing right."""
    if config.program.kind != "trainer" or not isinstance(config.loop, GrpoLoop) or config.model is None:
        return
    if config.cloud.kind == "local":
        return  # where nothing is billed, the road may be all that is tested
    if config.loop.warm_start_steps == 0 and config.model.weights is None:
        words = (
            "the policy starts from random weights, which no reward can teach; name a folder of Hugging Face's, or one "
            "of `python -m trainer.convert`, or set loop.warm_start_steps"
        )
        yield Finding("random_weights", "warning", "model.weights", words)


def axes(config: Config) -> dict[str, int] | None:
    """Sizes of the mesh axes on the slice, -1 filled in; None where they do not make its devices."""
    sizes = {"data": config.mesh.data, "fsdp": config.mesh.fsdp, "tensor": config.mesh.tensor}
    product = 1
    for size in sizes.values():
        product *= size if size > 0 else 1
    left, rest = divmod(config.topology.devices, product)
    if rest or (-1 not in sizes.values() and left != 1):
        return None
    return {name: size if size > 0 else left for name, size in sizes.items()}


def updates(config: Config) -> int:
    """Optimizer updates of the whole run, without a warm start."""
    return config.loop.steps if config.loop else 0


CHECKS = (
    weights_split_evenly,
    batch_splits_evenly,
    streams_share_rows,
    data_are_reachable,
    schedule_ends_late,
    checkpoints_come,
    policy_knows_something,
)
