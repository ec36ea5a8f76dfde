"""A plan in a file, which can be committed: `plan --save` and `--plan FILE`.

Only its config is frozen, not the code: the same file with other code is another run with another id. `up --run ID`
repeats an existing run, code included.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from controller.config.compose import compose_raw
from controller.core.errors import ConfigError
from controller.core.json_documents import checked, has_format, stamped
from controller.plan.build import Plan

PLANS_FOLDER = "plans"


def save_plan(plan: Plan, overrides: Sequence[str], folder: Path) -> Path:
    """Write `plans/<run id>.yaml` below a folder and return the file; run.state_dir, which is local, is left out."""
    config = plan.config.model_dump(mode="json")
    del config["run"]["state_dir"]
    run = {"run": plan.run_id, "overrides": list(overrides), "code_sha256": plan.snapshot.sha256}
    content = stamped({**run, "config": config})
    file = folder / PLANS_FOLDER / f"{plan.run_id}.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def load_planned_config(file: Path) -> dict[str, Any]:
    """Load the config of a plan file, not validated yet. Raises ConfigError if it is unreadable."""
    try:
        content = yaml.safe_load(file.read_text())
        config = dict((checked(content, str(file)) if has_format(content) else {})["config"])
        config["run"] = {**config["run"], "state_dir": compose_raw(())["run"]["state_dir"]}
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or "it contains no config"
        raise ConfigError(f"--plan {file}: {why}; create one with `slipway plan --save …`") from None
    return config
