"""Reconcile resources with the plan: walk the DAG, observe, act only on a difference, wait until it converges.

There is no state file: each resource is observed just before each action. Independent resources converge concurrently.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from controller.context import Context
from controller.core.clock import InterruptedSleepError
from controller.core.errors import CloudError, ConfigError
from controller.gcp.client import PROPAGATION_SECONDS
from controller.gcp.errors import ServiceDisabledError
from controller.reconcile.resource import Absent, Diff, Pending, Resource, Unknown

LEASED_SCOPES = frozenset({"run", "pod"})
"""Scopes that only the lease holder may change; any controller creates shared ones in the same way."""
MAX_ACTS = 8
"""A resource that still differs after this many actions does not converge: something else keeps changing it."""


def topological_order(resources: Iterable[Resource]) -> list[Resource]:
    """Sort resources by their needs, else in the given order; ValueError on a cycle or an unknown need."""
    left = {r.id: r for r in resources}
    known = set(left)
    done: list[Resource] = []
    placed: set[str] = set()
    while left:
        ready = [r for r in left.values() if set(r.depends_on) <= placed]
        if not ready:
            unknown = {n for r in left.values() for n in r.depends_on} - known
            raise ValueError(f"unknown needs {sorted(unknown)}" if unknown else f"a cycle among {sorted(left)}")
        for resource in ready:
            del left[resource.id]
            placed.add(resource.id)
            done.append(resource)
    return done


def reconcile(resources: Sequence[Resource], context: Context) -> dict[str, Any]:
    """Reconcile every resource and return the final observed state of each, by id.

    Raises:
        SlipwayError: the first failure, once everything already under way has stopped.
        KeyboardInterrupt: raised again after the threads have stopped at their next wait.
    """
    waiting = topological_order(resources)
    observed: dict[str, Any] = {}
    running: dict[Future[Any], Resource] = {}
    failure: BaseException | None = None
    with ThreadPoolExecutor(max_workers=16, thread_name_prefix="reconcile") as pool:
        try:
            while running or (waiting and failure is None):
                if failure is None:
                    ready = [r for r in waiting if set(r.depends_on) <= set(observed)]
                    waiting = [r for r in waiting if r not in ready]
                    running |= {pool.submit(settle, r, context, dict(observed)): r for r in ready}
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    resource = running.pop(future)
                    error = future.exception()
                    if error is None:
                        observed[resource.id] = future.result()
                    else:
                        failure = failure or error
        except KeyboardInterrupt:
            context.clock.interrupt()
            raise
    if failure is not None:
        raise failure
    return observed


def settle(resource: Resource, context: Context, observed: dict[str, Any]) -> Any:
    began = context.clock.monotonic()
    late, service_late = context.clock.deadline(resource.timeout), context.clock.deadline(PROPAGATION_SECONDS)
    pending, stuck = None, late
    acts: list[Diff] = []
    announced = False
    try:
        while True:
            current = _observe(resource, context, observed)
            if isinstance(current, Unknown):
                raise ConfigError(f"{resource.title}: {current.why}")
            if isinstance(current, Pending):
                if not announced:
                    announced = True
                    context.events.emit("step_started", resource.id, current.why, title=resource.title)
                if current != pending:
                    pending, stuck = current, context.clock.deadline(current.seconds)
                if stuck() or late():
                    raise CloudError(_timeout_error(resource, current, context.clock.monotonic() - began))
                context.clock.sleep(context.poll_seconds)
                continue
            pending = None
            diff = resource.diff(current)
            if not diff:
                findings = list(resource.findings(current))
                if errors := [finding for finding in findings if finding.severity == "error"]:
                    raise ConfigError(errors)
                for finding in findings:
                    context.events.note(resource.id, str(finding))
                action = acts[0].action if acts else "none"
                seconds = round(context.clock.monotonic() - began, 3)
                context.events.emit("step_done", resource.id, title=resource.title, action=action, seconds=seconds)
                return current
            if len(acts) >= MAX_ACTS:
                raise CloudError(f"{resource.title} does not converge: {diff}")
            announced = True
            message = diff.action if isinstance(current, Absent) else str(diff)
            context.events.emit("step_started", resource.id, message, title=resource.title)
            acts.append(diff)
            if resource.scope in LEASED_SCOPES:
                context.before_pod_write()
            try:
                resource.apply(context, observed, diff)
            except ServiceDisabledError:  # Google takes some minutes to propagate an enabled API
                if service_late():
                    raise
                acts.pop()
                context.clock.sleep(context.poll_seconds)
    except InterruptedSleepError:
        raise
    except Exception as error:
        context.events.emit("step_failed", resource.id, str(error), title=resource.title)
        raise


def _timeout_error(resource: Resource, current: Pending, seconds: float) -> str:
    advice = f"; {current.advice}" if current.advice else ""
    return f"{resource.title}: still not ready after {seconds:.0f} s: {current.why}{advice}"


def _observe(resource: Resource, context: Context, observed: dict[str, Any]) -> Any:
    try:
        return resource.observe(context, observed)
    except ServiceDisabledError as error:
        # Google takes some minutes to propagate an enabled API.
        return Pending(f"{error.service} is not enabled everywhere yet")


def destroy(resources: Sequence[Resource], context: Context) -> None:
    """Delete resources, dependents first."""
    for resource in reversed(topological_order(resources)):
        began = context.clock.monotonic()
        context.events.emit("step_started", resource.id, "delete", title=resource.title)
        try:
            resource.destroy(context)
        except Exception as error:
            context.events.emit("step_failed", resource.id, str(error), title=resource.title)
            raise
        seconds = round(context.clock.monotonic() - began, 3)
        context.events.emit("step_done", resource.id, title=resource.title, action="delete", seconds=seconds)
