"""Training: the bundled trainer's settings fit the mesh, and the model can learn."""

import math
from collections.abc import Iterator

from conf.schema.config import Config
from conf.schema.topology import find_topology, tpu_type_table
from conf.schema.training.data import (
    CustomDocuments,
    JsonlData,
    ParquetData,
    PuzzleData,
    QuestionData,
    TextData,
)
from conf.schema.training.loop import OFFLINE_LOSSES, CustomLoop, GrpoLoop, LmLoop, PuzzleLoop, UnevenError
from conf.schema.training.loop_parts import Trm
from conf.schema.training.optimizer import DecaySchedule, PiecewiseSchedule, WarmupStableDecaySchedule
from conf.schema.training.refusals import refusals
from conf.schema.training.settings import Mesh
from conf.schema.unread import OF_PODS, OF_TRAINER, unread_keys
from controller.config.run_yaml import backend
from controller.core.finding import Issue, check
from controller.core.text import plural
from controller.plan.samplers import sampler_configs

MAX_NAME = 63
"""Longest name of a Google resource."""
LIBTPU_BOUNDS = {"TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS"}
SETUP_UPDATES = 20
"""Updates of a run that can only test the setup."""
LONG_WARMUP = 0.25
"""Share of a run above which a warm-up is long. The TRM study's baseline warms up over 2,000 of 8,138 updates."""
SPLIT = {
    ("tensor",): (
        *("num_heads", "num_kv_heads", "num_global_kv_heads", "mlp_dim", "vocab_size", "per_layer_dim"),
        *("delta_net.num_key_heads", "delta_net.num_value_heads", "experts.inner_dim", "experts.shared_dim"),
    ),
    ("fsdp", "expert"): ("dim", "per_layer_dim"),
    ("expert",): ("experts.count",),
}
"""Axes of the mesh, and the keys of the model that they split together."""
STREAMED = TextData | JsonlData | ParquetData | CustomDocuments


@check("weights_split", "error", "model.NAME")
def weights_split_evenly(config: Config) -> Iterator[Issue]:
    """Weights must split evenly over a mesh axis."""
    if config.program.kind != "trainer" or config.model is None:
        return
    values = config.model.model_dump()
    for part in ("experts", "delta_net"):
        values |= {f"{part}.{name}": value for name, value in (values.get(part) or {}).items()}
    for key, mesh in meshes(config):
        sizes = mesh_axes(config, mesh) or {}
        for axes, names in SPLIT.items():
            parts = math.prod(sizes.get(axis, 1) for axis in axes)
            over = " x ".join(f"{key}.{axis}={sizes[axis]}" for axis in axes if sizes.get(axis, 1) > 1)
            for name in names:
                value = values.get(name) or 0  # a kind of model without the key has nothing to split
                if value % parts:
                    yield Issue(f"{value} does not split evenly over {over}; change one of them", f"model.{name}")


@check("model_kind", "error", "model.kind", "data.kind")
def model_and_data_suit_the_loop(config: Config) -> Iterator[Issue]:
    """The puzzle loop trains a recursive model on puzzles, lm a decoder on text, grpo a decoder on questions."""
    if config.program.kind != "trainer" or isinstance(config.loop, CustomLoop | None):
        return
    kind, is_puzzle = config.loop.kind, isinstance(config.loop, PuzzleLoop)
    if config.model is not None and isinstance(config.model, Trm) != is_puzzle:
        message = f"loop.kind={kind} cannot train a {config.model.kind}; use loop=puzzle with model=trm"
        yield Issue(message, "model.kind")
    if config.data is not None and isinstance(config.data, PuzzleData) != is_puzzle:
        message = f"loop.kind={kind} cannot read data.kind={config.data.kind}; puzzles need loop=puzzle"
        yield Issue(message, "data.kind")
    elif isinstance(config.loop, GrpoLoop | LmLoop) and config.data is not None:
        asks = isinstance(config.loop, GrpoLoop)
        if isinstance(config.data, QuestionData) != asks:
            choices = "questions: arithmetic, gsm8k or questions" if asks else "text: text, jsonl, parquet or documents"
            yield Issue(f"loop.kind={kind} cannot read data.kind={config.data.kind}; it needs {choices}", "data.kind")


@check("attention_form", "error", "model.attention_form")
def attention_form_suits_the_loop(config: Config) -> Iterator[Issue]:
    """Attention at several scales cannot generate, and its scales do not separate documents in a row."""
    if config.program.kind != "trainer" or getattr(config.model, "attention_form", "causal") == "causal":
        return
    if isinstance(config.loop, GrpoLoop):
        yield Issue("maha cannot generate, which loop=grpo needs; use loop=lm or model.attention_form=causal")
    elif getattr(getattr(config.loop, "text_samples", None), "interval", None) is not None:
        yield Issue("maha cannot generate; set loop.text_samples.interval=null")
    if getattr(config.data, "packing", None) == "documents":
        yield Issue("maha needs one document per row; set data.packing=stream")


@check("refused", "error", "KEY")
def trainer_refuses_nothing(config: Config) -> Iterator[Issue]:
    """The trainer refuses it too, on a billed pod."""
    if config.program.kind == "trainer":
        yield from (Issue(why, key) for key, why in refusals(config, config.run.seed, backend(config)))


@check("unread", "warning", "KEY", also="note")
def what_is_set_is_read(config: Config) -> Iterator[Issue]:
    """Something else turns it off.

    A note tells what `cloud=here` or a program of one's own leaves of an experiment, and what a cloud that several
    share says of a bastion.
    """
    others = OF_PODS if config.cloud.kind == "here" else ("cloud.driver_",)
    for key, why in unread_keys(config):
        severity = "note" if key.startswith(others) or key in OF_TRAINER else None
        yield Issue(f"has no effect: {why}", key, severity)
    for i, group in enumerate(config.optimizer.param_groups if config.optimizer else ()):
        if group.lr is not None and group.lr_scale:
            key, rate = f"optimizer.param_groups.{i}.lr_scale", group.lr * group.lr_scale
            yield Issue(f"also multiplies the group's lr, to {rate:g}; set one of them", key)


@check("batch_split", "error", "loop.KEY")
def batch_splits_evenly(config: Config) -> Iterator[Issue]:
    """Every device must get the same number of rows of each batch."""
    sizes = mesh_axes(config) if config.program.kind == "trainer" else None
    if sizes is None:
        return
    parts = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    if config.loop is not None:
        try:
            config.loop.accumulation(parts)
        except UnevenError as error:
            yield Issue(error.message, error.key)


@check("streams", "error", "data.streams")
def streams_share_rows(config: Config) -> Iterator[Issue]:
    """Each data stream must supply equally many rows of a batch."""
    data, loop = config.data, config.loop
    if config.program.kind != "trainer" or not isinstance(loop, LmLoop) or not isinstance(data, STREAMED):
        return
    if data.packing != "windows" and loop.rows % data.streams:
        message = f"{data.streams} streams do not divide the {loop.rows} rows of a batch evenly"
        yield Issue(f"{message}; use a divisor of {loop.rows}")


@check("schedule", "warning", "optimizer.schedule.horizon_steps", "optimizer.schedule.points", also="note")
def schedule_ends_late(config: Config) -> Iterator[Issue]:
    """A learning rate that reaches 0 by the end of the run or earlier stops RL just as it starts to learn."""
    if config.optimizer is None or config.loop is None:
        return
    schedule, total = config.optimizer.schedule, total_updates(config)
    end = schedule.zero_after
    if end is not None and end < total:
        message = f"the learning rate is 0 after {end} of {total} updates"
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
            "needs it nearly constant: use schedule.kind=constant, or a horizon far beyond the end"
        )
    elif isinstance(schedule, DecaySchedule | WarmupStableDecaySchedule) and schedule.horizon_steps < total:
        end, rate = schedule.horizon_steps, f"{schedule.final_fraction:.0%}"
        yield Issue(f"the learning rate stays at {rate} of its peak after {end} of {total} updates", severity="note")


@check("warmup", "error", "optimizer.schedule.warmup_steps", "optimizer.schedule.points", also="warning")
def warmup_leaves_updates(config: Config) -> Iterator[Issue]:
    """A run that warms up for most of its updates hardly sees its learning rate. Nothing is said of a run of a few
    updates.
    """
    if config.optimizer is None or config.loop is None:
        return
    schedule, total = config.optimizer.schedule, total_updates(config)
    key = f"optimizer.schedule.{'points' if isinstance(schedule, PiecewiseSchedule) else 'warmup_steps'}"
    end = schedule.peak_after
    if total <= SETUP_UPDATES or end <= total * LONG_WARMUP:
        return
    advice = f"use {total // 10} or fewer, or a longer run"
    if end < total:
        message = f"the warm-up takes {end} of the run's {total} updates ({end / total:.0%})"
        yield Issue(f"{message}; {advice}", key, "warning")
    else:
        message = f"the learning rate still rises when the run ends: its warm-up takes {end} updates of {total}"
        yield Issue(f"{message}; {advice}", key, "error" if config.cloud.kind == "gcp" else "warning")


@check("checkpoints", "warning", "checkpoint.save_interval", of_pods=True)
def checkpoints_are_frequent_enough(config: Config) -> Iterator[Issue]:
    """A pod preempted before the first checkpoint starts over."""
    if config.program.kind != "trainer" or config.loop is None or config.tpu.capacity == ("on_demand",):
        return
    total = total_updates(config)
    if config.checkpoint.save_interval > max(1, total // 2):
        first = config.checkpoint.save_interval
        yield Issue(f"no checkpoint before update {first} of {total}, so an earlier preemption loses all progress")


@check("log_interval", "warning", "logging.log_interval")
def metrics_are_logged(config: Config) -> Iterator[Issue]:
    """A shorter run logs its last update only."""
    if config.program.kind != "trainer" or config.loop is None:
        return
    total, interval = total_updates(config), config.logging.log_interval
    if interval > total > SETUP_UPDATES:
        yield Issue(f"the run has {total} updates, so only the last one is logged; lower it to see a curve")


USUAL = {
    "optimizer.lr": (0.99, "1e-6 to 0.1; is a minus missing, as in 3e-4?"),
    "optimizer.weight_decay": (1, "0 to 1"),
    "loop.temperature": (2, "0.5 to 1.5"),
    "loop.kl_coef": (1, "0 to 0.1"),
}
"""By key, the highest value that may be meant, and what is usual."""


@check("unusual", "warning", *USUAL)
def values_are_usual(config: Config) -> Iterator[Issue]:
    """A lost minus makes 3e4 of 3e-4."""
    optimizer = config.optimizer
    for key, (most, usual) in USUAL.items() if config.program.kind == "trainer" else ():
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name, None)
        if value is None or (section == "optimizer" and optimizer and optimizer.kind == "custom"):  # Prodigy's lr is 1
            continue
        if name == "lr" and optimizer and optimizer.schedule.kind == "piecewise":
            value *= max(share for _, share in optimizer.schedule.points)
        if value > most:
            yield Issue(f"{value:g} is very high; usual are {usual}", key)


@check("random_weights", "warning", "model.weights")
def policy_is_pretrained(config: Config) -> Iterator[Issue]:
    """GRPO reinforces correct answers, and a policy with random weights gives none."""
    if config.program.kind != "trainer" or not isinstance(config.loop, GrpoLoop) or config.model is None:
        return
    if config.cloud.kind in ("local", "here"):
        return  # nothing is billed, and the run may only test the setup
    if config.loop.warm_start_steps == 0 and config.model.weights is None:
        yield Issue(
            "the policy starts from random weights, from which GRPO cannot learn; set a folder from Hugging Face or "
            "`slipway trainer.convert`, or set loop.warm_start_steps"
        )


@check("no_reward", "warning", "loop.rewards")
def something_is_rewarded(config: Config) -> Iterator[Issue]:
    """Rewards of weight 0 teach nothing."""
    loop = config.loop
    if config.program.kind != "trainer" or not isinstance(loop, GrpoLoop) or loop.environment.name is not None:
        return
    if loop.loss_type not in (*OFFLINE_LOSSES, "distillation") and max(loop.rewards.values()) <= 0:
        none = "all weights are 0" if not any(loop.rewards.values()) else "no weight is above 0"
        yield Issue(f"{none}, so nothing is rewarded; give one another weight")


@check("sampler_workers", "error", "loop.sampler.workers")
def samplers_leave_trainers(config: Config) -> Iterator[Issue]:
    """Workers that only sample are some of the pod's, and on TPU VMs libtpu must be told to use a part of a slice."""
    workers, all_workers = _sampler_workers(config), config.topology.workers
    if workers and workers >= all_workers:
        most = all_workers - 1
        told = f"use at most {most}" if most else "use 0, or a slice with more workers"
        yield Issue(f"{workers} would leave none of the {plural(all_workers, 'worker')} to train; {told}")
    elif workers and config.cloud.kind == "gcp" and not config.env.vars.keys() >= LIBTPU_BOUNDS:
        yield Issue(
            "has run on emulated pods only: libtpu joins all VMs of a slice by itself unless env.vars sets "
            f"{' and '.join(sorted(LIBTPU_BOUNDS))} to the VMs that train together; set them to try it, or use 0"
        )


@check("sampler_pods", "error", "loop.sampler.pods", "loop.sampler.tpu")
def sampler_pods_can_be_rented(config: Config) -> Iterator[Issue]:
    """Samplers on further slices reach the trainer through the subnet of its region, and `up` on this machine drives
    them. Each VM samples by itself, so a slice of several VMs would only be harder to get.
    """
    if config.program.kind != "trainer" or not isinstance(config.loop, GrpoLoop) or not config.loop.sampler.pods:
        return
    if config.cloud.kind == "here":
        yield Issue("cloud=here has no pods to rent; use 0")
        return
    if config.tpu.adopt:
        yield Issue("samplers need the network that Slipway makes, which tpu.adopt=true leaves out; use 0")
    if config.recovery.driver == "bastion":
        yield Issue("a bastion does not drive pods of samplers; use recovery.driver=laptop, or 0")
    if config.tpu.data_disk_gb is not None:
        yield Issue("they have no data disk, so what is on the pod's would be missing there; use 0, or no disk")
    if config.budget.usd_per_hour is not None and config.loop.sampler.tpu not in (None, config.tpu.accelerator_type):
        yield Issue(
            "budget.usd_per_hour would count for each pod of another type, too: use the pod's type (null), or no "
            "budget.usd_per_hour",
            key="loop.sampler.tpu",
        )
    if len(config.regions) > 1:
        yield Issue(
            f"samplers reach the trainer within its region only, and tpu.fallback_zones adds {config.regions[1]}; use "
            "zones of one region, or 0"
        )
    yield from _slice_issues(config)


def _slice_issues(config: Config) -> Iterator[Issue]:
    """Yield what is wrong with the slices themselves."""
    sampler = sampler_configs(config)[-1]
    topology, kind = sampler.topology, sampler.tpu.accelerator_type
    if topology.workers > 1:
        own = [name for name in tpu_type_table()["types"] if find_topology(name).generation == topology.generation]
        single = [name for name in own if find_topology(name).workers == 1]
        yield Issue(
            f"{kind} has {topology.workers} workers, and a pod of samplers has one; set loop.sampler.tpu to a slice of "
            f"one worker{f', such as {single[-1]}' if single else ''}, and loop.sampler.pods to how many",
            "loop.sampler.tpu",
        )
    for zone in config.tpu.all_zones if topology.zones else ():
        if zone not in topology.zones:
            zones = ", ".join(topology.zones)
            yield Issue(f"{zone} has no {topology.generation}; zones that have it: {zones}", "loop.sampler.tpu")
    if len(sampler.pod_name) > MAX_NAME:
        yield Issue(f"the name {sampler.pod_name} is longer than {MAX_NAME} characters; shorten tpu.name")


@check("stale_samples", "warning", "loop.rollout_correction")
def stale_samples_are_corrected(config: Config) -> Iterator[Issue]:
    """Samples of older policies bias the gradient unless the ratio to the sampler is in the loss."""
    loop = config.loop
    if not isinstance(loop, GrpoLoop) or config.program.kind != "trainer" or not loop.sampler.is_remote:
        return
    if loop.old_logprobs == "sampler":
        return
    if loop.rollout_correction.rollout_is is None and loop.rollout_correction.rollout_rs is None:
        yield Issue(
            "nothing corrects for the age of the samples that other workers draw; set rollout_is=token, or "
            "loop.old_logprobs=sampler"
        )


@check("sampler_logprobs", "warning", "loop.sampler")
def truncated_samples_are_scored_by_the_trainer(config: Config) -> Iterator[Issue]:
    """The sampler's log-probabilities are in the distribution that it drew from. With penalties, biases or a truncation
    that is not the policy that learns.
    """
    loop = config.loop
    if not isinstance(loop, GrpoLoop) or config.program.kind != "trainer" or loop.sampler.is_plain:
        return
    corrected = loop.rollout_correction.rollout_is is not None or loop.rollout_correction.rollout_rs is not None
    if loop.old_logprobs == "sampler" or corrected:
        key = "loop.old_logprobs=sampler" if loop.old_logprobs == "sampler" else "loop.rollout_correction"
        yield Issue(
            f"its tokens are not drawn from the policy itself, and {key} takes them as if they were; keep top_k, "
            "top_p, min_p, penalties and logit_bias as they are by default, or set loop.old_logprobs=trainer without a "
            "correction"
        )


def _sampler_workers(config: Config) -> int:
    is_grpo = config.program.kind == "trainer" and isinstance(config.loop, GrpoLoop)
    return config.loop.sampler.workers if is_grpo and isinstance(config.loop, GrpoLoop) else 0


def trainer_devices(config: Config) -> int:
    """Return the devices of the slice that train; all, if the sampler's workers would leave none."""
    topology, sampling = config.topology, _sampler_workers(config)
    training = topology.workers - sampling
    return topology.devices // topology.workers * training if 0 < training < topology.workers else topology.devices


def meshes(config: Config) -> Iterator[tuple[str, Mesh]]:
    """Yield the keys and meshes of training and, if the config says one, of sampling on the same devices."""
    yield "mesh", config.mesh
    if isinstance(config.loop, GrpoLoop) and config.loop.sampler.mesh is not None:
        yield "loop.sampler.mesh", config.loop.sampler.mesh


def mesh_axes(config: Config, mesh: Mesh | None = None) -> dict[str, int] | None:
    """Return the sizes of a mesh, the trainer's if None, with -1 resolved; None if they do not match the devices."""
    sizes = (mesh or config.mesh).sizes
    product = 1
    for size in sizes.values():
        product *= size if size > 0 else 1
    left, rest = divmod(trainer_devices(config), product)
    if rest or (-1 not in sizes.values() and left != 1):
        return None
    return {name: size if size > 0 else left for name, size in sizes.items()}


def total_updates(config: Config) -> int:
    """Return the optimizer updates of the whole run, excluding a warm start."""
    return config.loop.steps if config.loop else 0
