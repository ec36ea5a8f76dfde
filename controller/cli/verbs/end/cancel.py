"""`slipway cancel`: end the run on every worker. The pod and the run's saved results stay; pods of samplers do not.

The run's controller learns of it through the bucket: from the record of the cancelled attempt, or, if nothing has
started yet, from a request for the lease.
"""

import json
import sys

from controller.cli.main import Command
from controller.core.errors import CloudError
from controller.core.layout import print_wrapped
from controller.gcp.errors import GoogleError
from controller.lease.lease import pod_lease
from controller.records.ledger import record_cancellations
from controller.run.launch import running_runs, stop
from controller.run.session import open_session
from controller.samplers.ending import end_pods


def run(command: Command) -> int:
    problems: list[str] = []
    with open_session(command.options, ends=True) as session, command.options.showing("ending the run on every worker"):
        run_id, fleet = session.plan.run_id, session.fleet()
        running = running_runs(fleet) if fleet is not None else set()
        cancelled = run_id in running
        if fleet is not None and cancelled:
            problems = record_cancellations(session.context.google, session.plan.bucket, [run_id])
            stop(fleet, run_id)
        else:
            lease = pod_lease(session.plan, session.context)
            try:
                other = lease.current_other()
                if other is not None and other.record.run_id == run_id:
                    lease.request_release("cancelled")
                    cancelled = True
            except GoogleError as error:
                problems = [str(error)]
        left = end_pods(session.plan, session.context, "the trainer's run was cancelled")
    for problem in left:
        print(f"not deleted: {problem}; `slipway down` deletes it", file=sys.stderr)
    if command.flags.json:
        print(json.dumps({"run": run_id, "cancelled": cancelled, "running": sorted(running)}))
    elif cancelled:
        here = session.plan.config.cloud.kind == "here"
        pod = "" if here else "the pod stays, `slipway down` deletes it; "
        print_wrapped([f"{run_id} is cancelled; {pod}`slipway up` resumes the run"])
    else:
        others = f"; running on the pod: {', '.join(sorted(running))}" if running else ""
        print_wrapped([f"{run_id} is not running{others}"])
    if problems:
        raise CloudError(f"a controller that drives {run_id} goes on with it, for it was not told: {problems[0]}")
    return 0
