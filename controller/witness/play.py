"""Play first contacts: on each plane one small run, preempted once and recovered, recorded, and everything deleted."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from controller.checks.preflight import probe_cloud
from controller.cleanup.orphans import billed_items
from controller.cleanup.teardown import other_buckets, plan_teardown
from controller.core.errors import ConfigError, OverBudgetError, SlipwayError
from controller.core.events import BoardScreen
from controller.core.this_process import DISTRIBUTION, Clock, InterruptedSleepError
from controller.gcp.google_errors import GoogleError
from controller.gcp.prices import hourly_price
from controller.plan.build import Plan
from controller.resources.pod.tpu_api import quota_limits
from controller.run.drive import drive, open_run
from controller.run.options import RunOptions
from controller.run.session import Session, open_session
from controller.witness.compare import Difference, table
from controller.witness.drill import (
    FirstRun,
    Limits,
    TimeLimit,
    drill_options,
    ended_in_order,
    learn_known,
    refuse_if_in_use,
    shielded,
)
from controller.witness.recording import REQUESTS, Recording, load
from controller.witness.replay import FIELD_PACE, replay_recording
from controller.witness.stand_ins import StandIns

TEARDOWN_TRIES, TEARDOWN_PAUSES = 3, 6
"""Tries to delete everything, since Google may call a network used for some minutes; and polls between two tries."""
STAGES = ("init", "plan", "up", "checkpoint", "preempt", "recover", "down", "verify")
"""init: quotas. plan: checks and price. up: to the launched program. checkpoint: until it is in the bucket. preempt:
the pod is deleted by hand, until the program runs on a new one. recover: until the run has finished. down: `down
--all`. verify: what is left."""
NOTHING_LEFT, FAILED, SOMETHING_LEFT, INTERRUPTED = 0, 2, 1, 130
"""Exit codes. Only SOMETHING_LEFT means that something may still be billed."""
MakeScreen = Callable[[Plan], AbstractContextManager[BoardScreen]]


@dataclass
class Outcome:
    """How it ended."""

    recording: Recording
    left: list[str] = field(default_factory=list)
    """Titles of what could not be deleted."""
    refused: list[str] = field(default_factory=list)
    """Files that the scan for secrets deleted, with the reason."""
    interrupted: bool = False
    differences: list[Difference] | None = None
    """What the emulated cloud answers otherwise; None if it was not asked."""

    @property
    def exit_code(self) -> int:
        if self.left:
            return SOMETHING_LEFT
        if self.interrupted:
            return INTERRUPTED
        stages_ok = all(stage.outcome == "ok" for stage in self.recording.stages)
        return NOTHING_LEFT if stages_ok and not self.refused else FAILED

    def as_document(self) -> dict[str, Any]:
        told: dict[str, Any] = {"stages": [stage.to_json() for stage in self.recording.stages], "left": self.left}
        told["differences"] = None if self.differences is None else [vars(one) for one in self.differences]
        return {"folder": str(self.recording.folder), **self.recording.facts, **told, "refused": self.refused}


class Witness:
    """First contacts, one per plane. `make_screen` shows the progress of a plan; `say` prints a line."""

    def __init__(
        self, options: RunOptions, limits: Limits, folder: Path, make_screen: MakeScreen, say: Callable[[str], object],
        plane: str = "both",
    ) -> None:  # fmt: skip
        """Compose the runs. Raises ConfigError if the overrides are unusable, or the folder holds something."""
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"--output {folder}: is not empty; name another folder")
        self._agreed, self.limits = options.yes, limits
        self.runs = drill_options(options, limits, plane)
        self._make_screen, self._say = make_screen, say
        self.recording = Recording(folder, Clock(), StandIns())
        self._pace, self._is_googles = FIELD_PACE, True
        self._plane, self._before = "", set[str]()

    def play(self) -> Outcome:
        """Play all stages; whatever happens after the user has agreed, everything is deleted again.

        Raises ConfigError if the user did not agree, or the checks found an error; nothing was made.
        """
        outcome = Outcome(self.recording)
        with ended_in_order():
            self._look()
            try:
                for plane, options in self.runs.items():
                    if not (outcome.left or outcome.interrupted):
                        self._plane = plane
                        self._play(options, outcome)
            finally:
                self.recording.facts["left"] = outcome.left
                outcome.refused = self.recording.save()
        if not outcome.refused:
            self._compare(outcome)
        return outcome

    def _compare(self, outcome: Outcome) -> None:
        """Ask the emulated cloud the same, and add what differs to the README."""
        self._say("comparing with the emulated cloud")
        _, lines = load(self.recording.folder / REQUESTS)
        try:
            found = replay_recording(lines, self._pace, is_googles=self._is_googles)
        except (SlipwayError, OSError) as error:
            self._say(f"not compared: {error}")
            return
        outcome.differences = list(found.differences.values())
        notes = "".join(f"- {note}\n" for note in found.notes)
        outcome.refused = self.recording.save(
            f"\n## The emulated cloud differs\n\n{table(outcome.differences)}\n{notes}"
        )

    def _begin(self, name: str) -> None:
        self.recording.begin(f"{self._plane}: {name}")

    def _look(self) -> None:
        """Check the plans and the project, and ask once for permission to spend. Makes nothing."""
        told, total, minutes = list[str](), 0.0, self.limits.minutes
        billed: Plan | None = None
        for plane, options in self.runs.items():
            self._plane = plane
            with open_session(options) as session:
                self._check(session)
                plan = session.plan
                billed = plan if session.context.is_billed else billed
                price = hourly_price(plan.config, session.context.clock.now())
            pod = {"type": plan.config.tpu.accelerator_type, "zone": plan.config.tpu.zone, "usd_per_hour": price.total}
            self.recording.facts["pods"][plane] = pod
            total += (price.total or 0.0) * minutes / 60
            told.append(f"{plan.node.title} for at most {minutes:g} minutes, at {price}")
        if total > self.limits.usd:
            raise ConfigError(
                f"--max-dollars {self.limits.usd:g}: {'; '.join(told)}; that is ${total:.2f} in all; choose a smaller "
                "type, fewer --minutes, one --plane, or more dollars"
            )
        if billed is not None:
            with self._make_screen(billed) as screen:
                question = f"Create {'; then '.join(told)}: at most ${total:.2f}, and delete everything at the end?"
                if not screen.ask(question, self._agreed):
                    raise ConfigError("nothing was created; pass --yes to skip the prompt")

    def _check(self, session: Session) -> None:
        """Ask what `init` and `plan` ask. Raises ConfigError if something is in the way."""
        recording, config, context = self.recording, session.plan.config, session.context
        if not recording.stages:
            recording.start(context.clock)
        learn_known(recording.stand_ins, session)
        self._is_googles = config.cloud.kind != "local"
        self._pace = getattr(config.cloud, "operation_seconds", FIELD_PACE)
        recording.facts |= {
            "slipway": version(DISTRIBUTION), "cloud": config.cloud.kind, "pace": self._pace,
            "max_usd": self.limits.usd, "max_minutes": self.limits.minutes, "pods": recording.facts.get("pods", {}),
        }  # fmt: skip
        with recording.recorded(context.google):
            self._begin("init")
            with suppress(GoogleError):
                quota_limits(context)
            self._begin("plan")
            findings = probe_cloud(config, context)
            if errors := [finding for finding in findings if finding.severity == "error"]:
                raise ConfigError(errors)
            for finding in findings:
                recording.note(f"{finding.severity}: {finding}")
            refuse_if_in_use(session)
            self._before |= {item.title for item in billed_items(context, [])}
            recording.end("ok")

    def _play(self, options: RunOptions, outcome: Outcome) -> None:
        recording, limit = self.recording, TimeLimit(60 * self.limits.minutes)
        began = recording.seconds()
        try:
            with limit:
                self._run(options, limit)
        except KeyboardInterrupt:
            recording.end("limit" if limit.reason else "interrupted", limit.reason or "Ctrl-C")
            outcome.interrupted = not limit.reason
        except OverBudgetError as error:
            recording.end("limit", str(error))
        except SlipwayError as error:
            recording.end("failed", str(error))
        except Exception as error:  # a mistake of ours, which must not keep a pod alive
            recording.end("failed", f"{type(error).__name__}: {error}")
        finally:
            with shielded(self._say):
                self._clean_up(options, outcome, began)

    def _run(self, options: RunOptions, limit: TimeLimit) -> None:
        """Drive the run through its preemption to its end."""
        recording = self.recording
        self._begin("up")
        with open_run(options) as (plan, context, emulator), recording.recorded(context.google):
            first = FirstRun(plan, context, recording, self._begin, limit)
            context.events.add_listener(first.on_event)
            try:
                with self._make_screen(plan) as screen:
                    result = drive(options, plan, context, emulator, screen)
            except InterruptedSleepError:  # of a thread that Ctrl-C or the limit woke up
                raise KeyboardInterrupt from None
            finally:
                first.close()
            if result is None:
                raise KeyboardInterrupt  # Ctrl-C detaches from a run; here it ends it
        if problem := first.problem():
            recording.end("failed", problem)
        recording.end("ok")

    def _clean_up(self, options: RunOptions, outcome: Outcome, began: float) -> None:
        """Delete everything and verify that it has gone."""
        recording, facts = self.recording, self.recording.facts["pods"][self._plane]
        try:
            for name in STAGES[2:-2]:
                if not any(stage.name == f"{self._plane}: {name}" for stage in recording.stages):
                    self._begin(name)
                    recording.end("skipped")
            self._begin("down")
            recording.end(*self._tear_down(options))
            # an upper bound of the cost: the list price for all of the time since the first creation
            methods = (".nodes.create", ".queuedResources.create", "nstances.bulkInsert", "nstances.insert",
                       "instanceGroupManagers.insert")  # fmt: skip
            made = [line.began for line in recording.requests
                    if line.method_id.endswith(methods) and line.status == 200 and line.began >= began]  # fmt: skip
            hours = (recording.seconds() - made[0]) / 3600 if made else 0.0
            facts["minutes_at_most"] = round(60 * hours, 2)
            facts["usd_at_most"] = None if facts["usd_per_hour"] is None else round(hours * facts["usd_per_hour"], 2)
            self._begin("verify")
            outcome.left = self._left(options)
            recording.end("failed" if outcome.left else "ok", ", ".join(outcome.left))
        except KeyboardInterrupt:
            recording.end("interrupted", "a second Ctrl-C")
            outcome.interrupted = True
            outcome.left = outcome.left or ["unknown, because the clean-up was interrupted"]

    def _tear_down(self, options: RunOptions) -> tuple[str, str]:
        """Delete everything; return the outcome of the stage. The pod goes first if the rest is refused."""
        problem = ""
        for number in range(TEARDOWN_TRIES):
            for everything in (True, False):
                try:
                    with self._session(options) as session, self._make_screen(session.plan) as screen:
                        if number and everything:
                            session.context.clock.sleep(TEARDOWN_PAUSES * session.context.poll_seconds)
                        plan_teardown(session, everything).execute(screen)
                except Exception as error:  # whatever it is, the next try may succeed
                    problem = str(error) if isinstance(error, SlipwayError) else f"{type(error).__name__}: {error}"
                    self.recording.note(problem)
                else:
                    if everything:
                        return "ok", ""
                    break
        return "failed", problem

    def _left(self, options: RunOptions) -> list[str]:
        """Return what is there that was not there before: our resources, and everything billed with our label."""
        try:
            with self._session(options) as session:
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
    def _session(self, options: RunOptions) -> Iterator[Session]:
        with open_session(options, own_code=True) as session, self.recording.recorded(session.context.google):
            yield session
