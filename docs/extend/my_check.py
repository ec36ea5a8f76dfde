"""Check: a rule of one's own lab, before anything is billed."""

from collections.abc import Iterator
from typing import Any


def runs_have_owners(config: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each mistake; `config` is the composed config."""
    if "-" not in config.run.name:
        yield "run.name", f"{config.run.name} does not begin with its owner; use OWNER-{config.run.name}"
    if config.budget.max_usd is None and config.cloud.kind == "gcp":
        yield "budget.max_usd", "our lab requires a budget; set it, e.g. 20"
