"""Keys that were set and that nothing reads, because another key turns off what they are about."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import conf
from conf.schema.config import Config
from conf.schema.topology import read_table
from conf.schema.training.data import QuestionData
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.loop_parts import VERIFIERS
from conf.schema.training.model import Model

FOLDER = Path(conf.__file__).parent
FIRST_OF_GROUP = {"tpu": "v5litepod_16", "network": "private"}
"""Files with the values that all others of their group begin from."""
OF_PODS = ("cloud", "tpu", "network", "ssh", "cleanup")
"""Sections that this machine, without a pod, has no use for; of `cloud` it reads what is in cloud/here.yaml."""
OF_TRAINER = (
    *(f"checkpoint.{key}" for key in ("save_interval", "max_to_keep", "best", "verify_interval", "verify_data")),
    *("logging.log_interval", "logging.profile", "run.compile_cache", "alerts.slow_worker_fraction"),
)
"""What the bundled trainer alone reads; the words of a program may have a value of it by an interpolation."""
OF_PROGRAM = frozenset(
    ["out_of_hbm", "out_of_ram", "disk_full", "program_error", "device_mismatch", "workers_disagree", "setup_failure"]
)
"""Verdicts that count as a failure of the program."""
STAYING = ("restart_program", "give_up")
"""Responses that come with the config."""


@cache
def _read(name: str) -> dict[str, Any]:
    return read_table(FOLDER / f"{name}.yaml")


def _shipped(section: str, kind: str) -> dict[str, Any]:
    """Return the values of a section that nobody has changed; `kind` is that of the loop or the cloud."""
    if section == "cloud":
        return _read("cloud/gcp") | _read(f"cloud/{kind}")
    if section in FIRST_OF_GROUP:
        return _read(f"{section}/{FIRST_OF_GROUP[section]}")
    return _read(f"loop/{kind}") if section == "loop" else _read("config")[section]


def unread_keys(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key whose value has no effect, and why."""
    plain = config.model_dump(mode="json")
    for key, why in (*_of_loop(config), *_of_program(config), *_of_pods(config), *_of_controller(config)):
        section, *parts = key.split(".")
        set_: Any = plain[section]
        shipped: Any = _shipped(section, set_.get("kind", ""))
        for part in parts:
            set_, shipped = set_[part], shipped.get(part)
        if set_ != shipped:
            yield key, why
    if config.program.kind == "trainer":
        yield from _of_training(config)
    yield from _of_recovery(config)
    if config.cloud.kind == "here":
        yield from _of_no_pod(plain)


def _of_recovery(config: Config) -> Iterator[tuple[str, str]]:
    """Yield responses to failures, and zones, that will never be tried."""
    tpu, recovery = config.tpu, config.recovery
    failures = [name for name, response in recovery.policy if name in OF_PROGRAM and response not in STAYING]
    if failures and not recovery.max_program_failures:
        yield f"recovery.policy.{failures[0]}", "recovery.max_program_failures is 0, so the first failure ends the run"
    if config.cloud.kind == "here":
        return
    if tpu.zone in tpu.fallback_zones:
        yield "tpu.fallback_zones", f"{tpu.zone} is tpu.zone itself"
    moves = [name for name, response in recovery.policy if response == "move_zone"]
    if moves and len(tpu.all_zones) == 1:
        yield f"recovery.policy.{moves[0]}", "move_zone needs another zone in tpu.fallback_zones, and there is none"


def _of_no_pod(plain: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the first key about pods that somebody has changed, with the others: experiments choose pods."""
    shipped = {section: _shipped(section, "") for section in OF_PODS if section != "cloud"}
    shipped["cloud"] = {key: value for key, value in _read("cloud/gcp").items() if key not in _read("cloud/here")}
    changed = [
        f"{section}.{key}"
        for section in OF_PODS
        for key, value in shipped[section].items()
        if key != "defaults" and "${" not in str(value)
        and plain[section][key] not in (value, [value])  # one capacity is a list of one
    ]  # fmt: skip
    if changed:
        rest = f"; nor {'have' if changed[2:] else 'has'} {', '.join(changed[1:])}" if changed[1:] else ""
        yield changed[0], f"cloud=here is this machine, without a pod{rest}"


def _of_program(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what only one of the bundled trainer and a program of one's own reads."""
    if config.program.kind == "trainer":
        why = "the bundled trainer has its own way; this is for programs of your own"
        yield from ((f"recovery.{key}", why) for key in ("preemption_signal", "exit_on_exception"))
        return
    yield from ((key, "only the bundled trainer reads it, and this is a program of its own") for key in OF_TRAINER)


def _of_pods(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what is not asked of Google."""
    tpu, network = config.tpu, config.network
    if config.cloud.kind == "here":
        return
    if "reserved" not in tpu.capacity:
        yield "tpu.reservation", f"tpu.capacity is {', '.join(tpu.capacity)}; for the reservation set reserved"
    if tpu.plane == "tpu_api" or not config.topology.image_family:
        yield "tpu.boot_disk_gb", f"it is for Compute Engine, and {tpu.accelerator_type} comes from the TPU API"
        if not any(map(tpu.is_queued, tpu.capacity)):
            yield "tpu.valid_until_hours", "no request is queued; tpu.create_timeout_minutes limits a creation"
    if tpu.adopt:
        for key in ("reservation", "valid_until_hours", "boot_disk_gb"):
            yield f"tpu.{key}", "tpu.adopt takes a pod as it is"
    if network.mode == "auto":
        yield "network.cidr", "in a network of mode auto Google chooses the ranges"
    if config.ssh.os_login is True:
        yield "ssh.user", "ssh.os_login is true, and OS Login assigns the name"
    if config.cloud.kind == "local" and config.cloud.realism == "relaxed":
        yield "cloud.caller_roles", "cloud.realism is relaxed: permissions are not judged"


def _of_controller(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what the controller, or the bastion that is to replace it, does not look at."""
    alerts, notify = config.alerts, config.notify
    if config.recovery.driver == "laptop" and config.cloud.kind != "here":
        for key in (
            *(f"cloud.driver_{of}" for of in ("service_account", "roles", "machine")),
            "cleanup.bastion_max_days",
        ):
            yield key, "recovery.driver is laptop, so there is no bastion"
    lasting = ("slow_fraction", "min_tokens_per_second", "data_wait_fraction", "slow_worker_fraction")
    if not any(getattr(alerts, key) for key in lasting):
        yield "alerts.sustained_seconds", f"{', '.join(f'alerts.{key}' for key in lasting)} are null"
    if alerts.checkpoint_minutes is not None:
        yield "alerts.checkpoint_intervals", "alerts.checkpoint_minutes decides"
    if notify.webhook is None and notify.notifier is None:
        yield "notify.events", "neither notify.webhook nor notify.notifier says who is told"


def _of_loop(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key of the loop that is not read, whether somebody has set it or not."""
    loop = config.loop
    if config.program.kind != "trainer" or not isinstance(loop, GrpoLoop):
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
    longest = loop.max_prompt_length + loop.max_new_tokens
    if loop.length_buckets and min(loop.length_buckets) >= longest:
        yield "loop.length_buckets", f"an update has at most {longest} tokens in a row"
    if loop.overlong != "penalize":
        yield "loop.overlong_buffer_fraction", f"loop.overlong is {loop.overlong}, not penalize"
    if loop.rollout_correction.rollout_rs is None:
        yield "loop.rollout_correction.rollout_rs_threshold", "loop.rollout_correction.rollout_rs is null"
    if loop.test_samples_per_prompt is None:
        yield "loop.test_prompts", "loop.test_samples_per_prompt is null, so there is no test"
    if not loop.sampler.pods:
        yield "loop.sampler.tpu", "loop.sampler.pods is 0"


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
    if (
        isinstance(config.data, QuestionData)
        and config.data.chat_template != "own"
        and config.data.chat_template_kwargs
    ):
        yield "data.chat_template_kwargs", "only a model's own template has variables; set data.chat_template=own"
    if profile is not None and config.loop is not None and profile.after >= config.loop.steps:
        yield "logging.profile.after", f"the run has {config.loop.steps} updates"
