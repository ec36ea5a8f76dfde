"""Start the program on every worker at once, exactly once.

Each start is preceded by a record in the bucket, which only one controller can create; the start itself is idempotent
on the workers. If the controller is killed in between, the next `up` reads the record and completes the start.
"""

from collections.abc import Callable

from conf.samplers import POD_VARIABLE, SECRET_VARIABLE, TOKEN_VARIABLE, attempt_token
from conf.schema.training.loop import GrpoLoop
from controller.agent.protocol import OBSERVE, START, STATE, STOP, StartRequest, State
from controller.core.clock import Clock
from controller.core.errors import ConfigError
from controller.plan.build import Plan
from controller.plan.samplers import owner_of
from controller.records.ledger import UNKNOWN_POD, Launch, Ledger
from controller.resources.pod.node import Node
from controller.resources.workers.devices import PEER_PORT
from controller.resources.workers.software import Venv
from controller.resources.workers.worker import active_runs, raise_failures
from controller.ssh.fleet import Fleet

FENCE_LOOKUPS = 2
"""Lookups for a later attempt within the term of a lease: workers are fenced no later than their controller."""


def launch(
    plan: Plan, ledger: Ledger, node: Node, fleet: Fleet, clock: Clock, guard: Callable[[], int]
) -> tuple[Launch, bool]:
    """Make sure that an attempt of the run is started on this pod; return it, and whether it was already running.

    A new attempt is made if none exists, if the last one belongs to a deleted pod, or if it has failed; an attempt
    that was recorded but not started everywhere is started.
    """
    while True:
        launches = ledger.launches()
        last = launches[-1] if launches else None
        states = [] if last is None else _states_on(node, fleet, plan.run_id, last)
        if last is not None and states:
            ended_badly = any(s["state"] == "exited" and s["code"] != 0 for s in states)
            if not ended_badly:
                if any(s["state"] == "absent" for s in states):
                    _start(plan, ledger, node, fleet, last.attempt)
                    return last, False
                return last, True
            if any(s["state"] == "running" for s in states):
                stop(fleet, plan.run_id)  # leftovers of an attempt that failed elsewhere
        number = last.attempt + 1 if last else 1
        fresh = Launch(attempt=number, node_uid=node.status.uid, time=clock.now(), lease=guard())
        if ledger.record_launch(fresh):
            _start(plan, ledger, node, fleet, fresh.attempt)
            return fresh, False


def running_runs(fleet: Fleet) -> set[str]:
    """Return the runs whose program is alive on some worker of the pod: at most one, unless something went wrong."""
    answers = fleet.call_all(OBSERVE, {})
    raise_failures(answers, "inspect the workers")
    return active_runs(answers)


def stop(fleet: Fleet, run_id: str, grace_seconds: float = 10.0) -> None:
    """Stop a run's latest attempt on every worker."""
    answers = fleet.call_all(STOP, {"run_id": run_id, "grace_seconds": grace_seconds})
    raise_failures(answers, f"stop {run_id}")


def _states_on(node: Node, fleet: Fleet, run_id: str, launched: Launch) -> list[State]:
    """Return each worker's state of a launch; none if it was made on another pod.

    If a damaged record does not say on which pod it was made, the workers do.
    """
    if launched.node_uid not in (node.status.uid, UNKNOWN_POD):
        return []
    answers = fleet.call_all(STATE, {"run_id": run_id, "attempt": launched.attempt})
    raise_failures(answers, f"inspect {run_id}")
    states = [a for a in answers if isinstance(a, dict)]
    is_elsewhere = launched.node_uid == UNKNOWN_POD and all(s["state"] == "absent" for s in states)
    return [] if is_elsewhere else states


def worker_variables(node: Node, worker: int) -> dict[str, str]:
    """Return the variables that tell a program which worker it runs on; JAX on TPU does not need them."""
    endpoints = node.status.endpoints
    return {
        "SLIPWAY_WORKER": str(worker),
        "SLIPWAY_WORKERS": str(len(endpoints)),
        "SLIPWAY_COORDINATOR": f"{endpoints[0].internal}:{PEER_PORT}",
    }


def sampler_secrets(plan: Plan, fleet: Fleet, attempt: int) -> dict[str, str]:
    """Return the secret by which the trainer and its samplers know each other, if there are any.

    The trainer's pod gets that of the attempt. A pod of samplers outlives attempts, so it gets that of the run, from
    which those of all attempts follow. Every controller with this key derives the same ones, so that it may complete
    a start that another one began.
    """
    loop, is_pod = plan.config.loop, POD_VARIABLE in plan.config.env.vars
    if not isinstance(loop, GrpoLoop) or not (is_pod or loop.sampler.is_remote):
        return {}
    secret = fleet.derive_secret(f"samplers of {owner_of(plan)}")
    return {SECRET_VARIABLE: secret} if is_pod else {TOKEN_VARIABLE: attempt_token(secret, attempt)}


def _start(plan: Plan, ledger: Ledger, node: Node, fleet: Fleet, attempt: int) -> None:
    if not plan.argv:
        raise ConfigError("program.command: is empty")
    venv = plan.get(Venv).name
    payloads: list[StartRequest] = [
        {
            "run_id": plan.run_id,
            "attempt": attempt,
            "argv": plan.argv,
            "code": plan.snapshot.sha256,
            "venv": venv,
            "env": worker_variables(node, worker),
            "bucket": ledger.bucket,
            "log_object": ledger.log_object(worker, attempt),
            "exit_object": ledger.exit_object(worker, attempt),
            "successor": ledger.launch_object(attempt + 1),
            "fence_seconds": plan.config.recovery.lease_duration_seconds / FENCE_LOOKUPS,
            "secrets": plan.vault.values() | sampler_secrets(plan, fleet, attempt),
            "notice": plan.notice,
            "exit_hook": plan.config.program.kind == "command" and plan.config.recovery.exit_on_exception,
        }
        for worker in range(plan.node.spec.workers)
    ]
    raise_failures(fleet.call_all(START, payloads), f"start {plan.run_id}")
