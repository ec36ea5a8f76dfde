"""Play a first contact: one small run on a project, preempted once, recorded, and everything deleted at the end."""

import getpass
import platform
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from controller.checks.preflight import probe_cloud
from controller.cleanup.orphans import billed_items
from controller.cleanup.teardown import other_buckets, plan_teardown
from controller.core.errors import ConfigError, OverBudgetError, SlipwayError
from controller.core.events import BoardScreen
from controller.core.this_process import DISTRIBUTION, InterruptedSleepError
from controller.gcp.google_errors import NotFoundError, ServiceDisabledError
from controller.gcp.prices import hourly_price
from controller.plan.build import Plan
from controller.run.drive import drive, open_run
from controller.run.options import RunOptions
from controller.run.session import Session, open_session
from controller.witness.drill import Limits, TimeLimit, drill_options, ended_in_order, shielded
from controller.witness.recording import Recording
from controller.witness.stages import FirstRun, StageLog
from controller.witness.stand_ins import StandIns

TEARDOWN_TRIES = 3
"""Tries to delete everything: Google may call a network used for some minutes after its last user has gone."""
TEARDOWN_PAUSES = 6
"""Polls between two tries."""
NOTHING_LEFT, FAILED, SOMETHING_LEFT, INTERRUPTED = 0, 2, 1, 130
"""Exit codes. Only SOMETHING_LEFT means that something may still be billed."""
MakeScreen = Callable[[Plan], AbstractContextManager[BoardScreen]]


@dataclass
class Outcome:
    """How a first contact ended."""

    recording: Recording
    left: list[str] = field(default_factory=list)
    """Titles of what could not be deleted."""
    refused: list[str] = field(default_factory=list)
    """Files that the scan for secrets deleted, with the reason."""
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        if self.left:
            return SOMETHING_LEFT
        if self.interrupted:
            return INTERRUPTED
        stages_ok = all(stage.outcome == "ok" for stage in self.recording.stages)
        return NOTHING_LEFT if stages_ok and not self.refused else FAILED

    def as_document(self) -> dict[str, Any]:
        stages = [stage.to_json() | {"steps": len(stage.steps)} for stage in self.recording.stages]
        return {"folder": str(self.recording.folder), **self.recording.facts, "stages": stages, "left": self.left,
                "refused": self.refused}  # fmt: skip


class Witness:
    """One first contact. `make_screen` shows the progress of a plan; `say` prints a line."""

    def __init__(
        self, options: RunOptions, limits: Limits, folder: Path, make_screen: MakeScreen, say: Callable[[str], object]
    ) -> None:
        """Compose the run. Raises ConfigError if the overrides are unusable, or the folder holds something."""
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"--output {folder}: is not empty; name another folder")
        self._agreed = options.yes
        self.options, self.limits, self.folder = drill_options(options, limits), limits, folder
        self._make_screen, self._say = make_screen, say
        self._before: set[str] = set()

    def play(self) -> Outcome:
        """Play all stages; whatever happens after the user has agreed, everything is deleted again.

        Raises:
            ConfigError: the user did not agree, or the checks found an error; nothing was made.
        """
        with ended_in_order():
            outcome = self._look()
            log, limit = StageLog(outcome.recording), TimeLimit(60 * self.limits.minutes)
            try:
                with limit:
                    self._first_run(outcome, log, limit)
            except KeyboardInterrupt:
                log.end("limit" if limit.reason else "interrupted", limit.reason or "Ctrl-C")
                outcome.interrupted = not limit.reason
            except OverBudgetError as error:
                log.end("limit", str(error))
            except SlipwayError as error:
                log.end("failed", str(error))
            except Exception as error:  # a mistake of ours, which must not keep a pod alive
                log.end("failed", f"{type(error).__name__}: {error}")
            finally:
                with shielded(self._say):
                    self._clean_up(outcome, log)
        return outcome

    def _look(self) -> Outcome:
        """Check the plan and the project, and ask for permission to spend. Makes nothing."""
        with open_session(self.options) as session, ExitStack() as stack:
            recording = Recording(self.folder, session.context.clock, known_values(session))
            stack.enter_context(recording.recorded(session.context.google))
            log = StageLog(recording)
            log.begin("look")
            findings = probe_cloud(session.plan.config, session.context)
            if errors := [finding for finding in findings if finding.severity == "error"]:
                raise ConfigError(errors)
            for finding in findings:
                log.note(f"{finding.severity}: {finding}")
            refuse_if_in_use(session)
            self._before = {item.title for item in billed_items(session.context, [])}
            price = hourly_price(session.plan.config, session.context.clock.now())
            usd, minutes = self.limits.usd, self.limits.minutes
            recording.facts |= {
                "slipway": version(DISTRIBUTION), "python": platform.python_version(), "system": platform.platform(),
                "accelerator_type": session.plan.config.tpu.accelerator_type, "zone": session.plan.config.tpu.zone,
                "cloud": session.plan.config.cloud.kind, "max_usd": usd, "max_minutes": minutes,
                "usd_per_hour": price.total,
            }  # fmt: skip
            limit = f"for at most ${usd:.2f} and" if price.total is not None else "(price unknown) for at most"
            cost = f"{limit} {minutes:g} minutes, at {price}"
            with self._make_screen(session.plan) as screen:
                question = f"Create {session.plan.node.title} {cost}, and delete everything at the end?"
                if session.context.is_billed and not screen.ask(question, self._agreed):
                    raise ConfigError("nothing was created; pass --yes to skip the prompt")
            log.end("ok")
        return Outcome(recording)

    def _first_run(self, outcome: Outcome, log: StageLog, limit: TimeLimit) -> None:
        """Drive the run through its preemption to its end."""
        recording = outcome.recording
        log.begin("first run")
        with open_run(self.options) as (plan, context, emulator), recording.recorded(context.google):
            first = FirstRun(plan, context, recording, log, limit)
            context.events.add_listener(first.on_event)
            context.events.add_listener(log.on_event)
            try:
                with self._make_screen(plan) as screen:
                    result = drive(self.options, plan, context, emulator, screen)
            except InterruptedSleepError:  # of a thread that Ctrl-C or the limit woke up
                raise KeyboardInterrupt from None
            finally:
                first.close()
            if result is None:
                raise KeyboardInterrupt  # Ctrl-C detaches from a run; here it ends it
        if problem := first.problem():
            log.end("failed", problem)
        log.end("ok")

    def _clean_up(self, outcome: Outcome, log: StageLog) -> None:
        """Delete everything, verify that it has gone, and write the recording."""
        recording = outcome.recording
        try:
            log.skip_rest()
            log.begin("clean up")
            log.end(*self._tear_down(recording, log))
            # an upper bound of the cost: the list price for all of the time since the first creation
            methods = (".nodes.create", ".queuedResources.create")
            lines = [line for line in recording.requests if line.method_id.endswith(methods) and line.status == 200]
            hours = (recording.seconds() - lines[0].began) / 3600 if lines else 0.0
            price = recording.facts["usd_per_hour"]
            recording.facts["pod_minutes_at_most"] = round(60 * hours, 2)
            recording.facts["usd_at_most"] = None if price is None else round(hours * price, 2)
            log.begin("verify")
            outcome.left = self._left(recording)
            log.end("failed" if outcome.left else "ok", ", ".join(outcome.left))
        except KeyboardInterrupt:
            log.end("interrupted", "Ctrl-C")
            outcome.interrupted = True
            outcome.left = outcome.left or ["what the clean-up had not deleted yet"]
        finally:
            recording.facts["left"] = outcome.left
            outcome.refused = recording.save()

    def _tear_down(self, recording: Recording, log: StageLog) -> tuple[str, str]:
        """Delete everything; return the outcome of the stage. The pod goes first if the rest is refused."""
        problem = ""
        for number in range(TEARDOWN_TRIES):
            for everything in (True, False):
                try:
                    with self._session(recording, log) as session, self._make_screen(session.plan) as screen:
                        if number and everything:
                            session.context.clock.sleep(TEARDOWN_PAUSES * session.context.poll_seconds)
                        plan_teardown(session, everything).execute(screen)
                except Exception as error:  # whatever it is, the next try may succeed
                    problem = str(error) if isinstance(error, SlipwayError) else f"{type(error).__name__}: {error}"
                    log.note(problem)
                else:
                    if everything:
                        return "ok", ""
                    break
        return "failed", problem

    def _left(self, recording: Recording) -> list[str]:
        """Return what is there that was not there before: our resources, and everything billed with our label."""
        try:
            with self._session(recording) as session:
                rows = plan_teardown(session, everything=True).rows
                ours = [row.resource.title for row in rows if row.resource.scope in ("pod", "shared")
                        and getattr(row.observed, "is_managed", True) and row.resource.id != "apis/apis"]  # fmt: skip
                billed = [item.title for item in billed_items(session.context, [])]
                buckets = [f"bucket {name}" for name in other_buckets(session) if name.endswith("-witness")]
                buckets += [f"unknown: {what}" for what in sorted(session.context.google.unlisted)]
        except SlipwayError as error:
            return [f"unknown, because Google could not be asked: {error}"]
        return list(dict.fromkeys([*ours, *(title for title in billed if title not in self._before), *buckets]))

    @contextmanager
    def _session(self, recording: Recording, log: StageLog | None = None) -> Iterator[Session]:
        opened = open_session(self.options, own_code=True)
        with opened as session, recording.recorded(session.context.google):
            if log is not None:
                session.context.events.add_listener(log.on_event)
            yield session


def refuse_if_in_use(session: Session) -> None:
    """Refuse to start where the clean-up would delete something that is in use. Raises ConfigError."""
    plan, context = session.plan, session.context
    try:
        pod = plan.node.find(context)
    except ServiceDisabledError:
        pod = None
    if pod is not None:
        raise ConfigError(f"{plan.node.title} exists already; delete it with `slipway down`, or wait for its user")
    try:
        objects = context.google.call("storage", "objects.list", bucket=plan.bucket, maxResults=1).get("items")
    except (NotFoundError, ServiceDisabledError):
        objects = None
    if objects:
        raise ConfigError(
            f"gs://{plan.bucket} of an earlier witness holds objects, which this one would delete; delete it with "
            "`gcloud storage rm --recursive`, or set another cloud.bucket"
        )


def known_values(session: Session) -> StandIns:
    """Return the stand-ins of what is known to identify the user before the first request."""
    plan, context = session.plan, session.context
    made = StandIns()
    made.add("project", plan.project)
    made.add("bucket", plan.bucket)
    made.add("account", str(plan.config.cloud.service_account).partition("@")[0])
    _, _, key = context.ssh_login.key_line().partition(":")
    made.learn(key)
    for name in (getpass.getuser(), Path.home().name):
        made.add("user", name)
    made.add("user", socket.gethostname())
    if context.google.has_credentials:
        made.add("token", context.google.token())
        made.add("account", (context.google.service_account or "").partition("@")[0])
    return made
