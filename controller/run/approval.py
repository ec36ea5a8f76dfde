"""Confirm the cost with the user before anything billed is created."""

from controller.checks.preflight import probe_cloud
from controller.context import Context
from controller.core.errors import ConfigError
from controller.core.ui import BoardScreen
from controller.gcp.client import ServiceDisabledError
from controller.gcp.prices import hourly_price, max_cost
from controller.plan.build import Plan
from controller.reconcile.resource import Absent


def confirm_cost(plan: Plan, world: Context, screen: BoardScreen, *, yes: bool) -> None:
    """Run the live checks and confirm the cost with the user, unless the pod already exists.

    Raises:
        ConfigError: a live check found an error, or the user declined.
    """
    try:
        seen = plan.observe_pod(world)
    except ServiceDisabledError:
        seen = Absent()
    if not isinstance(seen, Absent):
        return
    findings = probe_cloud(plan.config, world)
    if errors := [finding for finding in findings if finding.severity == "error"]:
        raise ConfigError(errors)
    for finding in findings:
        world.events.note(plan.run_id, f"{finding.severity}: {finding}")
    if not world.billed or plan.node.adopt:
        return
    price = hourly_price(plan.config, world.clock.now())
    cost = "an unknown price" if price.tpu is None else price
    question = f"Create {plan.node.title} for {cost}? The run costs {max_cost(plan.config, price)}."
    if not screen.ask(question, yes):
        raise ConfigError("nothing was created; pass --yes to skip the prompt")
