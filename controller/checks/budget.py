"""Budget: limits can be kept, and what should be free is free."""

from collections.abc import Iterator
from datetime import UTC, datetime

from conf.schema.config import Config
from controller.context import Context
from controller.core.finding import Issue, check
from controller.gcp.prices import SPOT_TIERS


@check("price", "error", "budget.max_usd")
def price_is_known(config: Config) -> Iterator[Issue]:
    """A limit in dollars can be kept only where an hour has a price."""
    budget = config.budget
    if budget.max_usd is None or budget.usd_per_hour is not None or config.cloud.trc is not None:
        return
    spot = config.tpu.capacity[0] in SPOT_TIERS
    if config.cloud.kind == "local" or config.topology.usd_per_hour(config.tpu.zone, spot=spot) is None:
        what = "the emulated cloud costs nothing" if config.cloud.kind == "local" else "no price is known here"
        yield Issue(f"cannot be kept: {what}; set budget.usd_per_hour, or budget.max_hours instead")


@check("trc_zone", "error", "tpu.zone")
def zone_is_in_grant(config: Config) -> Iterator[Issue]:
    """TPUs of the TPU Research Cloud are free only in the zones of the grant; elsewhere they are billed in full."""
    if config.cloud.trc is None:
        return
    for zone in config.tpu.all_zones:
        if zone not in config.cloud.trc.zones:
            zones = ", ".join(config.cloud.trc.zones)
            yield Issue(
                f"{zone} is not in the TRC grant ({zones}), so TPUs there are billed; cloud.trc=null if you mean it"
            )


@check("kept_forever", "warning", "cleanup.idle_minutes")
def failed_pods_are_deleted(config: Config) -> Iterator[Issue]:
    """A pod that is kept after a failure is billed until somebody deletes it."""
    if config.cleanup.on_failure == "keep" and config.cleanup.idle_minutes is None:
        yield Issue("null and cleanup.on_failure=keep: after a failure the pod is billed until you run `slipway down`")


@check("thresholds", "error", "cloud.billing_budget.thresholds")
def thresholds_are_fractions(config: Config) -> Iterator[Issue]:
    """A threshold of 50 would be 5,000 %; Google takes it and never sends a mail."""
    budget = config.cloud.billing_budget
    if budget is not None and any(not 0 < share <= 2 for share in budget.thresholds):
        yield Issue("are shares of the amount, 0.5 for 50 %")


@check("trc_ended", "warning", "cloud.trc.free_until", live=True)
def grant_has_not_ended(config: Config, world: Context) -> Iterator[Issue]:
    """A grant ends after 30 days or so, and only the bill tells you."""
    trc = config.cloud.trc
    if trc is None:
        return
    today = datetime.fromtimestamp(world.clock.now(), UTC).date()
    left = (trc.free_until - today).days
    if left < 0:
        yield Issue(
            f"the grant ended on {trc.free_until}; TPUs are billed now. Ask TRC for more time, or set cloud.trc=null"
        )
    elif left < 3:
        yield Issue(f"the grant ends on {trc.free_until}; a run that goes on longer is billed from then on")
