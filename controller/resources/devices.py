"""TPU chips of every worker: as many as planned, free, seen by JAX, healthy, and connected to worker 0."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from controller.agent.commands.observe import DONE, STAGES
from controller.agent.protocol import (
    CHECK_HEALTH,
    OBSERVE,
    PROBE_DEVICES,
    PROBE_PEERS,
    CheckHealthRequest,
    Chips,
    Devices,
    Health,
    Observation,
    ObserveRequest,
    ProbePeersRequest,
)
from controller.context import Context
from controller.core.errors import WrongDevicesError
from controller.core.text import plural
from controller.reconcile import Absent, Diff, ObservedResources, Pending
from controller.resources.machines import WorkerResource, require_answers
from controller.resources.pod.node import Node
from controller.ssh.fleet import WorkersFailedError

FREE = "free"
LOOKS, PAUSE_SECONDS = 3, 3.0
"""A program that was just stopped may hold its chips a little longer: how often to look, and the pause in between."""


@dataclass(frozen=True, kw_only=True)
class FreeChips(WorkerResource):
    """As many device nodes as the worker has chips by the plan, held by no process.

    Nothing here can be mended from outside: a difference is an error, unless the holder ends by itself.
    """

    kind: ClassVar[str] = "chips"
    expected: int = field(compare=False)
    state: tuple[str, ...]

    @property
    def title(self) -> str:
        return (
            f"{plural(self.expected * len(self.state), 'chip')} of {plural(len(self.state), 'worker')}: present, free"
        )

    def observe(self, context: Context, observed: ObservedResources) -> Self:
        return replace(self, state=self.observe_workers(context, observed, self._state, chips=True))

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        found: list[Chips] = []
        for look in range(LOOKS):
            if look:
                context.clock.sleep(PAUSE_SECONDS)
            answers = self.ask(context, observed, OBSERVE, {"chips": True})
            found = [chips for answer in answers if (chips := answer["chips"]) is not None]
            require_count(found, self.expected)
            if not any(chips["holders"] for chips in found):
                return
        problems = [f"worker {i}: {held}" for i, chips in enumerate(found) if (held := _held_by(chips))]
        raise WrongDevicesError(
            f"{'; '.join(problems)}. End it (`slipway exec --worker N -- kill PID`, with sudo if it is another "
            "user's), or set program.needs_chips=false if the program uses no chips"
        )

    def _state(self, answer: Observation) -> str:
        chips = answer["chips"]
        assert chips is not None, "they were asked for"
        return chips_problem(chips, self.expected) or FREE


def chips_problem(chips: Chips, expected: int) -> str:
    """Return what is wrong with the chips of a worker, or ""."""
    if len(chips["paths"]) != expected:
        listed = ", ".join(chips["paths"]) or "no device nodes in /dev"
        found = f"{len(chips['paths'])} of {plural(expected, 'chip')}"
        return f"{found} ({listed}; {chips['on_pci']} on its PCI bus)"
    return _held_by(chips)


def require_count(found: Sequence[Chips], expected: int) -> None:
    """Raise WrongDevicesError unless every worker has the expected number of chips."""
    counts = [len(chips["paths"]) for chips in found]
    wrong = [i for i, count in enumerate(counts) if count != expected]
    if not wrong:
        return
    listed = "; ".join(f"worker {i} has {chips_problem(found[i], expected)}" for i in wrong)
    on_bus = all(found[i]["on_pci"] >= expected for i in wrong)
    if len(wrong) < len(found):
        cure = "delete the pod with `slipway down` and run `up` again for other hardware"
    elif on_bus:
        cure = (
            "the PCI bus has them all, so their driver is missing: is tpu.runtime_version the image of this TPU "
            "generation? null selects it"
        )
    else:
        cure = "is tpu.accelerator_type what this pod is? If so, `slipway down` and `up` get other hardware"
    raise WrongDevicesError(
        f"{listed}; {cure}. A program that uses no chips sets program.needs_chips=false",
        [f"{count} chips" for count in counts],
        wrong if len(wrong) < len(found) else [],
    )


def _held_by(chips: Chips) -> str:
    return "; ".join(
        f"{', '.join(holder['paths'])} {'is' if len(holder['paths']) == 1 else 'are'} held by process {holder['pid']} "
        f"of {holder['user']} ({holder['command'] or 'unknown command'})"
        for holder in chips["holders"]
    )


SWITCH = "cloud.health_check=false skips this check"


def require_health(answers: Sequence[Health], devices_per_chip: int = 1) -> None:
    """Raise an error that names worker and chip of every fault, unless the check has passed everywhere.

    Raises:
        WrongDevicesError: chips are faulty, or the check stopped on some workers before the others: theirs are suspect.
        WorkersFailedError: the check stopped everywhere at the same stage.
    """
    worker_of = {answer["process"]: worker for worker, answer in enumerate(answers) if answer["stage"] == DONE}
    faults = {
        (worker_of.get(f["process"], f["process"]), f["device"] // devices_per_chip, f["message"])
        for answer in answers
        for f in answer["faults"]
    }
    stopped = [worker for worker, answer in enumerate(answers) if answer["stage"] != DONE]
    if faults:
        listed = "; ".join(f"worker {worker}, chip {chip}: {message}" for worker, chip, message in sorted(faults))
        raise WrongDevicesError(
            f"the health check found faulty chips: {listed}. `slipway down` and `up` get other hardware; {SWITCH}",
            faulty=sorted({worker for worker, _, _ in faults}),
        )
    if not stopped:
        return
    reached = [len(STAGES) if a["stage"] == DONE else STAGES.index(a["stage"]) for a in answers]
    first = [worker for worker, stage in enumerate(reached) if stage == min(reached)]
    listed = "; ".join(f"worker {i} at {answers[i]['stage']!r}: {answers[i]['problem']}" for i in first)
    message = f"the health check of the chips stopped, first on {listed}. {SWITCH}"
    # Import errors and the network are no fault of a chip.
    if len(first) == len(answers) or min(reached) < STAGES.index("finding the devices"):
        raise WorkersFailedError(message)
    raise WrongDevicesError(message, faulty=first)


def summarize(answers: Sequence[Health]) -> str:
    """Return the measurements of a check that has passed."""
    rates = sorted(answer["tflops"] for answer in answers)
    span = f"{rates[0]:.3g}" if rates[0] == rates[-1] else f"{rates[0]:.3g} to {rates[-1]:.3g}"
    first = answers[0]
    return (
        f"health check passed in {max(a['seconds'] for a in answers):.0f} s: {span} TFLOP/s per device, "
        f"{min(a['hbm_gb'] for a in answers):.3g} GB of memory tested per device, all-reduce over "
        f"{plural(first['devices'], 'device')} ({first['kind']})"
    )


PEER_PORT = 8476
"""Port on which worker 0 listens during the probe; not JAX_PORT, which a running program holds."""
JAX_PORT = 8482
"""Port of JAX's coordinator, on which `jax.distributed` listens by default on a TPU."""
LIBTPU = frozenset({"libtpu", "libtpu-nightly"})
"""Distributions that contain libtpu.so."""


@dataclass(frozen=True, kw_only=True)
class DeviceProbe(WorkerResource):
    """Devices that JAX sees on each worker, their health, and whether it reaches worker 0; once per boot of the VMs."""

    kind: ClassVar[str] = "verified"
    venv: str = field(compare=False)
    backend: str = field(compare=False)
    probe_devices: bool = field(compare=False)
    """Whether the program certainly runs JAX, as the bundled trainer does."""
    health_check: bool = field(default=False, compare=False)
    """Whether to check the chips of a program that has JAX."""
    needs_libtpu: bool = field(default=False, compare=False)
    """Whether JAX must not fall back to the CPU."""
    devices_per_chip: int = field(default=1, compare=False)
    devices: tuple[int | None, ...]
    reach_worker_0: tuple[bool, ...]
    healthy: tuple[bool, ...]
    libtpu: tuple[bool, ...]

    @property
    def title(self) -> str:
        return f"verify {plural(len(self.devices), 'worker')}: devices, network"

    def observe(self, context: Context, observed: ObservedResources) -> Self:
        rows = self._look(context, observed)
        examined = self._is_examined(rows) and not any(row["active"] for row in rows)
        found = tuple(_devices(row["devices"], self.backend) for row in rows)
        return replace(
            self,
            devices=found if self.probe_devices or examined else self.devices,
            reach_worker_0=tuple(bool(row["peers"] and row["peers"]["reachable"]) for row in rows),
            healthy=tuple(not examined or row["health"] is not None for row in rows),
            libtpu=tuple(not (self.needs_libtpu and lacks_libtpu(_versions(row))) for row in rows),
        )

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        rows = self._look(context, observed) if self.needs_libtpu or self.health_check else []
        if self.needs_libtpu and (without := [str(i) for i, row in enumerate(rows) if lacks_libtpu(_versions(row))]):
            raise WrongDevicesError(
                f"worker {', '.join(without)}: the program's Python has JAX, but not libtpu, so it would run on the "
                "CPU; install jax[tpu] (env.requirements or program.setup), set env.vars.TPU_LIBRARY_PATH to your own "
                "libtpu.so, or set program.needs_chips=false"
            )
        peers = self.ask(context, observed, PROBE_PEERS, peer_payloads(observed[self.node]))
        cut_off = [f"worker {i}: {row['detail']}" for i, row in enumerate(peers) if not row["reachable"]]
        if cut_off:
            raise WorkersFailedError(
                "the workers cannot reach each other; does a firewall rule allow tcp inside the subnet? "
                + "; ".join(cut_off), []
            )  # fmt: skip
        if self._is_examined(rows) and not any(row["active"] for row in rows):
            self._check_health(context, observed)
        elif self.probe_devices:
            self._require_devices(self.ask(context, observed, PROBE_DEVICES, {"venv": self.venv}))
        if self.health_check and not self._is_examined(rows):
            context.events.note(self.id, "the health check of the chips is skipped: the program's Python has no JAX")

    def _check_health(self, context: Context, observed: ObservedResources) -> None:
        found = self.ask(context, observed, CHECK_HEALTH, health_payloads(self.venv, observed[self.node]))
        require_health(found, self.devices_per_chip)
        self._require_devices(found)
        context.events.note(self.id, summarize(found))

    def _require_devices(self, rows: Sequence[Devices]) -> None:
        wanted = [(n, self.backend) for n in self.devices]
        if [(row["local_devices"], row["backend"]) for row in rows] != wanted:
            current = [f"{row['local_devices']} {row['backend']}" for row in rows]
            table = "; ".join(f"worker {i}: {found}" for i, found in enumerate(current))
            raise WrongDevicesError(
                f"expected {self.devices[0]} {self.backend} devices on each worker, but {table}", current
            )

    def _look(self, context: Context, observed: ObservedResources) -> list[Observation]:
        question: ObserveRequest = {"venv": self.venv} if self.needs_libtpu or self.health_check else {}
        return require_answers(self.fleet(context, observed).observe(self.id, question), self.title)

    def _is_examined(self, rows: Sequence[Observation]) -> bool:
        """Return whether the health check can run: every worker has JAX, and on a TPU also libtpu."""
        versions = [_versions(row) for row in rows]
        on_tpu = self.backend == "tpu"
        return self.health_check and all("jax" in v and (not on_tpu or LIBTPU & v.keys()) for v in versions)


def lacks_libtpu(versions: Mapping[str, str]) -> bool:
    """Return whether JAX would silently run on the CPU. PyTorch/XLA also finds a libtpu.so of the system."""
    return "jax" in versions and "torch-xla" not in versions and not LIBTPU & versions.keys()


def jax_coordinator(node: Node) -> str:
    """Return the address and port at which the processes of a JAX program meet."""
    return f"{node.status.endpoints[0].internal}:{JAX_PORT}"


def peer_payloads(node: Absent | Pending | Node) -> list[ProbePeersRequest]:
    """Return the payloads with which all workers try to reach worker 0 at the same time."""
    addresses = [endpoint.internal for endpoint in node.status.endpoints] if isinstance(node, Node) else []
    return [{"index": i, "addresses": addresses, "port": PEER_PORT} for i in range(len(addresses))]


def health_payloads(venv: str, node: Absent | Pending | Node) -> list[CheckHealthRequest]:
    """Return the payloads with which the chips of all workers are checked together."""
    if not isinstance(node, Node):
        return []
    count, coordinator = len(node.status.endpoints), jax_coordinator(node)
    return [{"venv": venv, "processes": count, "index": i, "coordinator": coordinator} for i in range(count)]


def _devices(known: Devices | None, backend: str) -> int | None:
    return known["local_devices"] if known and known["backend"] == backend else None


def _versions(row: Observation) -> dict[str, str]:
    return row["venv"]["versions"] if row["venv"] else {}
