"""Pods of samplers (`loop.sampler.pods`): each is the pod of a run of its own, which belongs to the trainer's run.

Such a run has the id of its owner and a suffix, the owner's code, packages and run.yaml, and a slice of one worker. It
is planned, launched, recovered and recorded like any other run.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from conf.formats import POD_VARIABLE
from conf.schema.config import Config
from conf.schema.topology import YamlDumper
from conf.schema.training.loop import GrpoLoop
from controller.config.run_yaml import pod_facts
from controller.core.text import plural
from controller.gcp.prices import HourlyPrice, hourly_price
from controller.plan.build import Plan, RecordedInputs, build_plan
from controller.resources.software import Venv


def num_sampler_pods(config: Config) -> int:
    """Return how many further pods a run rents, which only sample."""
    if config.program.kind != "trainer" or not isinstance(config.loop, GrpoLoop) or config.cloud.kind == "here":
        return 0
    return config.loop.sampler.pods


def sampler_suffix(number: int | str) -> str:
    """Return what the names of a pod and a run of samplers have in addition to their owner's."""
    return f"-sampler-{number}"


def is_sampler_pod(name: str, owner: str = "") -> bool:
    """Return whether a pod or a run is one of samplers by its name; of any owner if that is empty."""
    before = re.escape(owner) if owner else ".+"
    return re.fullmatch(before + sampler_suffix(r"[1-9]\d*"), name) is not None


def sampler_configs(config: Config) -> tuple[Config, ...]:
    """Return the config of each pod of samplers."""
    return tuple(_sampler_config(config, number) for number in range(1, num_sampler_pods(config) + 1))


def sampler_config(config: Config) -> Config | None:
    """Return the config of the first pod of samplers, as all others but for the name; None if there is none."""
    return _sampler_config(config, 1) if num_sampler_pods(config) else None


def _sampler_config(config: Config, number: int) -> Config:
    """Return the config of one pod of samplers.

    It holds nothing that is needed later, so it is deleted however its run ends. A sampler is quiet and saves nothing,
    which is no sign of a fault; and whoever is notified of the owner need not hear of it.
    """
    loop = config.loop
    assert isinstance(loop, GrpoLoop), "only this loop has pods of samplers"
    kind, tpu = loop.sampler.tpu or config.tpu.accelerator_type, config.tpu
    slice_: dict[str, Any] = {"name": config.pod_name + sampler_suffix(number), "data_disk_gb": None}
    if kind != tpu.accelerator_type:
        slice_ |= {"accelerator_type": kind, "machine_type": None, "runtime_version": None}
    quiet = {"silent_minutes": None, "checkpoint_intervals": None, "checkpoint_minutes": None}
    sections: dict[str, dict[str, Any]] = {
        "tpu": slice_,
        "loop": {"sampler": loop.sampler.model_copy(update={"workers": 0, "pods": 0, "tpu": None})},
        "env": {"vars": config.env.vars | {POD_VARIABLE: str(number)}},
        "recovery": {"max_program_failures": 0, "hang_timeout_seconds": None},
        "cleanup": {"on_success": "delete", "on_failure": "delete"},
        "alerts": quiet,
        "notify": {"webhook": None, "notifier": None},
    }
    if config.cloud.kind == "local":
        sections["cloud"] = {"faults": ()}  # the owner's, which must not strike twice
    copies = {name: getattr(config, name).model_copy(update=changes) for name, changes in sections.items()}
    return config.model_copy(update=copies)


def sampler_plans(plan: Plan, folder: Path) -> tuple[Plan, ...]:
    """Return the plan of each pod of samplers; `folder` is the current folder of the user. Does no I/O."""
    configs = sampler_configs(plan.config)
    if not configs:
        return ()
    content = yaml.safe_load(plan.run_yaml) | {"pod": pod_facts(configs[0])}
    run_yaml = yaml.dump(content, Dumper=YamlDumper, sort_keys=False)
    assets, lock = {asset.path: asset for asset in plan.assets}, plan.get(Venv).requirements
    return tuple(
        build_plan(
            config,
            plan.project,
            folder,
            plan.snapshot,
            RecordedInputs(plan.run_id + sampler_suffix(number), run_yaml, assets, lock),
            own_code=plan.own_code,
        )
        for number, config in enumerate(configs, 1)
    )


def owner_of(plan: Plan) -> str:
    """Return the id of the run that a run of samplers belongs to; that of any other run itself."""
    number = plan.config.env.vars.get(POD_VARIABLE)
    return plan.run_id.removesuffix(sampler_suffix(number)) if number else plan.run_id


def describe_samplers(config: Config, before: str = "") -> str:
    """Return how many pods of samplers there are, of which type, after the text `before`; '' if there are none."""
    configs = sampler_configs(config)
    return f"{before}{plural(len(configs), 'pod')} of {configs[0].tpu.accelerator_type}" if configs else ""


def dearest_pod(config: Config, now: float) -> HourlyPrice:
    """Return the highest hourly price of a pod of the run: budget.max_hours counts the hours of all pods."""
    prices = [hourly_price(one, now) for one in (config, *sampler_configs(config))]
    return max(prices, key=lambda price: float("inf") if price.total is None else price.total)


def price_of_pods(config: Config, now: float) -> HourlyPrice:
    """Return the hourly price of all pods of a run together."""
    own = hourly_price(config, now)
    others = [hourly_price(sampler, now) for sampler in sampler_configs(config)]
    if not others:
        return own
    known = [price.tpu for price in (own, *others) if price.tpu is not None]
    tpu = sum(known) if len(known) == 1 + len(others) else None
    network = own.network + sum(price.network for price in others)
    source = f"{own.source}, {len(others)} of samplers included"
    return HourlyPrice(tpu, network, source, own.network_items)
