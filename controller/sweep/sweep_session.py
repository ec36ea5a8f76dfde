"""Session of a sweep: its runs, their state so far, and what is left to do; its pods and their deletion."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from controller.agent.protocol import OBSERVE
from controller.config.run_yaml import bucket_name
from controller.connect import open_context, opening_message, project_of
from controller.context import Context
from controller.core.errors import ConfigError
from controller.core.json_documents import checked, dump
from controller.core.text import plural
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import GoogleError, NoCredentialsError, ServiceDisabledError
from controller.gcp.prices import hourly_price, max_cost
from controller.lease import Lease, LeaseHeldError, lease_guard, pod_lease, sweep_lease
from controller.plan.build import Plan
from controller.reconcile import destroy
from controller.records import index
from controller.records.ledger import parse_record, read_objects, record_cancellations
from controller.records.spending import close_billing
from controller.resources.machines import active_runs
from controller.resources.pod.node import Node
from controller.run.estimate import RunEstimate, estimate_run
from controller.run.launch import PodQueue
from controller.run.options import RunOptions
from controller.sweep.board import BoardRow, load_board
from controller.sweep.definition import (
    Estimate,
    JobBuilder,
    SweepDefinition,
    SweepJob,
    define_sweep,
    estimate,
    finished_runs,
    with_pod_number,
)


def record_assignment(google: GoogleClient, bucket: str, sweep_id: str, pod: int, run_id: str) -> None:
    google.upload(bucket, f"sweeps/{sweep_id}/pods/{pod}.json", dump({"pod": pod, "run": run_id}).encode())


def load_assignments(google: GoogleClient, bucket: str, sweep_id: str) -> dict[int, str]:
    found = read_objects(google, bucket, f"sweeps/{sweep_id}/pods/")
    return dict(parse_record(content, _parse_assignment, item["name"]) for item, content in found)


def _parse_assignment(body: Any, where: str) -> tuple[int, str]:
    entry = checked(body, where)
    return int(entry["pod"]), str(entry["run"])


def managed_node(plan: Plan, context: Context) -> Node | None:
    """Return the pod if it exists and Slipway created it."""
    try:
        current = plan.observe_pod(context)
    except ServiceDisabledError:
        return None  # without the API, or before it is on everywhere, there is no pod
    return current if isinstance(current, Node) and current.is_managed and not plan.node.adopt else None


def managed_nodes(plans: Iterable[Plan], context: Context) -> dict[str, Node]:
    """Return the pods that exist and that Slipway created, by name."""
    return {plan.node.name: node for plan in plans if (node := managed_node(plan, context)) is not None}


def running_runs(node: Node, context: Context) -> set[str]:
    """Return the runs whose program is alive on the pod, as far as its workers answer."""
    if not node.is_ready or not node.accepts_our_key(context):
        return set()
    return active_runs(node.fleet(context).call_all(OBSERVE, {}))


def delete_if_unused(plan: Plan, context: Context, why: str) -> None:
    """Delete the pod unless another run uses it or waits for it."""
    context.google.hurry()
    lease = pod_lease(plan, context)
    try:
        if PodQueue(context.google, context.clock, plan.bucket, plan.node.name).is_taken(lease, context.poll_seconds):
            return
        _delete_if_idle(plan, context, lease, why)
    except GoogleError as error:
        current = managed_node(plan, context)
        if current is not None and not running_runs(current, context):
            _delete_without_bucket(plan, context, error)


def _delete_if_idle(plan: Plan, context: Context, lease: Lease, why: str) -> None:
    """Delete the pod under its lease unless a run uses it."""
    with suppress(LeaseHeldError), lease_guard(lease, plan, context):
        if (
            (current := managed_node(plan, context)) is not None
            and lease.current_other() is None
            and not running_runs(current, context)
        ):
            _delete_under_lease(plan, current, context, lease, why)


def force_delete(plan: Plan, context: Context, node: Node) -> None:
    """Delete the pod whatever runs there, after its controller has released the lease."""
    context.google.hurry()
    # a follower must not take this for a preemption
    record_cancellations(context, plan.bucket, running_runs(node, context))
    lease = pod_lease(plan, context)
    try:
        with lease_guard(lease, plan, context):
            lease.take_over("deleted")
            _delete_under_lease(plan, node, context, lease, "deleted by down")
            lease.release("deleted by down", 0)
    except GoogleError as error:
        _delete_without_bucket(plan, context, error)


def _delete_without_bucket(plan: Plan, context: Context, error: GoogleError) -> None:
    """Delete the pod although the bucket does not answer; or again, if it was Google's answer to the deletion."""
    context.events.note(plan.run_id, f"warning: the end of the pod's time is not on record: {error}")
    destroy([replace(plan.node, depends_on=())], context)


def _delete_under_lease(plan: Plan, node: Node, context: Context, lease: Lease, why: str) -> None:
    """Delete the pod under its lease and close its cost account."""
    lease.ensure()
    close_billing(context, plan.bucket, plan.config, node, why)
    destroy([replace(plan.node, depends_on=())], context)


@dataclass(frozen=True)
class SweepSession:
    """Sweep with a connection to its cloud."""

    definition: SweepDefinition
    context: Context
    bucket: str
    finished_runs: set[str]
    last_run_by_pod: dict[int, str]

    @property
    def board_file(self) -> Path:
        return self.context.state_dir / "sweeps" / f"{self.definition.id}.json"

    @property
    def lock_file(self) -> Path:
        """File that tells whether a controller on this machine drives the sweep."""
        return self.board_file.with_suffix(".lock")

    @property
    def remaining(self) -> int:
        """Return the number of runs to do; for a search, of trials that the last board does not show as ended."""
        if (search := self.definition.sweep.search) is not None:
            ended = sum(line.state not in ("waiting", "running") for line in load_board(self.board_file).rows.values())
            return max(0, search.trials - ended)
        return sum(job.run_id not in self.finished_runs for job in self.definition.jobs)

    @property
    def pods(self) -> int:
        """Return the number of pods that have a run to do."""
        return min(self.definition.sweep.pods, max(1, self.remaining))

    def cautions(self) -> list[str]:
        """Return why runs that are left are not expected to finish; of a search, what its own config says."""
        if self.definition.space is not None:
            base = self.definition.base_config
            found = [None if base.code.stand_in else base.program.caution]
        else:
            found = [job.caution for job in self.definition.jobs if job.run_id not in self.finished_runs]
        return list(dict.fromkeys(caution for caution in found if caution))

    def lease(self) -> Lease:
        seconds = self.definition.base_config.recovery.lease_duration_seconds
        return sweep_lease(self.context, self.bucket, self.definition.id, seconds)

    def refreshed(self) -> "SweepSession":
        """Return the sweep with its current state in the bucket; unchanged if nobody can read the bucket yet."""
        try:
            return replace(
                self,
                finished_runs=finished_runs(self.definition.jobs, self.context, self.bucket),
                last_run_by_pod=load_assignments(self.context.google, self.bucket, self.definition.id),
            )
        except (NoCredentialsError, ServiceDisabledError):
            return self

    def pod_plans(self) -> list[Plan]:
        """Return one plan for each pod, those of an earlier controller included."""
        builder = JobBuilder(self.definition.folder)
        numbers = sorted({*range(1, self.definition.sweep.pods + 1), *self.last_run_by_pod})
        return [builder.build_plan(with_pod_number(self.definition.base_config, pod)) for pod in numbers]

    def estimate(self) -> Estimate:
        """Estimate duration and cost of the remaining runs."""
        now = self.context.clock.now()
        left = [job.config for job in self.definition.jobs if job.run_id not in self.finished_runs]
        base, pods = self.definition.base_config, self.pods
        words = (self.definition.fixed_words, self.definition.swept_keys)
        return estimate(base, self.remaining, pods, self.context.state_dir, now, left, words)

    def estimate_of(self, job: SweepJob) -> RunEstimate | None:
        """Estimate one run; None if only its program knows how long it takes."""
        return estimate_run(job.config, hourly_price(job.config, self.context.clock.now()))

    def board_rows(self) -> list[BoardRow]:
        """Return the row of every run from the last controller's board and the table of runs."""
        known = load_board(self.board_file).rows
        if self.definition.space is not None:
            return list(known.values())
        table, rows = {row["run"]: row for row in index.load_rows(self.context.state_dir)}, []
        if self.definition.batches:
            jobs = {job.run_id for job in self.definition.jobs}
            rows = [row for run, row in known.items() if run not in jobs and row.state not in ("waiting", "running")]
        for job in self.definition.jobs:
            row = known.get(job.run_id) or BoardRow(job.run_id, job.variant.title)
            record: dict[str, Any] = table.get(job.run_id, {})
            row.title = job.variant.title
            if job.run_id in self.finished_runs:
                row.state, row.seconds = "finished", record.get("seconds")
            if row.state == "finished" and not row.values:
                row.show_result(record.get("metrics") or {})
            rows.append(row)
        return rows

    def summary_lines(self) -> list[str]:
        sweep, guess = self.definition.sweep, self.estimate()
        tpu = self.definition.base_config.topology.accelerator_type
        hours = guess.describe(guess.hours, "{:.2f} h".format)
        base = self.definition.base_config
        if self.context.is_billed:
            price = hourly_price(base, self.context.clock.now())
            usd = guess.describe(guess.usd, "${:.2f}".format)
            cost = f"{usd}; per pod {price}; limit per run: {max_cost(base, price)}"
        else:
            cost = "none: " + ("this machine" if base.cloud.kind == "here" else "the cloud is emulated on this machine")
        spare = f" (of sweep.pods={sweep.pods}; the others would have no run)" if self.pods < sweep.pods else ""
        lines = [
            f"sweep    {self.definition.id}: {self._count_message()}, {self.remaining} remaining",
            f"pods     {plural(self.pods, 'pod')} of {tpu}{spare}; on failure: {sweep.on_failure}",
        ]
        lines = [*lines, f"time     {hours} ({guess.why})", f"cost     {cost}"] if self.remaining else lines[:1]
        return [lines[0], *self._hypothesis_lines(), *lines[1:]]

    def _hypothesis_lines(self) -> list[str]:
        if (said := self.definition.sweep.hypothesis) is None:
            return []
        lines = [f"asks     {said.question}", f"expects  {said.expected}", f"decides  {said.decision}"]
        misfit = self.definition.misfit
        return [*lines, f"but      {misfit}: nothing is expected of them"] if misfit else lines

    def _count_message(self) -> str:
        if (search := self.definition.sweep.search) is not None:
            pruned = ", with median pruning" if search.prune and search.method == "optuna" else ""
            return f"{search.trials} runs by {search.method} for the {search.mode} of {search.metric}{pruned}"
        return f"{plural(len(self.definition.jobs), 'run')}, {len(self.finished_runs)} finished"


@contextmanager
def open_sweep(options: RunOptions) -> Iterator[SweepSession]:
    """Define the sweep and look up the state of its runs.

    Raises ConfigError if an override or a run is invalid, or an adopted pod is combined with several pods.
    """
    with ExitStack() as stack:
        with options.waiting() as doing:
            doing("composing the config of every run")
            definition = define_sweep(options.overrides, Path.cwd())
            doing(opening_message(definition.base_config))
            session = stack.enter_context(open_definition(definition))
        yield session


@contextmanager
def open_definition(definition: SweepDefinition) -> Iterator[SweepSession]:
    """Look up the state of a sweep's runs. Raises ConfigError if an adopted pod is combined with several pods."""
    base = definition.base_config
    if base.tpu.adopt and base.sweep.pods > 1:
        raise ConfigError("sweep.pods: an adopted pod counts as one; set sweep.pods=1 or tpu.adopt=false")
    bucket = bucket_name(base, project_of(base))
    with open_context(base) as (context, _):
        yield SweepSession(definition, context, bucket, set(), {}).refreshed()
