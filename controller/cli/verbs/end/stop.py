"""`slipway stop`: stop a pod of one VM. Then only its disks, which it keeps, are billed; `up` starts it again."""

import json
import sys

from controller.cli.main import Command
from controller.core.errors import ConfigError
from controller.core.layout import print_wrapped
from controller.gcp.errors import GoogleError
from controller.lease.lease import pod_lease
from controller.records.ledger import record_cancellations
from controller.records.spending import close_billing
from controller.resources.pod.node import Node
from controller.run.launch import running_runs
from controller.run.session import Session, open_session
from controller.samplers.ending import end_pods


def run(command: Command) -> int:
    with open_session(command.options, ends=True) as session:
        session.require_pod()
        with command.options.showing("observing the pod"):
            node = session.node()
        name = session.plan.node.name
        if not isinstance(node, Node) or node.status.state not in ("READY", "STOPPED"):
            raise ConfigError(f"pod {name} is absent or not ready, so it cannot be stopped; see `slipway status`")
        if session.plan.node.adopt or not node.is_managed:
            raise ConfigError(f"pod {name} was not created by Slipway, so Slipway does not stop it")
        if node.cannot_stop:
            raise ConfigError(f"tpu.capacity: {node.cannot_stop}")
        stopped = node.is_ready
        if stopped:
            with command.options.showing(f"stopping {name}"):
                _stop(command, session, node)
    if command.flags.json:
        print(json.dumps({"pod": name, "stopped": stopped}))
    else:
        is_stopped = f"{name} is {'' if stopped else 'already '}stopped"
        print_wrapped([f"{is_stopped}; `slipway up` starts it, `slipway down` deletes it"])
    return 0


def _stop(command: Command, session: Session, node: Node) -> None:
    """Stop the pod under its lease, and end its billing on record; with --yes also if the bucket does not answer."""
    problems = _record_stops(command, session)
    plan, context = session.plan, session.context
    lease = pod_lease(plan, context)
    with lease.released_on_exit():
        try:
            lease.take_over("stopped")
        except GoogleError as error:
            if not command.flags.yes:
                raise ConfigError(f"cannot see whether a controller is at work ({error}); --yes stops it") from error
            problems.append(str(error))
        node.stop(context)
        lease.release("stopped", 0)
    try:
        close_billing(context, plan.bucket, plan.config, node, "stopped")
    except GoogleError as error:
        problems.append(str(error))
    for problem in problems[:1]:
        print(f"the end of the runs and of the pod's time is not on record: {problem}", file=sys.stderr)
    for problem in end_pods(plan, context, "the trainer's pod was stopped"):
        print(f"not deleted: {problem}; `slipway down` deletes it", file=sys.stderr)


def _record_stops(command: Command, session: Session) -> list[str]:
    """Record the stop, so that no controller takes it for a preemption; return what went wrong."""
    fleet = session.fleet()
    running = running_runs(fleet) if fleet is not None else set()
    if running and not command.flags.yes:
        raise ConfigError(f"{', '.join(sorted(running))} is running on the pod; pass --yes to end it")
    return record_cancellations(session.context.google, session.plan.bucket, sorted(running))
