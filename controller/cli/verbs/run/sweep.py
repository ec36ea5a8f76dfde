"""The verbs with `-m`: `up`, `plan`, `status` and `down` of all runs of a sweep."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.checks.preflight import probe
from controller.cli.verbs.look.sweep_status import show
from controller.cloud.connect import NO_PROJECT, connected, project_of
from controller.core.errors import ConfigError, Fenced, ProgramFailed
from controller.core.text import counted
from controller.gcp.prices import rate
from controller.lease.lease import Asked, Held, Lease
from controller.lease.scope import sweep_lease
from controller.lease.store import Seen
from controller.plan.build import Plan
from controller.plan.project import bucket_name
from controller.reconcile.reconciler import reconcile
from controller.records import index
from controller.sweep.board import Board, Line, counts, saved, table
from controller.sweep.definition import Builder, Study, estimate, finished, on_pod, study
from controller.sweep.live import shown
from controller.sweep.pods import delete_used, own, recorded, runs_on
from controller.sweep.pool import Listed, Pool

if TYPE_CHECKING:
    from controller.cli.main import Command
    from controller.context import Context
    from controller.sweep.definition import Estimate
    from controller.sweep.search import Searched


@dataclass(frozen=True)
class Opened:
    """A sweep and the way to its cloud. `had` is by pod the run that it had last."""

    study: Study
    world: Context
    bucket: str
    done: set[str]
    had: dict[int, str]

    @property
    def file(self) -> Path:
        return self.world.state / "sweeps" / f"{self.study.id}.json"

    @property
    def left(self) -> int:
        """Runs to do; of a search those that are not among the lines that the last controller left."""
        if (search := self.study.sweep.search) is not None:
            ended = sum(line.state not in ("waiting", "running") for line in saved(self.file).lines.values())
            return max(0, search.trials - ended)
        return sum(job.run_id not in self.done for job in self.study.jobs)

    def lease(self) -> Lease:
        """Of the sweep; nobody has taken it yet."""
        return sweep_lease(self.world, self.bucket, self.study.id, self.study.base.recovery.lease_seconds)

    def again(self) -> Opened:
        """What there is of it now."""
        done = finished(self.study.jobs, self.world, self.bucket)
        return replace(self, done=done, had=recorded(self.world.google, self.bucket, self.study.id))

    def plans(self) -> list[Plan]:
        """One for each pod, those of an earlier controller included."""
        builder = Builder(self.study.folder)
        numbers = sorted({*range(1, self.study.sweep.pods + 1), *self.had})
        return [builder.plan(on_pod(self.study.base, pod)) for pod in numbers]

    def estimate(self) -> Estimate:
        now = self.world.clock.now()
        return estimate(self.study.base, self.left, self.study.sweep.pods, self.world.state, now)


@contextmanager
def opened(command: Command) -> Iterator[Opened]:
    """Decide the sweep and look at what there is of it."""
    found = study(command.overrides, Path.cwd())
    base = found.base
    if base.tpu.adopt and base.sweep.pods > 1:
        raise ConfigError("sweep.pods: an adopted pod is one; set sweep.pods=1, or tpu.adopt=false")
    bucket = bucket_name(base, project_of(base))
    with connected(base) as (world, _):
        yield Opened(found, world, bucket, set(), {}).again()


def up(command: Command) -> int:
    with opened(command) as now:
        base = now.study.base
        if project_of(base) == NO_PROJECT:
            raise ConfigError("cloud.project: is not set; set it, or run `gcloud config set project ID`")
        lease = now.lease()
        other = lease.look()
        if other is not None and not command.flags.take_over:
            raise Fenced(_by_another(other))
        if not command.flags.json:
            print("\n".join(_head(now)))
        _ask(command, now)
        builder = Builder(now.study.folder)
        if now.left:  # what all pods share is made once, before they all look for it; the bucket of the lease too
            first = builder.plan(on_pod(base, 1))
            reconcile(first.resources[: first.resources.index(first.node)], now.world)
        elif not now.had:
            return 0  # no pod of it is left either
        try:
            with lease.kept():
                lease.take_over("taken over", lambda words: print(words, file=sys.stderr))
                _carry_through(command, now.again(), builder, lease)
        except Held as held:
            raise Fenced(_by_another(held.seen)) from None
        except Asked as asked:
            if not asked.ends:
                raise
            print(asked, file=sys.stderr)
        except KeyboardInterrupt:
            words = "runs that are under way go on, no further one begins; `slipway down -m …` ends them"
            print(f"detached: {words}", file=sys.stderr)
            raise
    return 0


def _carry_through(command: Command, now: Opened, builder: Builder, lease: Lease) -> None:
    """All runs, by who has the lease.

    Raises:
        ProgramFailed: some runs were given up.
    """
    base = now.study.base
    now.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    board = Board(_lines(now), now.file, now.world.clock, json_lines=command.flags.json)
    jobs = [job for job in now.study.jobs if job.run_id not in now.done]
    pool = Pool(
        sweep_id=now.study.id,
        bucket=now.bucket,
        lease=lease,
        source=_source(now, builder) or Listed(jobs, now.had),
        builder=builder,
        board=board,
        any_config=base,
        pods=min(base.sweep.pods, max(1, now.left)),
    )
    try:
        with shown(board, now.world.clock):
            pool.run(now.had)
    finally:
        board.close()
    _close(pool, board, command)


def plan(command: Command) -> int:
    with opened(command) as now:
        if command.flags.json:
            lines = {line.run: line for line in _lines(now)}
            runs = [{"run": job.run_id, "case": job.variant.case, "words": job.variant.own,
                     "state": lines[job.run_id].state} for job in now.study.jobs]  # fmt: skip
            document = {"sweep": now.study.id, "runs": runs, "pods": now.study.sweep.pods}
            print(json.dumps(document | {"estimate": asdict(now.estimate())}, indent=1))
            return 0
        lines = [f"  {'=' if line.state == 'finished' else '+'} {line.run}  {line.title}" for line in _lines(now)]
        print("\n".join([*_head(now), "", *lines]))
        findings = [finding for finding in probe(now.study.base, now.world) if finding.severity != "note"]
        print("\n".join(f"{finding.severity}: {finding}" for finding in findings))
        return 2 if any(finding.severity == "error" for finding in findings) else 0


def status(command: Command) -> int:
    with opened(command) as now:
        lines = _lines(now)
        clock = now.world.clock.now()
        seen = now.lease().look()
        driver = None if seen is None else str(seen.term)
        if command.flags.follow:
            show(now.world.state, now.study.id, now.world.clock, command.flags)
            return 0
    if command.flags.json:
        document = {"sweep": now.study.id, "driver": driver, "runs": [asdict(line) for line in lines]}
        print(json.dumps(document, indent=1))
    else:
        driven = [] if driver is None else [f"seen to by {driver}"]
        print("\n".join([f"sweep {now.study.id}: {counts(lines)}", *driven, *table(lines, clock)]))
    return 0


def down(command: Command) -> int:
    if command.flags.all:
        raise ConfigError("down -m deletes the pods of the sweep; `down --all` without -m the rest")
    with opened(command) as now:
        plans = now.plans()
        nodes = {plan.node.name: node for plan in plans if (node := own(plan, now.world)) is not None}
        lease = now.lease()
        other = lease.look()
        running = sorted(set().union(*(runs_on(node, now.world) for node in nodes.values())))
        if (running or other is not None) and not _sure(command, running, other):
            who = [f"{', '.join(running)} is running there"] if running else []
            who += [f"{other.term} sees to it"] if other is not None else []
            raise ConfigError(f"nothing was deleted; {'; '.join(who)}; say --yes to go on without being asked")
        with lease.kept():
            if nodes or other is not None:
                lease.take_over("deleted", lambda words: print(words, file=sys.stderr))
            for plan in plans:
                if (node := nodes.get(plan.node.name)) is not None:
                    delete_used(plan, now.world, node)
    names = list(nodes)
    print(json.dumps({"deleted": names}) if command.flags.json else f"deleted: {', '.join(names) or 'nothing'}")
    return 0


def _sure(command: Command, running: list[str], other: Seen | None) -> bool:
    if command.flags.yes or not sys.stdin.isatty():
        return command.flags.yes
    print("This ends", ", ".join(running) or f"what {other.term if other else 'nobody'} does")
    return input("Go on? [y/N] ").strip().lower() in ("y", "yes")


def _by_another(seen: Seen) -> str:
    """Who sees to the sweep, and how long that counts."""
    heard = f"heard of {max(0.0, seen.age):.0f} s ago, gone after {seen.term.seconds:.0f} s of silence"
    how = "`slipway status -m …` shows it, --take-over acts in its place"
    return f"{seen.term} sees to this sweep ({heard}); nothing was changed: {how}"


VERBS = {"up": up, "plan": plan, "status": status, "down": down}


def _source(now: Opened, builder: Builder) -> Searched | None:
    """What draws the runs of a search; None of a grid."""
    if now.study.space is None or (search := now.study.sweep.search) is None:
        return None
    from controller.sweep.search import Searched

    return Searched(search, now.study.same, now.study.space, builder, now.file.with_suffix(".journal"), now.had)


def _lines(now: Opened) -> list[Line]:
    """Every run as the last controller left it, and as the bucket knows it."""
    known, rows = saved(now.file).lines, {row["run"]: row for row in index.rows(now.world.state)}
    if now.study.space is not None:
        return list(known.values())
    found = []
    for job in now.study.jobs:
        line = known.get(job.run_id) or Line(job.run_id, job.variant.title)
        row: dict[str, Any] = rows.get(job.run_id, {})
        line.title = job.variant.title
        if job.run_id in now.done:
            line.state, line.seconds = "finished", row.get("seconds")
        if line.state == "finished" and not line.values:
            shown = {k: v for k, v in row.get("metrics", {}).items() if isinstance(v, int | float)}
            line.metric, line.values = next(((k, [float(v)]) for k, v in shown.items()), ("", []))
        found.append(line)
    return found


def _head(now: Opened) -> list[str]:
    """The sweep as a whole, and what it will take."""
    sweep, guess = now.study.sweep, now.estimate()
    tpu = now.study.base.tpu.accelerator_type
    lines = [
        f"sweep    {now.study.id}: {_runs(now)}, {now.left} to do",
        f"pods     {counted(sweep.pods, 'pod')} of {tpu}; a run that fails: {sweep.on_failure}",
    ]
    hours = "not known" if guess.hours is None else f"about {guess.hours:.2f} h"
    lines.append(f"takes    {hours} ({guess.why})")
    if now.world.billed:
        price = rate(now.study.base, now.world.clock.now())
        cost = "not known" if guess.usd is None else f"about ${guess.usd:.2f}"
        return [*lines, f"cost     {cost}; {price} and pod"]
    return [*lines, "cost     nothing: the cloud is emulated on this machine"]


def _runs(now: Opened) -> str:
    if (search := now.study.sweep.search) is not None:
        pruned = ", pruned by the median" if search.prune and search.method == "optuna" else ""
        return f"{search.trials} runs by {search.method} for the {search.mode} of {search.metric}{pruned}"
    return f"{counted(len(now.study.jobs), 'run')}, {len(now.done)} finished"


def _ask(command: Command, now: Opened) -> None:
    if not now.left or not now.world.billed or command.flags.yes:
        return
    if command.flags.json or not sys.stdin.isatty():
        raise ConfigError("nothing was created; say --yes to go on without being asked")
    if input(f"Start {counted(now.left, 'run')}? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was created")


def _close(pool: Pool, board: Board, command: Command) -> None:
    """The last words.

    Raises:
        ProgramFailed: some runs were given up.
    """
    lines = board.lines()
    if not command.flags.json:
        print(f"sweep {pool.sweep_id}: {counts(lines)}; `slipway report --sweep {pool.sweep_id}` compares them")
    if pool.failed:
        said = [f"{len(pool.failed)} of {len(lines)} runs failed; the same command tries them again:"]
        raise ProgramFailed("\n".join([*said, *(f"  {run}: {why}" for run, why in pool.failed.items())]))
