"""Protocol of the agent's commands: the JSON request each reads from stdin, and the JSON answer it prints.

Both carry `"format": 1`; a request may carry `lease`: location and token of the sender's. An answer is a line of JSON;
a streaming command prints several, a failing one `error` and `detail`. The agent imports this for type checkers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar

from .tracker_kinds import TrackerOrder as TrackerOrder
from .watchdog_protocol import InstalledWatchdog, SetWatchdogRequest, WatchdogState

if TYPE_CHECKING:
    from typing import NotRequired


class Nothing(TypedDict):
    pass


# State of a worker


class Image(TypedDict):
    """Python of the image and its packages: version by name."""

    python: str
    fingerprint: str
    versions: dict[str, str]


class VenvState(TypedDict):
    """State of a complete virtual environment.

    `ok` is false if packages have changed since it was created or set up; `installed` lists the packages before
    any setup commands ran; `id` changes whenever the venv is recreated.
    """

    fingerprint: str
    ok: bool
    versions: dict[str, str]
    installed: dict[str, str]
    id: str


class InstalledVenv(VenvState):
    changed: bool


class Devices(TypedDict):
    """JAX devices as reported by one worker; `devices` counts those of all workers."""

    boot_id: str
    backend: str
    local_devices: int
    devices: int
    kind: str


class Peers(TypedDict):
    """Reachability of worker 0 (on worker 0: whether all others have connected), and the reason if not."""

    boot_id: str
    reachable: bool
    detail: str


class ChipHolder(TypedDict):
    """Process that has device nodes of chips, or libtpu's lock file, open."""

    pid: int
    user: str
    command: str
    paths: list[str]


class Chips(TypedDict):
    """TPU chips of one worker: device nodes, chips on the PCI bus, and who holds them."""

    paths: list[str]
    on_pci: int
    holders: list[ChipHolder]


class ChipFault(TypedDict):
    """Fault found by the health check: of the device with this index on the process with that index."""

    process: int
    device: int
    message: str


class Health(Devices):
    """Result of the health check on one worker. `stage` is where it ended ("done": it did not), for that `problem`.

    `process` is JAX's index, which may differ from the worker's; `tflops` and `hbm_gb` (tested memory) are per device.
    """

    stage: str
    problem: str
    process: int
    faults: list[ChipFault]
    tflops: float
    hbm_gb: float
    seconds: float


class Attempt(TypedDict):
    run_id: str
    attempt: int


class ObserveRequest(TypedDict):
    code: NotRequired[str | None]
    venv: NotRequired[str | None]
    run_id: NotRequired[str | None]
    chips: NotRequired[bool]


class Observation(TypedDict):
    """State of a worker: `code` and `config` hash the code and run.yaml, `setup` is a key; null means absent.

    `chips` is null unless it was asked for; `health` is null unless the chips passed the health check in this boot.
    """

    boot_id: str
    home: str
    image: Image
    code: str | None
    venv: VenvState | None
    config: str | None
    setup: str | None
    devices: Devices | None
    peers: Peers | None
    health: Health | None
    chips: Chips | None
    active: Attempt | None
    free_gb: float
    untidy: list[str]


class ProbeDevicesRequest(TypedDict):
    venv: str
    timeout_seconds: NotRequired[float]
    env: NotRequired[dict[str, str] | None]


class ProbePeersRequest(TypedDict):
    index: int
    addresses: list[str]
    port: int
    timeout_seconds: NotRequired[float]


class CheckHealthRequest(TypedDict):
    venv: str
    processes: int
    index: int
    coordinator: str
    timeout_seconds: NotRequired[float]


# Installation


class InstallCodeRequest(TypedDict):
    bucket: str
    object: str
    sha256: str
    tree: str


class InstalledCode(TypedDict):
    tree: str
    changed: bool


class Wheel(TypedDict):
    """Wheel in the bucket; its requirement line is BEFORE @ file://… AFTER."""

    bucket: str
    object: str
    sha256: str
    name: str
    before: str
    after: str


class InstallVenvRequest(TypedDict):
    packages: str
    fingerprint: str
    python: str
    requirements: NotRequired[str]
    index: NotRequired[str | None]
    constraints: NotRequired[dict[str, str] | None]
    wheels: NotRequired[list[Wheel] | None]
    secrets: NotRequired[dict[str, str] | None]


class WriteConfigRequest(TypedDict):
    run_id: str
    text: str
    env: NotRequired[dict[str, str] | None]


class WrittenConfig(TypedDict):
    path: str
    sha256: str


class FingerprintRequest(TypedDict):
    run_id: str
    code: str
    venv: str
    timeout_seconds: NotRequired[float]


class Fingerprints(TypedDict):
    """Fingerprint of each input by its key, such as `data.path`; "absent" if nothing is there."""

    data: dict[str, str]


class WorkerHygiene(TypedDict):
    """Messages: what was done, and what this user lacks the permission to do."""

    done: list[str]
    not_done: list[str]


class RunSetupRequest(TypedDict):
    run_id: str
    key: str
    commands: list[list[str]]
    code: str
    venv: str
    secrets: NotRequired[dict[str, str] | None]


class Changed(TypedDict):
    changed: bool


class FetchAssetRequest(TypedDict):
    """Request of `fetch_asset`: `files` maps a name below `prefix` to {url, sha256}, `tokens` to a bearer token."""

    bucket: str
    prefix: str
    files: dict[str, dict[str, str]]
    manifest: str
    tokens: NotRequired[dict[str, str] | None]


class BuildAssetRequest(TypedDict):
    bucket: str
    prefix: str
    argv: list[str]
    code: str
    venv: str
    env: NotRequired[dict[str, str] | None]
    secrets: NotRequired[dict[str, str] | None]


class FetchLine(TypedDict, total=False):
    """Progress of a transfer: the bytes transferred so far, or `done` in the last line."""

    bytes: int
    done: bool


# Programs


class StartRequest(Attempt):
    argv: list[str]
    code: str
    venv: str
    env: NotRequired[dict[str, str] | None]
    defaults: NotRequired[dict[str, str] | None]
    bucket: NotRequired[str | None]
    log_object: NotRequired[str]
    exit_object: NotRequired[str]
    successor: NotRequired[str]
    fence_seconds: NotRequired[float]
    secrets: NotRequired[dict[str, str] | None]
    notice: NotRequired[str | None]
    exit_hook: NotRequired[bool]
    trackers: NotRequired[list[TrackerOrder] | None]


class AttemptRequest(TypedDict):
    """Request about one attempt, by default the latest."""

    run_id: str
    attempt: NotRequired[int | None]


class StopRequest(AttemptRequest):
    grace_seconds: NotRequired[float]


class StateRequest(AttemptRequest):
    tail_bytes: NotRequired[int]


class State(Attempt):
    """State of an attempt. Times are seconds since the epoch.

    `state` is absent, running or exited; `error` describes failures outside the program; `upload` is none, pending,
    done or failed; `oom_kills` counts processes that the kernel OOM-killed during the attempt; `free_gb` is the free
    space on the disk of the home folder at the end; `notice` is preemption, maintenance or shutdown.
    """

    state: str
    code: int | None
    signal: str | None
    started: float | None
    ended: float | None
    error: str | None
    oom_kills: int | None
    free_gb: float | None
    upload: str | None
    upload_error: str | None
    notice: str | None
    log_size: int
    log_tail: str
    summary: dict[str, Any] | None


class StacksRequest(AttemptRequest):
    timeout_seconds: NotRequired[float]


class StacksProcess(TypedDict):
    """Process of an attempt; `signal` is the signal it was sent, if any."""

    pid: int
    name: str
    state: str
    waits_in: str
    signal: str | None


class Stacks(TypedDict):
    processes: list[StacksProcess]
    text: str


class WatchRequest(AttemptRequest):
    log_offset: NotRequired[int]
    metrics_offset: NotRequired[int]
    follow: NotRequired[bool]


class WatchLine(TypedDict, total=False):
    """One line: log or metrics with offset, heartbeat with stopped and free_gb, warning, notice, exited or end."""

    log: str
    metrics: dict[str, Any]
    offset: int
    heartbeat: float
    stopped: bool
    free_gb: float
    warning: str
    notice: str
    exited: State
    end: State
    now: float
    """With these two: the time of day by the worker's clock, which may be wrong."""


Q = TypeVar("Q", bound=Mapping[str, Any])
A = TypeVar("A", bound=Mapping[str, Any])


class Command(str, Generic[Q, A]):
    """Name of a command, typed by its request and by its answer (or each line of a stream)."""


OBSERVE = Command[ObserveRequest, Observation]("observe")
PROBE_DEVICES = Command[ProbeDevicesRequest, Devices]("probe_devices")
CHECK_HEALTH = Command[CheckHealthRequest, Health]("check_health")
PROBE_PEERS = Command[ProbePeersRequest, Peers]("probe_peers")
INSTALL_CODE = Command[InstallCodeRequest, InstalledCode]("install_code")
INSTALL_VENV = Command[InstallVenvRequest, InstalledVenv]("install_venv")
WRITE_CONFIG = Command[WriteConfigRequest, WrittenConfig]("write_config")
FINGERPRINT_DATA = Command[FingerprintRequest, Fingerprints]("fingerprint_data")
TIDY = Command[Nothing, WorkerHygiene]("tidy")
RUN_SETUP = Command[RunSetupRequest, Changed]("run_setup")
FETCH_ASSET = Command[FetchAssetRequest, FetchLine]("fetch_asset")
BUILD_ASSET = Command[BuildAssetRequest, FetchLine]("build_asset")
START = Command[StartRequest, State]("start")
STOP = Command[StopRequest, State]("stop")
STATE = Command[StateRequest, State]("state")
STACKS = Command[StacksRequest, Stacks]("stacks")
WATCH = Command[WatchRequest, WatchLine]("watch")
SET_WATCHDOG = Command[SetWatchdogRequest, InstalledWatchdog]("set_watchdog")
WATCHDOG_STATE = Command[Nothing, WatchdogState]("watchdog_state")
