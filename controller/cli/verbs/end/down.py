"""`slipway down`: delete the pod; with --all also what pods share. Only resources made by Slipway are deleted."""

import json

from controller.cleanup.teardown import Teardown, other_buckets, plan_teardown, unreadable_places
from controller.cli.main import Command
from controller.cli.view import View
from controller.core.errors import CloudError, ConfigError
from controller.core.layout import print_wrapped
from controller.core.ui import confirm
from controller.resources.bucket import Bucket
from controller.resources.services import Services
from controller.run.session import open_session

BUCKET_STAYS = (
    "gs://{} stays, with results of runs elsewhere; to delete it, run `down --all` with their tpu.zone or cloud.bucket"
)
MAY_RUN = "neither the pod's lease nor its workers can be read, so a run may be on it"
HIDDEN = (
    "you may not look for {places}: if a pod or queued resource {name} is there, it is still billed. Ask a project "
    "admin for the permission (`slipway plan --permissions`), or to look with `slipway orphans`"
)


def run(command: Command) -> int:
    with open_session(command.options, ends=True) as session:
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
            undo = session.plan.get(Services).disable_command(session.context)
            hidden, name = unreadable_places(session), session.plan.node.name
    if command.flags.json:
        kept_ids = [row.resource.id for row in teardown.kept]
        deleted = [r.id for r in teardown.present]
        print(json.dumps({"deleted": deleted, "kept": kept_ids, "other_buckets": others, "undo": [undo]}))
    else:
        print_wrapped([*_summary_lines(teardown, undo), *map(BUCKET_STAYS.format, others)])
    if hidden:
        raise CloudError(HIDDEN.format(name=name, places=", ".join(hidden)))
    return 0


def _summary_lines(teardown: Teardown, undo: str) -> list[str]:
    """Describe what was deleted, what stays and why, and how to remove the rest."""
    present, kept = teardown.present, teardown.kept
    lines = [] if present else ["nothing to delete: found no resources created by Slipway"]
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
