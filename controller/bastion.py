"""Drive a run on a bastion: `up` of the run that was handed over, as the VM's service account.

The orders come as JSON on stdin, the plan from the record in the bucket. Resources that pods share exist
already; only the pod is created, kept and deleted here, so the account needs no further rights.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.schema.config import Config
from conf.schema.validation import validate
from controller.config.compose import sound
from controller.connect import POLL_SECONDS, make_context
from controller.core.errors import SlipwayError
from controller.core.json_documents import load
from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.gcp.credentials import SCOPES
from controller.gcp.google_errors import ForbiddenError, GoogleError
from controller.plan.build import Plan
from controller.records.restore import plan_from_record
from controller.resources.accounts import BastionRoles
from controller.resources.bastion_boot import TRY_AGAIN
from controller.resources.bastion_vm import Bastion, SlipwayPackage
from controller.resources.services import Services
from controller.run.drive import drive as drive_run
from controller.run.options import RunOptions
from controller.run.text_screen import TextScreen
from controller.ssh.route import IAP_ENDPOINT


def main() -> int:
    try:
        drive(load(sys.stdin.read(), "the bastion's orders"))
    except SlipwayError as error:
        print(f"error: {error}", file=sys.stderr)
        return TRY_AGAIN if may_pass(error) else error.exit_code
    return 0


def may_pass(error: BaseException) -> bool:
    """Return whether Google's refusal or silence is the cause: fresh roles, or a metadata server that was away."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return any(isinstance(e, GoogleError) and (isinstance(e, ForbiddenError) or e.is_transient) for e in chain)


def drive(orders: dict[str, Any]) -> None:
    """Drive the run to its end. Raises SlipwayError when it is given up; the lease tells controllers that watch."""
    from google.auth import compute_engine

    clock = Clock()
    google = GoogleClient(compute_engine.Credentials(scopes=list(SCOPES)), clock, orders["roots"])
    document = load(google.download(orders["bucket"], orders["handover"]), orders["handover"])
    home = Path(orders["home"]).expanduser()
    config = local_config(document["config"], home)
    context = make_context(
        config,
        document["project"],
        google,
        clock,
        home,
        poll_seconds=orders["pace"] if config.cloud.kind == "local" else POLL_SECONDS,
        iap=orders["iap"] or IAP_ENDPOINT,
        ssh_config=Path(orders["ssh_config"]) if orders["ssh_config"] else None,
        extra_ssh_keys=(document["ssh_key"],),
    )
    try:
        plan = pod_plan(plan_from_record(document, config, google, home))
        options = RunOptions(tuple(document["overrides"]), yes=document["yes"])
        with TextScreen(plan) as screen:
            drive_run(options, plan, context, None, screen, handed_over=document)
    finally:
        context.close()


def local_config(recorded: dict[str, Any], home: Path) -> Config:
    """Return the config for this machine: its own folder and, in a single region, the workers' internal addresses.

    Raises ConfigError if another version of Slipway recorded the config.
    """
    config = sound(validate(recorded))
    changed: dict[str, Any] = {"run": config.run.model_copy(update={"state_dir": str(home)})}
    if config.ssh.method == "auto" and len(config.regions) == 1:
        changed["ssh"] = config.ssh.model_copy(update={"method": "internal"})
    return config.model_copy(update=changed)


def pod_plan(plan: Plan) -> Plan:
    """Return the plan without shared resources and the bastion itself."""
    theirs = Services | SlipwayPackage | Bastion | BastionRoles
    kept = [r for r in plan.resources if r.scope != "shared" and not isinstance(r, theirs)]
    ids = {r.id for r in kept}
    return replace(
        plan, resources=tuple(replace(r, depends_on=tuple(n for n in r.depends_on if n in ids)) for r in kept)
    )


if __name__ == "__main__":
    sys.exit(main())
