"""Budget: limits can be enforced, and TPUs that should be free are free."""

from collections.abc import Iterator
from datetime import UTC, datetime

from conf.schema.config import Config
from controller.context import Context
from controller.core.finding import Issue, check
from controller.gcp.prices import SPOT_TIERS


@check("price", "error", "budget.max_usd")
def price_is_known(config: Config) -> Iterator[Issue]:
    """A limit in dollars can be enforced only if the hourly price is known."""
    budget = config.budget
    if budget.max_usd is None or budget.usd_per_hour is not None or config.cloud.trc is not None:
        return
    spot = config.tpu.capacity[0] in SPOT_TIERS
    free = {"local": "the emulated cloud is free", "here": "this machine is free"}.get(config.cloud.kind)
    if free or config.topology.usd_per_hour(config.tpu.zone, spot=spot) is None:
        what = free or "the zone's price is unknown"
        yield Issue(f"cannot be enforced: {what}; set budget.usd_per_hour, or use budget.max_hours")


@check("endless", "error", "budget.max_hours")
def endless_program_has_a_limit(config: Config) -> Iterator[Issue]:
    """A program that never ends is billed until someone remembers it."""
    if not config.program.endless or config.code.stand_in or config.cloud.kind != "gcp":
        return
    if config.budget.max_hours is None and config.budget.max_usd is None:
        yield Issue("the program never ends (program.endless); set the hours after which the run ends, or max_usd")


@check("trc_zone", "error", "tpu.zone")
def zone_is_in_grant(config: Config) -> Iterator[Issue]:
    """TPU Research Cloud TPUs are free only in the zones of the grant. Elsewhere they are billed in full."""
    if config.cloud.trc is None:
        return
    for zone in config.tpu.all_zones:
        if zone not in config.cloud.trc.zones:
            zones = ", ".join(config.cloud.trc.zones)
            yield Issue(
                f"{zone} is not in the TRC grant ({zones}), so TPUs there are billed; to allow that, set cloud.trc=null"
            )


@check("kept_forever", "warning", "cleanup.idle_minutes")
def failed_pods_are_deleted(config: Config) -> Iterator[Issue]:
    """A pod that is kept after a failure is billed until someone deletes it."""
    if config.cleanup.on_failure == "keep" and config.cleanup.idle_minutes is None:
        yield Issue("null with cleanup.on_failure=keep bills a failed pod until you run `slipway down`")


@check("thresholds", "error", "cloud.billing_budget.thresholds")
def thresholds_are_fractions(config: Config) -> Iterator[Issue]:
    """A threshold of 50 means 5,000%. Google accepts it and never sends an email."""
    budget = config.cloud.billing_budget
    if budget is not None and any(not 0 < share <= 2 for share in budget.thresholds):
        yield Issue("must be fractions of the amount, e.g. 0.5 for 50%")


@check("trc_ended", "warning", "cloud.trc.free_until", live=True)
def grant_has_not_ended(config: Config, context: Context) -> Iterator[Issue]:
    """Grants end after about 30 days, and the bill is the only notice."""
    trc = config.cloud.trc
    if trc is None:
        return
    today = datetime.fromtimestamp(context.clock.now(), UTC).date()
    left = (trc.free_until - today).days
    if left < 0:
        yield Issue(
            f"the grant ended on {trc.free_until} and TPUs are billed; ask TRC to extend it, or set cloud.trc=null"
        )
    elif left < 3:
        yield Issue(f"the grant ends on {trc.free_until}; later hours of the run are billed")
