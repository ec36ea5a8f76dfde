"""Drive a sweep to its end under its lease, or delete its pods."""

import sys
from collections.abc import Callable, Mapping

from controller.cloud.connect import project_of, require_project
from controller.core.errors import ConfigError, LeaseLostError, ProgramFailedError
from controller.core.layout import print_wrapped
from controller.core.text import plural
from controller.core.ui import confirm
from controller.gcp.retries import wait_out
from controller.lease.lease import Lease, LeaseHeldError, ReleaseRequestedError
from controller.lease.store import LeaseSnapshot
from controller.reconcile.reconciler import reconcile
from controller.run.options import RunOptions
from controller.sweep.board import Board, format_counts
from controller.sweep.definition import JobBuilder, SweepDefinition, with_pod_number
from controller.sweep.live import live_board
from controller.sweep.pods import force_delete, managed_node, running_runs
from controller.sweep.pool import GridSource, JobSource, PodPool
from controller.sweep.session import SweepSession, open_sweep


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
    if session.remaining:  # create shared resources once, the lease's bucket included
        first = builder.build_plan(with_pod_number(base, 1))
        with options.showing("creating what the pods share"):
            reconcile(first.before_pod, session.context)
    elif not session.last_run_by_pod:
        return  # none of its pods is left either
    try:
        with lease.released_on_exit():
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
    session.board_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    clock = session.context.clock
    board = Board(session.board_rows(), session.board_file, clock, json_lines=options.json)
    pool = PodPool(
        sweep_id=session.definition.id,
        bucket=session.bucket,
        lease=lease,
        source=_search_source(session, builder),
        builder=builder,
        board=board,
        base_config=session.definition.base_config,
        pods=min(session.definition.sweep.pods, max(1, session.remaining)),
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


def _search_source(session: SweepSession, builder: JobBuilder) -> JobSource:
    """Return a source of the unfinished runs of the grid, or of the trials of a search."""
    definition, last_runs = session.definition, session.last_run_by_pod
    if definition.space is None or (search := definition.sweep.search) is None:
        return GridSource([job for job in definition.jobs if job.run_id not in session.finished_runs], last_runs)
    from controller.sweep.search import SearchSource

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

    Raises:
        ConfigError: a run is active there and the user declined to end it.
    """
    with open_sweep(options) as session:
        with options.showing("looking for the pods of the sweep"):
            plans, context = session.pod_plans(), session.context
            nodes = {plan.node.name: node for plan in plans if (node := managed_node(plan, context)) is not None}
            lease = session.lease()
            other = lease.current_other()
            running = sorted(set().union(*(running_runs(node, context) for node in nodes.values())))
        if running or other is not None:
            ended = ", ".join(running) or f"controller {other.record if other else 'unknown'}"
            if not confirm("Continue?", yes=options.yes, details=[f"This ends {ended}"]):
                reasons = [f"{', '.join(running)} is running on the pods"] if running else []
                reasons += [f"{other.record} controls the sweep"] if other is not None else []
                raise ConfigError(f"nothing was deleted; {'; '.join(reasons)}; pass --yes to skip the prompt")
        with lease.released_on_exit(), options.showing(f"deleting {plural(len(nodes), 'pod')}"):
            if nodes or other is not None:
                lease.take_over("deleted", _print_error)
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
