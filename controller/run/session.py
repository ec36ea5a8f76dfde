"""Session that the commands share: a config, its plan, a connection to the cloud, and the pod if it exists."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from controller.connect import open_context, opening_message, project_of
from controller.context import Context
from controller.core.errors import ConfigError
from controller.emulator import Emulator
from controller.gcp.google_errors import ForbiddenError, ServiceDisabledError
from controller.plan.build import Plan, build_plan
from controller.reconcile import Absent, Pending
from controller.records.ledger import Ledger
from controller.records.restore import open_record, plan_of_launched
from controller.records.trust import require_trust
from controller.records.unfinished import record_kept_result
from controller.resources.machines import SshAccess
from controller.resources.pod.node import Node, describe
from controller.run.options import RunOptions
from controller.ssh.fleet import Fleet


@dataclass(frozen=True)
class Session:
    """Opened plan with a connection to its cloud."""

    plan: Plan
    context: Context
    ledger: Ledger
    emulator: Emulator | None

    def node(self) -> Absent | Pending | Node:
        try:
            return self.plan.observe_pod(self.context)
        except ServiceDisabledError:
            return Absent()  # without the API there is no pod

    def fleet(self) -> Fleet | None:
        """Open SSH to the pod's workers; None unless the pod is READY."""
        node = self.node()
        if not isinstance(node, Node) or not node.is_ready:
            return None
        with suppress(ForbiddenError):  # then the workers report it
            self.plan.get(SshAccess).authorize_key(self.context, node)  # another controller may have created the pod
        return node.fleet(self.context)

    def authorized_fleet(self) -> Fleet:
        """Open SSH to the pod's workers, which accept our key. Raises ConfigError if the pod is not ready."""
        node = self.node()
        if not isinstance(node, Node) or not node.is_ready:
            raise ConfigError(f"pod {self.plan.node.name} is {describe(node)}; run `slipway up`")
        self.plan.get(SshAccess).authorize_key(self.context, node)
        return node.fleet(self.context)

    def require_pod(self) -> None:
        """Raise ConfigError for `cloud=here`, which has no pod to delete or stop."""
        if self.plan.config.cloud.kind == "here":
            raise ConfigError(
                "cloud=here has no pod to delete or stop: `slipway cancel` ends the run, and what runs leave is in "
                f"{self.plan.bucket}"
            )

    def parse_worker(self, text: str | int) -> int:
        """Return the worker that `--worker` names. Raises ConfigError if no worker has that number."""
        last = self.plan.node.spec.workers - 1
        if not str(text).isdigit() or int(text) > last:
            raise ConfigError(f"--worker {text}: the pod has workers 0 to {last}")
        return int(text)

    def parse_workers(self, text: str) -> list[int]:
        """Return the workers that `--worker all`, `--worker 0,2` or `--worker 3` names. Raises ConfigError."""
        if text == "all":
            return list(range(self.plan.node.spec.workers))
        return sorted({self.parse_worker(part.strip()) for part in text.split(",")})


@contextmanager
def open_session(
    options: RunOptions,
    *,
    keep_awake: bool = False,
    ends: bool = False,
    own_code: bool = False,
    only_results: bool = False,
) -> Iterator[Session]:
    """Open a session that looks or ends, and close it at the end. Nothing that a record holds is imported or executed.

    Args:
        options: those of the verb.
        keep_awake: leave an emulated cloud without nodes running; it stops by itself after idle minutes.
        ends: whether the verb ends something that is billed, and so waits for no bucket. Else a result that this
            machine keeps of the run is recorded first.
        own_code: import own steps that the overrides name, to delete them. Those of a record are never imported.
        only_results: as in `open_record`.
    """
    opened = open_plan(options, keep_awake=keep_awake, drives=False, own_code=own_code, only_results=only_results)
    with opened as (plan, context, emulator):
        session = Session(plan, context, Ledger(context.google, plan.bucket, plan.run_id), emulator)
        if ends:
            context.google.hurry()
        else:
            record_kept_result(context, session.ledger)
        yield session


@contextmanager
def open_plan(
    options: RunOptions,
    *,
    drives: bool,
    keep_awake: bool = False,
    own_code: bool = True,
    only_results: bool = False,
) -> Iterator[tuple[Plan, Context, Emulator | None]]:
    """Open the plan of the overrides, or of the record of `options.run_id`, and a connection to its cloud.

    Raises ConfigError if there is no usable config or record, or the record is not trusted.

    Args:
        options: those of the verb.
        drives: whether the verb executes the run: the record of a finished one then means a new run like it, and one
            that this machine did not make must be trusted.
        keep_awake: as in `open_session`.
        own_code: import own steps that the overrides name.
        only_results: as in `open_record`.
    """
    with ExitStack() as stack:
        if options.run_id:
            with options.showing(f"reading the record of {options.run_id}"):
                opened = open_record(options.run_id, options.overrides, Path.cwd(), only_results=only_results)
                found = stack.enter_context(opened)
            if drives:
                state, asks = found.context.state_dir, not options.json
                require_trust(found.document, found.config, found.code, state, trust=options.trust, asks=asks)
            yield found.plan(drives=drives), found.context, found.emulator
            return
        with options.waiting() as doing:
            doing("composing the config")
            config = options.checked_config()
            doing("hashing code and data")
            plan = build_plan(config, project_of(config), Path.cwd(), own_code=own_code)
            doing(opening_message(config))
            context, emulator = stack.enter_context(open_context(config, keep_awake=keep_awake))
        if not drives and options.meant not in ("", plan.run_id):
            plan = plan_of_launched(options.meant, plan, context, emulator)
        yield plan, context, emulator
