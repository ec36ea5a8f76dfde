"""Start the program on every worker at once, exactly once; and the queue of runs that wait for a busy pod.

Each start is preceded by a record in the bucket, which only one controller can create; the start itself is idempotent
on the workers. If the controller is killed in between, the next `up` reads the record and completes the start.

Runs wait with `up --queue`, in order of arrival. Each is a small object in the bucket, rewritten while its controller
lives; an object that has not been rewritten for a while belongs to a dead controller and does not count.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from conf.formats import POD_VARIABLE, SECRET_VARIABLE, TOKEN_VARIABLE, attempt_token
from conf.schema.cloud import HereCloud
from conf.schema.training.loop import GrpoLoop
from conf.strict_json import dumps
from controller.agent.fs import file_size, read_range
from controller.agent.protocol import OBSERVE, START, STATE, STOP, StartRequest, State, TrackerOrder
from controller.context import Context
from controller.core.errors import ConfigError, SlipwayError
from controller.core.json_documents import Document, UnreadableError
from controller.core.this_process import Clock, InterruptedSleepError
from controller.gcp.answers import parse_timestamp
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import GoogleError, NotFoundError, ServiceDisabledError
from controller.lease import Lease
from controller.plan.build import Plan
from controller.plan.samplers import owner_of
from controller.records.ledger import UNKNOWN_POD, Launch, Ledger, parse_record
from controller.records.recorder import LOCAL_METRICS_FILE, run_folder
from controller.resources.devices import PEER_PORT, jax_coordinator
from controller.resources.machines import active_runs, require_answers
from controller.resources.pod.node import Node
from controller.resources.software import RunConfig, Venv
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
    return active_runs(require_answers(fleet.call_all(OBSERVE, {}), "inspect the workers"))


def stop(fleet: Fleet, run_id: str, grace_seconds: float = 10.0) -> None:
    """Stop a run's latest attempt on every worker."""
    answers = fleet.call_all(STOP, {"run_id": run_id, "grace_seconds": grace_seconds})
    require_answers(answers, f"stop {run_id}")


def _states_on(node: Node, fleet: Fleet, run_id: str, launched: Launch) -> list[State]:
    """Return each worker's state of a launch; none if it was made on another pod.

    If a damaged record does not say on which pod it was made, the workers do.
    """
    if launched.node_uid not in (node.status.uid, UNKNOWN_POD):
        return []
    answers = fleet.call_all(STATE, {"run_id": run_id, "attempt": launched.attempt})
    states = require_answers(answers, f"inspect {run_id}")
    is_elsewhere = launched.node_uid == UNKNOWN_POD and all(s["state"] == "absent" for s in states)
    return [] if is_elsewhere else states


def worker_variables(node: Node, worker: int) -> dict[str, str]:
    """Return the variables that tell a program which worker it runs on."""
    endpoints = node.status.endpoints
    return {
        "SLIPWAY_WORKER": str(worker),
        "SLIPWAY_WORKERS": str(len(endpoints)),
        "SLIPWAY_COORDINATOR": f"{endpoints[0].internal}:{PEER_PORT}",
    }


def jax_variables(node: Node, worker: int) -> dict[str, str]:
    """Return the variables that tell JAX and libtpu the same, in place of the metadata server.

    VMs of Compute Engine have no `agent-worker-number`, without which `jax.distributed.initialize()` finds no TPU of
    Google Cloud; it asks these variables first (`GkeTpuCluster` in `jax/_src/clusters/cloud_tpu_cluster.py`, 0.10.2
    to 0.12.0.1).
    """
    return {
        "JAX_COORDINATOR_ADDRESS": jax_coordinator(node),
        "TPU_WORKER_ID": str(worker),
        "TPU_WORKER_HOSTNAMES": ",".join(endpoint.internal for endpoint in node.status.endpoints),
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


EARLIER_BYTES = 1 << 16
"""Bytes of metrics that a tracker is told again: more than a program writes between two stores."""


def tracker_orders(plan: Plan) -> list[TrackerOrder]:
    """Return the trackers of a run, which are told what run.yaml has of it; a pod of samplers has none."""
    config = plan.config
    own = config.program.kind == "command"
    # the trainer writes TensorBoard's files itself
    names = [name for name in config.logging.all_trackers if own or name != "tensorboard"]
    if POD_VARIABLE in config.env.vars or not names:
        return []
    told = yaml.safe_load(plan.get(RunConfig).text)
    shown = {name: told[name] for name in told if name not in ("format", "dir", "logging", "compile_cache")}
    shown |= {"command": [*config.program.command]} if own else {}
    file = run_folder(Path(config.run.state_dir).expanduser(), plan.run_id) / LOCAL_METRICS_FILE
    earlier = read_range(file, max(0, file_size(file) - EARLIER_BYTES), EARLIER_BYTES).decode(errors="replace")
    settings = {"wandb": config.logging.wandb.model_dump() if config.logging.wandb else {}}
    return [
        {"use": name, "settings": settings.get(name, {}), "config": shown, "by_phase": own, "earlier": earlier}
        for name in names
    ]


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
            "defaults": {} if isinstance(plan.config.cloud, HereCloud) else jax_variables(node, worker),
            "bucket": ledger.bucket,
            "log_object": ledger.log_object(worker, attempt),
            "exit_object": ledger.exit_object(worker, attempt),
            "successor": ledger.launch_object(attempt + 1),
            "fence_seconds": plan.config.recovery.lease_duration_seconds / FENCE_LOOKUPS,
            "secrets": plan.vault.values() | sampler_secrets(plan, fleet, attempt),
            "notice": plan.notice,
            "trackers": tracker_orders(plan) if worker == 0 else [],
            "exit_hook": plan.config.program.kind == "command" and plan.config.recovery.exit_on_exception,
        }
        for worker in range(plan.node.spec.workers)
    ]
    require_answers(fleet.call_all(START, payloads), f"start {plan.run_id}")


QUEUE_STALE_SECONDS = 120.0
"""A waiting run whose place is older than this has lost its controller."""
QUEUE_REFRESH_SECONDS = 20.0


@dataclass(frozen=True)
class _WaitingRun(Document):
    """Place of a run in the queue, rewritten while its controller lives.

    Attributes:
        since: when it came, by the bucket's clock; None in the first version of the object, whose time this is.
    """

    run_id: str
    since: float | None


class PodQueue:
    """Queue of one pod. Times are the bucket's: a controller whose clock is wrong neither jumps nor blocks the queue.

    A damaged object does not count; `problems` names it.
    """

    def __init__(self, google: GoogleClient, clock: Clock, bucket: str, pod: str) -> None:
        self._google, self._clock, self._bucket = google, clock, bucket
        self._prefix = f"pods/{pod}/waiting/"
        self.problems: list[str] = []

    def waiting_runs(self, but: str = "") -> list[str]:
        """Return the ids of the waiting runs, in order of arrival, without the run `but`."""
        found: list[tuple[float, str]] = []
        for item in self._google.objects(self._bucket, self._prefix):
            try:
                facts, now = self._google.object_metadata(self._bucket, item["name"])
                content = self._google.download(self._bucket, item["name"])
                entry = parse_record(content, _WaitingRun.from_json, item["name"])
            except NotFoundError:
                continue  # it has just left the queue
            except UnreadableError as error:
                self.problems += [str(error)] if str(error) not in self.problems else []
                continue
            written = parse_timestamp(facts["updated"])
            if now - written < QUEUE_STALE_SECONDS and entry.run_id != but:
                found.append((written if entry.since is None else entry.since, entry.run_id))
        return list(dict.fromkeys(run_id for _, run_id in sorted(found)))

    def is_taken(self, lease: Lease, poll_seconds: float, but: str = "") -> bool:
        """Wait until a run of the queue, other than `but`, has a pod that nobody has; return False if all have left.

        Whoever leaves a pod to the next run waits for that: the next one may be killed before it acts.
        """
        first = lease.read()
        while self.waiting_runs(but):
            now = lease.read()
            if lease.is_held_by_other(now) or (now and now.record.id) != (first and first.record.id):
                return True
            self._clock.sleep(poll_seconds)
        return False

    def place(self, run_id: str, controller: str) -> "Place":
        return Place(self._google, self._clock, self._bucket, f"{self._prefix}{run_id}.{controller}.json", run_id)


class Place:
    """Place of one controller's run in the queue; a thread rewrites it, whatever its controller waits for."""

    def __init__(self, google: GoogleClient, clock: Clock, bucket: str, name: str, run_id: str) -> None:
        self._google, self._clock, self._object, self._run_id = google, clock, (bucket, name), run_id
        self._since: float | None = None
        self._stop: threading.Event | None = None
        self._thread = threading.Thread()

    def take(self) -> None:
        """Queue the run, unless it is queued."""
        if self._stop is None:
            self.refresh()
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._watch, args=(self._stop,), daemon=True, name="queue")
            self._thread.start()

    def refresh(self) -> None:
        entry = _WaitingRun(self._run_id, self._since).to_json()
        answer = self._google.upload(*self._object, dumps(entry).encode())
        self._since = self._since or parse_timestamp(answer["updated"])

    def leave(self) -> None:
        """Leave the queue; without the bucket, the place expires."""
        if self._stop is None:
            return
        self._stop.set()
        self._thread.join()
        self._stop = self._since = None
        bucket, name = self._object
        with suppress(GoogleError, InterruptedSleepError):
            self._google.call("storage", "objects.delete", bucket=bucket, object=name)

    def _watch(self, stop: threading.Event) -> None:
        while not self._clock.wait(stop, QUEUE_REFRESH_SECONDS):
            with suppress(SlipwayError, InterruptedSleepError):
                self.refresh()


class QueueWaiter:
    """Waits for the runs that are ahead of this one on its pod.

    The run stays in the queue until it has the pod, also while its controller handles an error or finds that another
    one was faster: a run that ends deletes its pod if it sees nobody wait for it.
    """

    def __init__(
        self, plan: Plan, context: Context, lease: Lease, poll_seconds: float, note: Callable[[str], None]
    ) -> None:
        self.queue = PodQueue(context.google, context.clock, plan.bucket, plan.node.name)
        self._plan, self._context, self._lease = plan, context, lease
        self._poll_seconds, self._note = poll_seconds, note
        self._place = self.queue.place(plan.run_id, lease.identity.id)

    def await_turn(self, *, acquires: bool = True) -> None:
        """Wait for our turn, and acquire the lease of the pod; not the latter for a bastion, which acquires it itself.

        Raises:
            LeaseHeldError: another controller was faster; call again.
        """
        if self._lease.held:
            return
        try:
            self._place.take()
        except NotFoundError:
            return  # in a new project there is no bucket, and nobody to wait for
        told: list[str] = []
        while (ahead := self._runs_ahead()) or (acquires and not self._lease.held):
            if not ahead:
                self._context.before_pod_write()  # then we look again: nobody else can begin
                continue
            if self._lease.held:
                self._lease.release()
                self._lease.listen()
            if ahead != told:
                self._note(f"waiting for {', '.join(ahead)}")
                told = ahead
            self._context.clock.sleep(self._poll_seconds)

    def leave(self) -> None:
        self._place.leave()

    def is_followed(self) -> bool:
        """Wait until another run of the queue has the pod, as `PodQueue.is_taken`."""
        return self.queue.is_taken(self._lease, self._poll_seconds, but=self._plan.run_id)

    def _runs_ahead(self) -> list[str]:
        """Return the runs ahead of this one: those queued earlier, the one that is driven, those that run on the pod.

        We look in this order, in which a run goes from one to the next: we miss none that does so meanwhile.
        """
        run_id = self._plan.run_id
        line = [] if self._lease.held else self.queue.waiting_runs()
        queued = line[: line.index(run_id)] if run_id in line else line
        running = set[str]()
        if (other := self._lease.current_other()) is not None:
            running.add(other.record.run_id)
        else:
            with suppress(ServiceDisabledError):  # in a new project there is no pod
                node = self._plan.observe_pod(self._context)
                if isinstance(node, Node) and node.is_ready and node.accepts_our_key(self._context):
                    running = running_runs(node.fleet(self._context))
        return [] if run_id in running else [*sorted(running), *(run for run in queued if run not in running)]
