"""The verbs with `-m`: `up`, `plan`, `status` and `down` of all runs of a sweep."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.connect import NO_PROJECT, connected, project_of
from controller.cost import rate
from controller.errors import ConfigError, ProgramFailed
from controller.plan.shared import bucket_name
from controller.preflight import probe
from controller.reconcile import destroy, reconcile
from controller.records import index
from controller.resources.node import Node
from controller.spending import let_go
from controller.sweep.board import Board, Line, saved, table
from controller.sweep.pool import Listed, Pool, recorded
from controller.sweep.study import Builder, Study, estimate, finished, on_pod, study
from controller.words import counted

if TYPE_CHECKING:
    from controller.cli import Command
    from controller.sweep.search import Searched
    from controller.sweep.study import Estimate
    from controller.world import World


@dataclass(frozen=True)
class Opened:
    """A sweep and the way to its cloud. `had` is by pod the run that it had last."""

    study: Study
    world: World
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
            ended = sum(line.state not in ("waiting", "running") for line in saved(self.file).values())
            return max(0, search.trials - ended)
        return sum(job.run_id not in self.done for job in self.study.jobs)

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
        done = finished(found.jobs, world, bucket)
        had = recorded(world.google, bucket, found.id, lambda _: True)
        yield Opened(found, world, bucket, done, had)


def up(command: Command) -> int:
    with opened(command) as now:
        base = now.study.base
        if project_of(base) == NO_PROJECT:
            raise ConfigError("cloud.project: is not set; set it, or run `gcloud config set project ID`")
        if not command.flags.json:
            print("\n".join(_head(now)))
        _ask(command, now)
        now.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        board = Board(_lines(now), now.file, now.world.clock, json_lines=command.flags.json)
        jobs = [job for job in now.study.jobs if job.run_id not in now.done]
        builder = Builder(now.study.folder)
        if now.left:  # what all pods share is made once, before they all look for it
            first = builder.plan(on_pod(base, 1))
            reconcile(first.resources[: first.resources.index(first.node)], now.world)
        source = _source(now, builder) or Listed(jobs, now.had)
        pool = Pool(
            sweep_id=now.study.id,
            bucket=now.bucket,
            source=source,
            builder=builder,
            board=board,
            any_config=base,
            pods=min(base.sweep.pods, max(1, now.left)),
            on_failure=base.sweep.on_failure,
            retries=base.sweep.retries,
            delete_pods=base.cleanup.on_success == "delete",
        )
        pool.run(now.had)
    _close(pool, board, command)
    return 0


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
    if command.flags.json:
        print(json.dumps({"sweep": now.study.id, "runs": [asdict(line) for line in lines]}, indent=1))
    else:
        print("\n".join([f"sweep {now.study.id}: {_counts(lines)}", *table(lines, clock)]))
    return 0


def down(command: Command) -> int:
    if command.flags.all:
        raise ConfigError("down -m deletes the pods of the sweep; `down --all` without -m the rest")
    with opened(command) as now:
        builder, names = Builder(now.study.folder), []
        for pod in sorted({*range(1, now.study.sweep.pods + 1), *now.had}):
            plan = builder.plan(on_pod(now.study.base, pod))
            seen = plan.node.observe(now.world, {})
            if isinstance(seen, Node) and seen.ours and not plan.node.adopt:
                names.append(plan.node.name)
                let_go(now.world.google, now.world.clock, now.bucket, plan.config, seen, "deleted by down")
                destroy([replace(plan.node, needs=())], now.world)
    print(json.dumps({"deleted": names}) if command.flags.json else f"deleted: {', '.join(names) or 'nothing'}")
    return 0


VERBS = {"up": up, "plan": plan, "status": status, "down": down}


def _source(now: Opened, builder: Builder) -> Searched | None:
    """What draws the runs of a search; None of a grid."""
    if now.study.space is None or (search := now.study.sweep.search) is None:
        return None
    from controller.sweep.search import Searched

    return Searched(search, now.study.same, now.study.space, builder, now.file.with_suffix(".journal"), now.had)


def _lines(now: Opened) -> list[Line]:
    """Every run as the last controller left it, and as the bucket knows it."""
    known, rows = saved(now.file), {row["run"]: row for row in index.rows(now.world.state)}
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
        print(f"sweep {pool.sweep_id}: {_counts(lines)}; `slipway runs --where sweep={pool.sweep_id}` lists them")
    if pool.failed:
        said = [f"{len(pool.failed)} of {len(lines)} runs failed; the same command tries them again:"]
        raise ProgramFailed("\n".join([*said, *(f"  {run}: {why}" for run, why in pool.failed.items())]))


def _counts(lines: list[Line]) -> str:
    states = [line.state for line in lines]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
