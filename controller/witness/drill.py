"""What a first contact runs: a tiny training run of 20 steps, whose first attempt waits at a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from controller.cloud.connect import project_of, require_pods, require_project
from controller.core.clock import Clock
from controller.gcp.prices import hourly_price
from controller.plan.project import bucket_name
from controller.run.options import RunOptions

NAME = "slipway-witness"
"""Name of network and account: `down --all` then touches nothing that other runs use."""
STEPS, CHECKPOINT = 20, 10
TEXT = "".join(f"{a} and {b} make {a + b}.\n" for a in range(40) for b in range(40))
"""Data of the run, so that the upload of a data set is part of the first contact."""
DEFAULT_TYPE = "tpu.accelerator_type=v5litepod-4"
MAX_BUCKET_NAME = 63


@dataclass(frozen=True)
class Limits:
    """Where a first contact ends: dollars at the list price, and minutes before the clean-up begins."""

    usd: float = 5.0
    minutes: float = 60.0


def drill_options(options: RunOptions, limits: Limits) -> RunOptions:
    """Return the options of the run: the user's cloud and TPU, our program, names and limits. Writes its data.

    Raises:
        ConfigError: the overrides are unusable, or no project is set.
    """
    given = options.overrides
    if not any(word.startswith(("tpu=", "tpu.accelerator_type=")) for word in given):
        given = (*given, DEFAULT_TYPE)
    config = replace(options, overrides=given).cloud_config()
    require_pods(config)
    project = require_project(project_of(config))
    is_local = config.cloud.kind == "local"
    text = Path(config.run.state_dir).expanduser() / "witness" / "text.txt"
    text.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text.write_text(TEXT)
    bucket = bucket_name(config, project)
    bucket = bucket if bucket.endswith("-witness") else f"{bucket[: MAX_BUCKET_NAME - 8]}-witness"
    price = hourly_price(config, Clock().now()).total
    ours: Sequence[str] = (
        "run.name=witness", "program=trainer", "data=text", "model=tiny", "model.num_layers=1",
        "model.attention_pattern=G", "loop=lm", "optimizer=adamw",
        f"+assets.datasets.witness.path={text}", f"data.path=assets://witness/{text.name}",
        f"loop.steps={STEPS}", "loop.seq_len=64", "loop.total_batch_tokens=1024", f"loop.eval_interval={STEPS}",
        "loop.eval_batches=1", f"checkpoint.save_interval={CHECKPOINT}", f"checkpoint.verify_interval={CHECKPOINT}",
        "logging.log_interval=1", f'+env.vars.TRAINER_HOLD_AT_STEP="{CHECKPOINT}"',
        "env.secrets={HF_TOKEN: null, WANDB_API_KEY: null, NETRC: null}",
        f"env.packages={'image' if is_local else 'lock'}", "env.requirements=null",
        f"network.name={NAME}", f"cloud.service_account={NAME}", f"cloud.bucket={bucket}", "tpu.adopt=false",
        "recovery.driver=laptop", "recovery.policy.preempted=replace_node",
        "cleanup.on_success=delete", "cleanup.on_failure=delete", "cleanup.idle_minutes=15",
        f"budget.max_hours={limits.minutes / 60:.4f}", f"budget.max_usd={'null' if price is None else limits.usd}",
    )  # fmt: skip
    return replace(options, overrides=(*given, *ours), yes=True)
