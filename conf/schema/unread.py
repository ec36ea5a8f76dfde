"""Keys that were set and that nothing reads, because another key turns off what they are about."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import conf
from conf.schema.config import Config
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.loop_parts import VERIFIERS
from conf.schema.training.model import Model

SHIPPED = {"tpu": "tpu/v5litepod_16", "cloud": "cloud/gcp", "network": "network/private"}
"""Files with the first values of a section; those of the others are in config.yaml."""


@cache
def _shipped(file: str) -> dict[str, Any]:
    """Return the values of a file that nobody has changed."""
    return yaml.safe_load((Path(conf.__file__).parent / f"{file}.yaml").read_text())


def _is_changed(config: Config, key: str) -> bool:
    """Return whether a key has another value than the one that it is shipped with."""
    section, *inner = key.split(".")
    set_: Any = getattr(config, section)
    shipped: Any = _shipped(f"loop/{set_.kind}" if section == "loop" else SHIPPED.get(section, "config"))
    for part in inner if section in ("loop", *SHIPPED) else (section, *inner):
        shipped = shipped.get(part)
    for part in inner:
        set_ = getattr(set_, part)
    return set_ != (tuple(shipped) if isinstance(shipped, list) else shipped)


def unread_keys(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key whose value has no effect, and why."""
    if config.program.kind == "trainer":
        yield from ((key, why) for key, why in _of_loop(config) if _is_changed(config, key))
        yield from _of_training(config)
    if config.cloud.kind != "here":  # which needs no pod, and whose docs/here.md says what it leaves alone
        yield from ((key, why) for key, why in _of_pods(config) if _is_changed(config, key))
    if config.tpu.zone in config.tpu.fallback_zones:
        yield "tpu.fallback_zones", f"{config.tpu.zone} is tpu.zone itself"
    moves = [name for name, response in config.recovery.policy if response == "move_zone"]
    if moves and len(config.tpu.all_zones) == 1:
        yield f"recovery.policy.{moves[0]}", "move_zone needs another zone in tpu.fallback_zones, and there is none"


def _of_loop(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key of the loop that is not read, whether somebody has set it or not."""
    loop = config.loop
    if not isinstance(loop, GrpoLoop):
        return
    own = loop.environment
    if own.name is None:
        names = ("options", "max_turns", "max_turn_tokens", "timeout_seconds", "wall_seconds", "max_memory_gib")
        for name in (*names, "max_output_mib", "workers"):
            yield f"loop.environment.{name}", "loop.environment.name is null"
    else:
        yield "loop.rewards", f"loop.environment.name={own.name} gives the reward"
    if own.name is None or not own.name.startswith(VERIFIERS):
        for name in type(own.sandbox).model_fields:
            yield f"loop.environment.sandbox.{name}", "only environments of verifiers have a sandbox"
    if loop.overlong != "penalize":
        yield "loop.overlong_buffer_fraction", f"loop.overlong is {loop.overlong}, not penalize"
    if loop.rollout_correction.rollout_rs is None:
        yield "loop.rollout_correction.rollout_rs_threshold", "loop.rollout_correction.rollout_rs is null"
    if loop.test_samples_per_prompt is None:
        yield "loop.test_prompts", "loop.test_samples_per_prompt is null, so there is no test"
    if not loop.sampler.pods:
        yield "loop.sampler.tpu", "loop.sampler.pods is 0"


def _of_pods(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key of the pod, its network and its bastion that is not read, whether somebody has set it or not."""
    tpu = config.tpu
    if "reserved" not in tpu.capacity:
        yield "tpu.reservation", f"tpu.capacity is {', '.join(tpu.capacity)}; for the reservation set reserved"
    if tpu.plane == "tpu_api" or not config.topology.image_family:
        yield "tpu.boot_disk_gb", f"it is for Compute Engine, and {tpu.accelerator_type} comes from the TPU API"
        if not any(map(tpu.is_queued, tpu.capacity)):
            yield "tpu.valid_until_hours", "no request is queued; tpu.create_timeout_minutes limits a creation"
    if config.network.mode == "auto":
        yield "network.cidr", "in a network of mode auto Google chooses the ranges"
    if config.recovery.driver != "bastion":
        yield "cleanup.bastion_max_days", f"recovery.driver is {config.recovery.driver}, so there is no bastion"
    if config.notify.webhook is None and config.notify.notifier is None:
        yield "notify.events", "neither notify.webhook nor notify.notifier says who is told"


def _of_training(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what the model, the optimizer and the profile have for nothing."""
    model, opt, profile = config.model, config.optimizer, config.logging.profile
    if isinstance(model, Model):
        unused = {"hyper": (model.residual, "plain"), "maha": (model.attention_form, "causal")}
        switches = {"hyper": "residual", "maha": "attention_form"}
        for name, (value, off) in unused.items():
            if value == off and getattr(model, name) != Model.model_fields[name].default:
                yield f"model.{name}", f"model.{switches[name]} is {off}"
    for i, group in enumerate(opt.param_groups if opt else ()):
        if group.lr_scale == 0 and group.lr is not None:
            yield f"optimizer.param_groups.{i}.lr", "lr_scale 0 freezes these weights"
    if profile is not None and config.loop is not None and profile.after >= config.loop.steps:
        yield "logging.profile.after", f"the run has {config.loop.steps} updates"
