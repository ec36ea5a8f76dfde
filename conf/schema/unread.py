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

OF_PROGRAM = frozenset(
    ["out_of_hbm", "out_of_ram", "disk_full", "program_error", "device_mismatch", "workers_disagree", "setup_failure"]
)
"""Verdicts that count as a failure of the program."""
STAYING = ("restart_program", "give_up")
"""Responses that come with the config."""


@cache
def _shipped(loop: str) -> dict[str, Any]:
    """Return the values of a loop that nobody has changed."""
    return yaml.safe_load((Path(conf.__file__).with_name("loop") / f"{loop}.yaml").read_text())


def unread_keys(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key whose value has no effect, and why."""
    if config.program.kind == "trainer":
        for key, why in _of_loop(config):
            set_: Any = config.loop
            shipped: Any = _shipped(config.loop.kind if config.loop else "grpo")
            for part in key.split("."):
                set_, shipped = getattr(set_, part), shipped.get(part)
            if set_ != shipped:
                yield f"loop.{key}", why
        yield from _of_training(config)
    if config.tpu.zone in config.tpu.fallback_zones:
        yield "tpu.fallback_zones", f"{config.tpu.zone} is tpu.zone itself"
    moves = [name for name, response in config.recovery.policy if response == "move_zone"]
    failures = [name for name, response in config.recovery.policy if name in OF_PROGRAM and response not in STAYING]
    if failures and not config.recovery.max_program_failures:
        yield f"recovery.policy.{failures[0]}", "recovery.max_program_failures is 0, so the first failure ends the run"
    if config.tpu.reservation and "reserved" not in config.tpu.capacity:
        yield "tpu.reservation", f"tpu.capacity is {', '.join(config.tpu.capacity)}, without reserved"
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
            yield f"environment.{name}", "loop.environment.name is null"
    else:
        yield "rewards", f"loop.environment.name={own.name} gives the reward"
    if own.name is None or not own.name.startswith(VERIFIERS):
        for name in type(own.sandbox).model_fields:
            yield f"environment.sandbox.{name}", "only environments of verifiers have a sandbox"
    longest = loop.max_prompt_length + loop.max_new_tokens
    if loop.length_buckets and min(loop.length_buckets) >= longest:
        yield "length_buckets", f"an update has at most {longest} tokens in a row"
    if loop.overlong != "penalize":
        yield "overlong_buffer_fraction", f"loop.overlong is {loop.overlong}, not penalize"
    if loop.rollout_correction.rollout_rs is None:
        yield "rollout_correction.rollout_rs_threshold", "loop.rollout_correction.rollout_rs is null"
    if loop.test_samples_per_prompt is None:
        yield "test_prompts", "loop.test_samples_per_prompt is null, so there is no test"
    if not loop.sampler.pods:
        yield "sampler.tpu", "loop.sampler.pods is 0"


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
