"""End work: `slipway cancel` a run, `stop` a pod of one VM, take everything `down`."""

import sys

from conf.strict_json import dumps
from controller.cleanup.orphans import raise_if_unlisted
from controller.cleanup.teardown import Teardown, other_buckets, plan_teardown, unreadable_places
from controller.cli.main import Command
from controller.cli.view import View
from controller.core.errors import CloudError, ConfigError
from controller.core.events import confirm
from controller.core.text import print_wrapped
from controller.gcp.google_errors import GoogleError
from controller.lease import pod_lease
from controller.records.ledger import record_cancellations
from controller.records.spending import close_billing
from controller.resources.bucket import Bucket
from controller.resources.pod.node import Node
from controller.resources.services import Services
from controller.run.cancel import cancel_run
from controller.run.driven_here import end_starting, run_lock
from controller.run.launch import running_runs
from controller.run.session import Session, open_session
from controller.sampler_release import end_pods

BUCKET_STAYS = (
    "gs://{} stays, with results of runs elsewhere; to delete it, run `down --all` with their tpu.zone or cloud.bucket"
)
OWN_STEPS = (
    "what the own steps {} (code.resources) made: `down` imports nothing that a record names; `slipway down --all` "
    "with the run's overrides does"
)
MAY_RUN = "neither the pod's lease nor its workers can be read, so a run may be on it"
IS_BACK = (
    "{} is there again: another controller has made it since it was deleted. `slipway status --all` shows what runs; "
    "the same command deletes it"
)
HIDDEN = (
    "you may not look for {places}: if a pod or queued resource {name} is there, it is still billed. Ask a project "
    "admin for the permission (`slipway plan --permissions`), or to look with `slipway orphans`"
)


def run_cancel(command: Command) -> int:
    """`slipway cancel`: end the run on every worker. The pod and the run's saved results stay; pods of samplers do not.

    It says what it has found at the end: the run may have finished in the meantime.
    """
    ending = command.options.showing("ending the run on every worker")
    with open_session(command.options, ends=True) as session, ending as doing:
        run_id, ended = session.plan.run_id, cancel_run(session, doing)
        left = end_pods(session.plan, session.context, "the trainer's run was cancelled")
    for problem in left:
        print(f"not deleted: {problem}; `slipway down` deletes it", file=sys.stderr)
    if command.flags.json:
        print(dumps({"run": run_id, "cancelled": ended.cancelled, "running": sorted(ended.running)}))
    elif ended.cancelled:
        pod = "the pod stays, `slipway down` deletes it; " if ended.pod_is_there else ""
        print_wrapped([f"{run_id} is cancelled; {pod}`slipway up` resumes the run"])
    else:
        state = "has finished: nothing was cancelled" if ended.finished else "is not running"
        others = f"; running on the pod: {', '.join(sorted(ended.running))}" if ended.running else ""
        print_wrapped([f"{run_id} {state}{others}"])
    if ended.problem:
        raise CloudError(ended.problem)
    return 0


def run_stop(command: Command) -> int:
    """`slipway stop`: stop a pod of one VM. Then only its disks, which it keeps, are billed; `up` starts it again."""
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
                _stop_pod(command, session, node)
    if command.flags.json:
        print(dumps({"pod": name, "stopped": stopped}))
    else:
        is_stopped = f"{name} is {'' if stopped else 'already '}stopped"
        print_wrapped([f"{is_stopped}; `slipway up` starts it, `slipway down` deletes it"])
    return 0


def _stop_pod(command: Command, session: Session, node: Node) -> None:
    """Stop the pod under its lease, and end its billing on record; with --yes also if the bucket does not answer."""
    problems = _record_stops(command, session)
    plan, context = session.plan, session.context
    lease = pod_lease(plan, context)
    with lease.released_on_exit():
        end_starting(context, lease, run_lock(context, plan.run_id), plan.run_id, "stopped")
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
    return record_cancellations(session.context, session.plan.bucket, sorted(running))


def run_down(command: Command) -> int:
    """`slipway down`: delete the pod; with --all also what pods share. Only resources made by Slipway are deleted."""
    wanted = command.flags.all  # else own steps stay, as all that pods share
    with open_session(command.options, ends=True, own_code=wanted) as session:
        session.require_pod()
        with command.options.showing("looking for what Slipway created"):
            teardown = plan_teardown(session, command.flags.all)
        running = teardown.running
        ends_work = bool(running) or (teardown.may_run and bool(teardown.present))
        if (teardown.present or running) and (teardown.everything or ends_work) and not _confirm(command, teardown):
            names = f"{', '.join(sorted(running))} is running on the pod; " if running else ""
            names = names or (f"{MAY_RUN}; " if teardown.may_run else "")
            raise ConfigError(f"nothing was deleted; {names}pass --yes to skip the prompt")
        with View(session.plan, json_lines=command.flags.json) as view:
            teardown.execute(view)
        with command.options.showing("looking for what is left"):
            others = other_buckets(session) if teardown.everything else []
            left = teardown.left()
            undo = session.plan.get(Services).disable_command(session.context)
            hidden, name = unreadable_places(session), session.plan.node.name
        named = session.plan.config.code.resources if wanted and not session.plan.own_code else ()
    if command.flags.json:
        kept_ids = [row.resource.id for row in teardown.kept]
        deleted = [r.id for r in teardown.present if r not in left]
        document = {"deleted": deleted, "kept": kept_ids, "other_buckets": others, "undo": [undo]}
        print(dumps(document | {"own_steps_left": list(named)}))
    else:
        print_wrapped([*_summary_lines(teardown, undo), *map(BUCKET_STAYS.format, others)])
    if named:
        print(f"not deleted: {OWN_STEPS.format(', '.join(named))}", file=sys.stderr)
    if left:
        raise CloudError(IS_BACK.format(", ".join(resource.title for resource in left)))
    if hidden:
        raise CloudError(HIDDEN.format(name=name, places=", ".join(hidden)))
    raise_if_unlisted(session.context)
    return 0


def _summary_lines(teardown: Teardown, undo: str) -> list[str]:
    """Describe what was deleted, what stays and why, and how to remove the rest."""
    present, kept = teardown.present, teardown.kept
    ended = f"ended {', '.join(sorted(teardown.running))}; " if teardown.running else ""
    lines = [] if present else [f"{ended}nothing to delete: found no resources created by Slipway"]
    ours = [row.resource.title for row in kept if row.observed.is_managed]
    if ours and not teardown.everything:
        lines.append(f"kept for the next run: {', '.join(ours)}; `slipway down --all` deletes them too")
    if teardown.everything and present:
        lines.append(f"the APIs stay enabled, which costs nothing; to disable those that you do not need: {undo}")
        gone = {r.id for r in present}
        foreign = [
            row.resource for row in kept if not gone & set(row.resource.depends_on)
        ]  # else it was deleted with them
        if foreign:
            lines.append(f"not created by Slipway, left unchanged: {', '.join(r.title for r in foreign)}")
        lines += [
            f"data of runs stays in gs://{r.name}, under assets/, capacity/, code/, index/, pods/ and runs/"
            for r in foreign
            if isinstance(r, Bucket)
        ]
    return lines


def _confirm(command: Command, teardown: Teardown) -> bool:
    ends = [f"This ends {', '.join(sorted(teardown.running))}"] if teardown.running else []
    ends += [f"Note: {MAY_RUN}"] if teardown.may_run else []
    details = [*ends, "This deletes:", *(f"  {r.title}" for r in teardown.present)]
    return confirm("Continue?", yes=command.flags.yes, details=details)
