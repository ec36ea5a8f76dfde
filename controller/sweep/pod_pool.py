"""Drive a sweep to its end under its lease: one thread per pod takes the next run as soon as the pod is free.

`up` itself drives each run, recovery included: nothing here knows about preemptions. The run of each pod is recorded in
the bucket before its launch. A controller that takes over gives the pod the same run again: it may still be running
there, and two programs of one run would write to the same place.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from conf.schema.config import Config
from controller.connect import open_context, project_of, require_project
from controller.context import Context
from controller.core.errors import ConfigError, LeaseLostError, ProgramFailedError, SlipwayError
from controller.core.events import Event, Events, confirm
from controller.core.text import plural, print_wrapped
from controller.emulator import Emulator
from controller.gcp.google_errors import GoogleError
from controller.gcp.outages import wait_out
from controller.lease import Lease, LeaseHeldError, ReleaseRequestedError
from controller.lease_store import LeaseSnapshot
from controller.reconcile import reconcile
from controller.records.ledger import Ledger, Result
from controller.resources.pod.node import Node
from controller.run.drive import drive
from controller.run.driven_here import driven_here, end_starting, is_driven_here
from controller.run.launch import stop
from controller.run.options import RunOptions
from controller.sweep.board import Board, BoardRow, BoardScreen, format_counts, live_board
from controller.sweep.definition import JobBuilder, SearchSource, SweepDefinition, SweepJob, with_pod_number
from controller.sweep.sweep_session import (
    SweepSession,
    delete_if_unused,
    force_delete,
    managed_nodes,
    open_sweep,
    record_assignment,
    running_runs,
)

SHUTDOWN_SECONDS = 10.0
"""Time for the threads to release their pods after Ctrl-C; a worker may be slow to answer."""


class GridSource:
    """Runs of a grid, in order; a run that a pod had when the last controller ended goes to that pod first.

    Threads call it one at a time, as they do a `SearchSource`.
    """

    def __init__(self, jobs: Iterable[SweepJob], held: dict[int, str]) -> None:
        left = {job.run_id: job for job in jobs}
        self._assigned = {pod: left.pop(run) for pod, run in sorted(held.items()) if run in left}
        self._remaining = deque(left.values())

    def next_job(self, pod: int) -> SweepJob | None:
        """Return the next run, or None if there is none left for this pod."""
        if pod in self._assigned:
            return self._assigned.pop(pod)
        return self._remaining.popleft() if self._remaining else None

    def job_ended(self, job: SweepJob, result: Result | None) -> None:
        """Do nothing: a run that was given up (None) comes to no pod again."""

    def should_prune(self, job: SweepJob, event: Event) -> bool:
        return False


@dataclass
class PodPool:
    """Runs every job of a source; `failed` holds those that were given up, with the reason."""

    sweep_id: str
    bucket: str
    lease: Lease
    """Lease of the sweep, which we hold; without it no further run is started."""
    source: GridSource | SearchSource
    builder: JobBuilder
    board: Board
    base_config: Config
    pods: int
    failed: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """The whole message of each run in `failed`; the first line of it is there."""
    _draining: bool = False
    """Set when a run has failed and the policy starts no further one."""
    _detaching: threading.Event = field(default_factory=threading.Event)
    """Set when this controller exits; active runs continue without it."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _contexts: list[Context] = field(default_factory=list)
    _errors: list[BaseException] = field(default_factory=list)
    _fencing_errors: list[LeaseLostError] = field(default_factory=list)

    def run(self, further_pods: Iterable[int] = ()) -> None:
        """Run jobs until none is left.

        Args:
            further_pods: numbers of pods that an earlier controller used.

        Raises:
            KeyboardInterrupt: active runs continue without us.
            LeaseLostError: another controller holds the sweep or one of its pods; active runs continue.
        """
        numbers = sorted({*range(1, self.pods + 1), *further_pods})
        threads = [threading.Thread(target=self._run_pod, args=(n,), daemon=True, name=f"pod-{n}") for n in numbers]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    self.lease.raise_if_lost()
                    thread.join(0.2)
            self.lease.raise_if_lost()
        except (KeyboardInterrupt, LeaseLostError):
            self._shut_down(threads)
            raise
        if self._errors:
            raise self._errors[0]
        if self._fencing_errors:
            raise self._fencing_errors[0]

    def _shut_down(self, threads: Iterable[threading.Thread]) -> None:
        """Wait for each thread to release its pod's lease; one that is too slow ends with the process."""
        with self._lock:
            self._detaching.set()
            worlds = list(self._contexts)
        for context in worlds:
            context.clock.interrupt()
        late = time.monotonic() + SHUTDOWN_SECONDS
        for thread in threads:
            thread.join(max(0.0, late - time.monotonic()))

    def _run_pod(self, pod: int) -> None:
        cleanup = self.base_config.cleanup
        try:
            job = self._next_job(pod)
            if job is None and cleanup.on_success != "delete":
                return
            with open_context(with_pod_number(self.base_config, pod), keep_awake=True) as (context, emulator):
                with self._lock:
                    self._contexts.append(context)
                    if self._detaching.is_set():
                        return
                try:
                    while job is not None:
                        record_assignment(context.google, self.bucket, self.sweep_id, pod, job.run_id)
                        if not self._run_job(job, pod, context, emulator):
                            return
                        job = self._next_job(pod)
                except GoogleError:  # between two runs: the pod waits for none that may never come
                    if cleanup.on_success == "delete":
                        self._release_pod(pod, context)
                    raise
                if cleanup.on_success == "delete":
                    self._release_pod(pod, context)
        except BaseException as error:  # raised again in the thread that started the sweep
            if not self._detaching.is_set():
                self._errors.append(error)
                self._draining = True

    def _next_job(self, pod: int) -> SweepJob | None:
        self.lease.ensure()
        with self._lock:
            return None if self._draining or self._detaching.is_set() else self.source.next_job(pod)

    def _run_job(self, job: SweepJob, pod: int, context: Context, emulator: Emulator | None) -> bool:
        """Run one job as often as the policy allows; return whether to keep using the pod."""
        sweep = self.base_config.sweep
        tries = 1 + (sweep.retries if sweep.on_failure == "retry" else 0)
        self.board.add(BoardRow(job.run_id, job.variant.title))
        for attempt in range(tries):
            self.board.set_state(job.run_id, "running", pod=pod, began=context.clock.now(), why="")
            try:
                result = self._attempt_job(job, pod, context, emulator)
            except LeaseLostError as error:
                self.board.set_state(job.run_id, "left to another controller", str(error))
                self._fencing_errors.append(error)
                return False
            except SlipwayError as error:
                why = str(error).partition("\n")[0]
                again = "; retrying" if attempt + 1 < tries else ""
                self.board.set_state(job.run_id, "failed", f"{why}{again}", why=why)
                self.failed[job.run_id], self.errors[job.run_id] = why, str(error)
            else:
                self.failed.pop(job.run_id, None)
                if result is None:
                    self.board.set_state(job.run_id, "ended early", why="pruned or cancelled")
                with self._lock:
                    self.source.job_ended(job, result)
                return True
        with self._lock:
            self.source.job_ended(job, None)
            self._draining = self._draining or sweep.on_failure == "stop"
        return sweep.on_failure != "stop" or self.base_config.cleanup.on_failure == "delete"

    def _attempt_job(self, job: SweepJob, pod: int, context: Context, emulator: Emulator | None) -> Result | None:
        plan = self.builder.build_plan(with_pod_number(job.config, pod))
        context.events = Events(context.clock)
        screen = BoardScreen(self.board, job.run_id, context.clock)
        pruned = False

        def watch(event: Event) -> None:
            nonlocal pruned
            if event.kind != "metrics" or pruned:
                return
            with self._lock:
                pruned = self.source.should_prune(job, event)
            if pruned:
                end_now(plan.run_id)

        def end_now(run_id: str) -> None:
            Ledger(context.google, self.bucket, run_id).record_cancellation()
            node = plan.observe_pod(context)
            if isinstance(node, Node):
                stop(node.fleet(context), run_id)

        context.events.add_listener(watch)
        options = RunOptions(job.variant.overrides, yes=True, queue=True)
        return drive(options, plan, context, emulator, screen, sweep=self.sweep_id)

    def _release_pod(self, pod: int, context: Context) -> None:
        """Delete a pod without further runs; an earlier controller may have ended before it could."""
        plan = self.builder.build_plan(with_pod_number(self.base_config, pod))
        context.events = Events(context.clock)
        delete_if_unused(plan, context, "the sweep has no more runs")


class RunsFailedError(ProgramFailedError):
    """Some runs of a sweep failed; `errors` holds the whole message of each."""

    def __init__(self, message: str, errors: Mapping[str, str]) -> None:
        super().__init__(message)
        self.errors = errors


def drive_sweep(options: RunOptions, opened: Callable[[SweepDefinition], object] = lambda definition: None) -> None:
    """Drive all runs of a sweep to their end, or detach from it on Ctrl-C.

    Args:
        options: the overrides, and how to drive them.
        opened: called before anything is created.

    Raises:
        ConfigError: the config is unusable, or the user declined.
        LeaseLostError: another controller drives the sweep.
        ProgramFailedError: some runs were given up; the others have finished.
    """
    with open_sweep(options) as session:
        opened(session.definition)
        drive_session(session, options, JobBuilder(session.definition.folder))


def drive_session(session: SweepSession, options: RunOptions, builder: JobBuilder) -> None:
    """Drive the runs of an opened sweep, as `drive_sweep` does. The builder made its jobs."""
    base = session.definition.base_config
    require_project(project_of(base))
    lease = session.lease()
    other = wait_out(session.context.clock, lease.current_other, f"gs://{session.bucket}", _print_error)
    if other is not None and not options.take_over:
        raise LeaseLostError(_holder_message(other))
    if not options.json:
        print_wrapped(session.summary_lines(), indent=9)
    confirm_cost(session, options)
    if not session.remaining and not session.last_run_by_pod:
        return  # none of its pods is left either
    try:
        with driven_here(session.lock_file), lease.released_on_exit():
            lease.listen()
            if session.remaining:  # create shared resources once, the lease's bucket included
                first = builder.build_plan(with_pod_number(base, 1))
                with options.showing("creating what the pods share"):
                    reconcile(first.before_pod, session.context)
            lease.take_over("taken over", _print_error)
            _run_pool(session.refreshed(), builder, lease, options)
    except LeaseHeldError as held:
        raise LeaseLostError(_holder_message(held.snapshot)) from None
    except ReleaseRequestedError as asked:
        if not asked.ends_run:
            raise
        _print_error(str(asked))
    except KeyboardInterrupt:
        _print_error("detached: active runs continue, no new ones start; `slipway down -m …` ends them")
        raise


def _run_pool(session: SweepSession, builder: JobBuilder, lease: Lease, options: RunOptions) -> None:
    """Run the jobs on the pods, as holder of the lease."""
    clock = session.context.clock
    board = Board(session.board_rows(), session.board_file, clock, json_lines=options.json)
    pool = PodPool(
        sweep_id=session.definition.id,
        bucket=session.bucket,
        lease=lease,
        source=_source(session, builder),
        builder=builder,
        board=board,
        base_config=session.definition.base_config,
        pods=session.pods,
    )
    try:
        with live_board(board, clock):
            pool.run(session.last_run_by_pod)
    finally:
        board.close()
    rows = board.rows()
    if not options.json:
        compare = f"`slipway report --sweep {pool.sweep_id}` compares them"
        print_wrapped([f"sweep {pool.sweep_id}: {format_counts(rows)}; {compare}"])
    if pool.failed:
        head = f"{len(pool.failed)} of {len(rows)} runs failed; run the same command to retry them:"
        raise RunsFailedError("\n".join([head, *(f"  {run}: {why}" for run, why in pool.failed.items())]), pool.errors)


def _source(session: SweepSession, builder: JobBuilder) -> GridSource | SearchSource:
    """Return a source of the unfinished runs of the grid, or of the trials of a search."""
    definition, last_runs = session.definition, session.last_run_by_pod
    if definition.space is None or (search := definition.sweep.search) is None:
        return GridSource([job for job in definition.jobs if job.run_id not in session.finished_runs], last_runs)
    journal = session.board_file.with_suffix(".journal")
    return SearchSource(search, definition.fixed_overrides, definition.space, builder, journal, last_runs)


def confirm_cost(session: SweepSession, options: RunOptions) -> None:
    """Confirm the runs with the user, and first those that are not expected to finish. Raises ConfigError."""
    if not session.remaining or not session.context.is_billed or options.yes:
        return
    for caution in session.cautions():
        if options.json or not confirm(f"{caution}. Start such runs all the same?"):
            raise ConfigError(
                f"program.caution: {caution}; nothing was created; pass --yes to start such runs all the same"
            )
    if options.json or not confirm(f"Start {plural(session.remaining, 'run')}?"):
        raise ConfigError("nothing was created; pass --yes to skip the prompt")


def delete_pods(options: RunOptions) -> list[str]:
    """Delete the pods of a sweep, even if runs are active there; return their names.

    Raises ConfigError if a run is active there and the user declined to end it.
    """
    with open_sweep(options) as session:
        with options.showing("looking for the pods of the sweep"):
            plans, context = session.pod_plans(), session.context
            nodes = managed_nodes(plans, context)
            lease = session.lease()
            other = lease.current_other()
            running = sorted(set().union(*(running_runs(node, context) for node in nodes.values())))
        if running or other is not None or is_driven_here(session.lock_file):
            ended = ", ".join(running) or f"controller {other.record if other else 'of this machine'}"
            if not confirm("Continue?", yes=options.yes, details=[f"This ends {ended}"]):
                reasons = [f"{', '.join(running)} is running on the pods"] if running else []
                reasons += [f"{other.record} controls the sweep"] if other is not None else []
                reasons = reasons or ["a controller on this machine is starting the sweep"]
                raise ConfigError(f"nothing was deleted; {'; '.join(reasons)}; pass --yes to skip the prompt")
        with lease.released_on_exit(), options.showing(f"deleting {plural(len(nodes), 'pod')}"):
            end_starting(context, lease, session.lock_file, session.definition.id, "deleted")
            if nodes or lease.current_other() is not None:
                lease.take_over("deleted", _print_error)
                nodes = managed_nodes(plans, context)  # the other controller may have made more until it let go
            for plan in plans:
                if (node := nodes.get(plan.node.name)) is not None:
                    force_delete(plan, context, node)
    return list(nodes)


def _holder_message(snapshot: LeaseSnapshot) -> str:
    """Return a message that names the controller of the sweep and the age and term of its lease."""
    heard = f"last seen {max(0.0, snapshot.age):.0f} s ago, considered gone after {snapshot.record.seconds:.0f} s"
    how = "`slipway status -m …` shows it, --take-over replaces it"
    return f"{snapshot.record} controls this sweep ({heard}); nothing was changed: {how}"


def _print_error(message: str) -> None:
    print(message, file=sys.stderr)
