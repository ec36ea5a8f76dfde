"""Observed state of this worker and its TPU chips, its cleanup, and probes of devices, connections and health.

v2 to v4 have /dev/accel<n>, later generations one VFIO group per chip, /dev/vfio/<n>. Sources: tpu-info
(https://github.com/AI-Hypercomputer/cloud-accelerator-diagnostics, tpu_info/device.py at 2cbfaa9) and JAX 0.10.2
(jax/_src/hardware_utils.py).
"""

from __future__ import annotations

import json
import os
import pkgutil
import pwd
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..attempts import active_attempt, attempt_status
from ..fs import (
    AgentError,
    agent_root,
    current_tree_hash,
    file_hash,
    free_gb,
    locked,
    read_json,
    safe_join,
    wait_until,
    write_json,
)
from ..worker_processes import (
    boot_id,
    command_line,
    is_alive,
    processes_by_attempt,
    processes_with_open_file,
    run_tool,
    send_signal,
)
from .venv import NO_VENV, applied_setup_key, image_python, program_env, venv_folder, venv_state

if TYPE_CHECKING:
    from ..protocol import ChipHolder, Chips, Devices, Health, Observation, Peers, WorkerHygiene

GOOGLE = "0x1ae0"
"""PCI vendor id."""
TPU_IDS = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x007c", "0x0083"})
"""PCI device ids of v2 and v3, an unnamed TPU, v4, v5p, v5e, v6e, TPU7x, TPU8t and TPU8i, as in JAX 0.12's
`hardware_utils.py`; Google's network card has another."""


def tpu_chips() -> Chips:
    """Return the state of this VM's chips. While a program of ours runs, nobody is listed as their holder."""
    nodes = _device_nodes()
    holders = [] if active_attempt() else _holders(nodes)
    return {"paths": list(nodes.values()), "on_pci": _chips_on_pci(), "holders": holders}


def _device_nodes() -> dict[str, str]:
    """Return the path under /dev of each chip, by its real path; an emulated worker has another folder for /dev."""
    dev = Path(os.environ.get("SLIPWAY_DEV", "/dev"))
    found = [*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")]  # /dev/vfio/vfio is no chip
    numbers = {path: path.name.removeprefix("accel") for path in found}
    ordered = sorted((path for path in found if numbers[path].isdigit()), key=lambda path: int(numbers[path]))
    return {os.path.realpath(path): f"/dev/{path.relative_to(dev)}" for path in ordered}


def _chips_on_pci() -> int:
    """Return how many TPU chips the PCI bus has, with or without a driver: a chip may have further functions than 0."""
    found = 0
    for vendor in (sysfs_root() / "bus/pci/devices").glob("*.0/vendor"):
        try:
            if vendor.read_text().strip() == GOOGLE and vendor.with_name("device").read_text().strip() in TPU_IDS:
                found += 1
        except OSError:
            continue  # the device has gone
    return found


def _holders(nodes: dict[str, str]) -> list[ChipHolder]:
    """Return the processes that have a device node, or libtpu's lock file, open."""
    lock = libtpu_lockfile()
    wanted = {**nodes, os.path.realpath(lock): str(lock)}
    found = processes_with_open_file(set(wanted))
    return [
        {"pid": pid, "user": _owner(pid), "command": command_line(pid), "paths": sorted(wanted[path] for path in paths)}
        for pid, paths in sorted(found.items())
    ]


def _owner(pid: int) -> str:
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return "unknown"  # it has ended
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


THP = "kernel/mm/transparent_hugepage/enabled"
"""Sysfs path; JAX warns on TPU VMs unless it is `always` (https://docs.kernel.org/admin-guide/mm/transhuge.html)."""


def pending_cleanup() -> list[str]:
    """Return messages about what needs tidying; empty while a program runs. Reads a few small files only."""
    if active_attempt():
        return []
    found = [f"stale {libtpu_lockfile()}"] if _is_stale(libtpu_lockfile()) else []
    found += [
        f"process {pid} of {folder.parent.name}, {folder.name}" for folder, pids in _check_leftovers() for pid in pids
    ]
    if _huge_pages_mode() == "off" and _last_result_this_boot() is None:
        found.append("transparent huge pages are off")
    return found


def tidy() -> WorkerHygiene:
    """Tidy what `pending_cleanup` reports; record what this user lacks permission for, once per boot."""
    with locked("start"):
        return {"done": [], "not_done": []} if active_attempt() else tidy_locked()


def tidy_locked() -> WorkerHygiene:
    """Tidy while holding the "start" lock and with no program running."""
    done: list[str] = []
    refused: list[str] = []
    if _is_stale(libtpu_lockfile()):
        _run_as_root(["rm", "-f", str(libtpu_lockfile())], lambda: libtpu_lockfile().unlink())
        done.append(f"removed the stale {libtpu_lockfile()}")
    for folder, pids in _check_leftovers():
        _kill_leftovers(folder, pids)
        done.append(f"killed leftover processes of {folder.parent.name}, {folder.name}")
    if _huge_pages_mode() == "off" and _last_result_this_boot() is None:
        path = sysfs_root() / THP
        try:
            _run_as_root(["sh", "-c", 'echo always > "$0"', str(path)], lambda: path.write_text("always"))
            done.append("transparent huge pages: always")
        except AgentError:
            write_json(agent_root() / "tidy.json", {"boot_id": boot_id(), "huge_pages": "refused"})
            refused.append("transparent huge pages stay off: this user cannot run sudo")
    return {"done": done, "not_done": refused}


def libtpu_lockfile() -> Path:
    """Return libtpu's lock file, held while a process uses the TPU; a killed process leaves it behind."""
    return Path(os.environ.get("TMPDIR", "/tmp")) / "libtpu_lockfile"  # noqa: S108 - libtpu's own path


def _is_stale(lock: Path) -> bool:
    """Return whether a lock file is left over from a killed process.

    Another user's is not if this user cannot run sudo, because it is unknown then whether a process has it open: others
    may use an adopted pod.
    """
    if not lock.exists() or processes_with_open_file({os.path.realpath(lock)}):
        return False
    try:
        if os.getuid() not in (0, lock.stat().st_uid):
            run_tool(["sudo", "-n", "true"])
    except (AgentError, FileNotFoundError):  # no sudo; or its owner has just removed it
        return False
    return True


def _check_leftovers() -> list[tuple[Path, list[int]]]:
    """Return leftover processes of ended attempts, known from pid.json or from the attempt in their environment."""
    folders = [path.parent for path in sorted(agent_root().glob("runs/*/attempt-*/pid.json"))]
    begun = {folder: read_json(folder / "pid.json", "boot_id", "program") for folder in folders}
    now = boot_id()
    here = [folder for folder in folders if begun[folder]["boot_id"] == now]
    ended = [f for f in here if (s := attempt_status(f))["state"] == "exited" and not s.get("uploading")]
    marks = processes_by_attempt(ended)
    alive_of = {f: [begun[f]["program"]["pid"]] if is_alive(begun[f]["program"]) else [] for f in ended}
    return [(f, pids) for f in ended if (pids := sorted({*alive_of[f], *marks[f]}))]


def _kill_leftovers(folder: Path, pids: list[int]) -> None:
    program = read_json(folder / "pid.json", "boot_id", "program")["program"]
    if is_alive(program):
        send_signal(os.killpg, program["pid"], signal.SIGKILL)
    for pid in pids:
        send_signal(os.kill, pid, signal.SIGKILL)
    wait_until(lambda: folder not in dict(_check_leftovers()), 10.0)


def sysfs_root() -> Path:
    return Path(os.environ.get("SLIPWAY_SYSFS", "/sys"))


def _huge_pages_mode() -> str:
    """Return "on", "off", or "none" if the kernel lacks the feature."""
    try:
        text = (sysfs_root() / THP).read_text()
    except OSError:
        return "none"
    return "on" if "[always]" in text or text.strip() == "always" else "off"


def _last_result_this_boot() -> Any:
    known = read_json(agent_root() / "tidy.json", "boot_id")
    return known if known and known["boot_id"] == boot_id() else None


def _run_as_root(argv: list[str], directly: Any) -> None:
    """Run `directly` as this user, or else `argv` with passwordless sudo. Raises AgentError if neither is permitted."""
    try:
        directly()
    except PermissionError:
        run_tool(["sudo", "-n", *argv])


def observe(
    code: str | None = None, venv: str | None = None, run_id: str | None = None, chips: bool = False
) -> Observation:
    """Return the current state of this worker, with fresh hashes. Read-only.

    Args:
        code: tree hash of the desired code.
        venv: fingerprint of the desired venv, or "image".
        run_id: run whose run.yaml is hashed.
        chips: whether to look at the TPU chips and for the processes that hold them.
    """
    home, boot, here = Path.home(), boot_id(), image_python()
    config = safe_join("runs", run_id) / "run.yaml" if run_id else None
    probed = [read_json(agent_root() / f"{name}.json", "boot_id") for name in ("devices", "peers", "health")]
    devices, peers, health = (found if found and found["boot_id"] == boot else None for found in probed)
    return {
        "boot_id": boot,
        "home": str(home),
        "image": {"python": here["python"], "fingerprint": here["fingerprint"], "versions": here["versions"]},
        "code": current_tree_hash(safe_join("code", code)) if code else None,
        "venv": venv_state(venv) if venv else None,
        "config": file_hash(config) if config and config.exists() else None,
        "setup": applied_setup_key(run_id, venv) if run_id and venv else None,
        "devices": devices,
        "peers": peers,
        "health": health,
        "chips": tpu_chips() if chips else None,
        "active": active_attempt(),
        "free_gb": free_gb(),
        "untidy": pending_cleanup(),
    }


DEVICE_SCRIPT = """
import json, jax
local = jax.local_devices()
kind = ", ".join(sorted({device.device_kind for device in local}))
backend, everywhere = jax.default_backend(), jax.device_count()
print(json.dumps({"backend": backend, "local_devices": len(local), "devices": everywhere, "kind": kind}))
"""


def probe_devices(venv: str, timeout_seconds: float = 120.0, env: dict[str, str] | None = None) -> Devices:
    """Return the JAX devices of this worker, probed once per boot; on a pod, probe all workers at the same time."""
    path, boot = agent_root() / "devices.json", boot_id()
    with locked("devices"):
        known = read_json(path)
        if known and known["boot_id"] == boot:
            return known
        if holder := active_attempt():
            raise AgentError(f"run {holder['run_id']} is using the devices")
        python = "python3" if venv == NO_VENV else f"{venv_folder(venv)}/bin/python"
        printed = run_tool([python, "-c", DEVICE_SCRIPT], timeout=timeout_seconds, env=program_env(venv, env or {}))
        found: Any = {"boot_id": boot, **json.loads(printed.splitlines()[-1])}
        write_json(path, found)
    return found


def probe_peers(index: int, addresses: list[str], port: int, timeout_seconds: float = 20.0) -> Peers:
    """Check that worker 0 is reachable from the others: it listens, they connect. Call on all workers at the same time.

    Args:
        index: index of this worker.
        addresses: addresses of all workers; TPU_WORKER_HOSTNAMES overrides them, as it does for `jax.distributed`.
        port: any free port of worker 0.
        timeout_seconds: how long to listen or to retry.
    """
    if hostnames := os.environ.get("TPU_WORKER_HOSTNAMES"):
        addresses = hostnames.split(",")
    end = time.monotonic() + timeout_seconds
    problem = ""
    if index:
        problem = _connect_to_worker_0(addresses[0], port, index, end)
    elif len(addresses) > 1:
        problem = _listen_for_peers(addresses, port, end)
    found: Peers = {"boot_id": boot_id(), "reachable": not problem, "detail": problem}
    write_json(agent_root() / "peers.json", found)
    return found


def _listen_for_peers(addresses: list[str], port: int, end: float) -> str:
    missing = set(range(1, len(addresses)))
    try:
        server = socket.create_server((addresses[0], port), backlog=len(addresses))
    except OSError as error:
        return f"worker 0 cannot listen on {addresses[0]}:{port}: {error}"
    with server:
        while missing and (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                peer, _ = server.accept()
                with peer:
                    peer.settimeout(1.0)
                    missing.discard(int(peer.recv(16) or b"0"))
            except (OSError, ValueError):
                continue  # timeout, or an unrelated client
    return f"worker 0 received nothing from worker {', '.join(map(str, sorted(missing)))}" if missing else ""


def _connect_to_worker_0(address: str, port: int, index: int, end: float) -> str:
    while True:
        try:
            with socket.create_connection((address, port), timeout=max(0.1, end - time.monotonic())) as peer:
                peer.sendall(b"%d" % index)
                return ""
        except OSError as error:  # it may not listen yet
            if time.monotonic() > end:
                return f"worker 0 does not answer at {address}:{port}: {error}"
        time.sleep(0.05)


STAGES = ("importing JAX", "joining the other workers", "finding the devices", "matrix product", "HBM", "all-reduce")
"""What `chip_check.py` does, in order; it writes each to a file as it begins."""
DONE = "done"


def check_health(venv: str, processes: int, index: int, coordinator: str, timeout_seconds: float = 120.0) -> Health:
    """Check the chips of this worker together with those of all others; call it on all workers at the same time.

    A check that crashes or hangs is an answer too, because the stages of all workers show whose fault it is. A success
    is recorded for this boot, with the devices that JAX found.

    Args:
        venv: fingerprint of an installed venv that contains JAX.
        processes: number of workers.
        index: index of this worker.
        coordinator: address and port on worker 0; JAX_COORDINATOR_ADDRESS of this VM overrides it.
        timeout_seconds: limit for the whole check.
    """
    boot = boot_id()
    with locked("devices"):
        if holder := active_attempt():
            raise AgentError(f"run {holder['run_id']} is using the devices")
        source = pkgutil.get_data(f"{__package__}", "chip_check.py")
        assert source is not None, "a module of this package"
        python = "python3" if venv == NO_VENV else f"{venv_folder(venv)}/bin/python"
        progress = agent_root() / "health-stage"
        progress.write_text(STAGES[0])
        coordinator = os.environ.get("JAX_COORDINATOR_ADDRESS", coordinator)
        argv = [python, "-c", source.decode(), str(processes), str(progress), str(index), coordinator]
        try:
            printed = run_tool(argv, timeout=timeout_seconds, env=program_env(venv, {}))
        except AgentError as error:
            return _unfinished(boot, progress.read_text(), str(error), error.detail)
        facts: dict[str, Any] = json.loads(printed.splitlines()[-1])
        done: Health = {"boot_id": boot, "stage": DONE, "problem": "", **facts}  # type: ignore[typeddict-item]
        if not done["faults"]:
            keys = ("boot_id", "backend", "local_devices", "devices", "kind")
            write_json(agent_root() / "devices.json", {key: done[key] for key in keys})
            write_json(agent_root() / "health.json", done)
    return done


def _unfinished(boot: str, stage: str, problem: str, stderr: str) -> Health:
    # The last line of a traceback has no indentation, and says what is wrong.
    spoken = [line for line in stderr.splitlines() if line.strip() and not line.startswith(" ")]
    return {
        "boot_id": boot,
        "stage": stage,
        "problem": problem if "did not finish" in problem or not spoken else spoken[-1][:400],
        "backend": "",
        "local_devices": 0,
        "devices": 0,
        "kind": "",
        "process": 0,
        "faults": [],
        "tflops": 0.0,
        "hbm_gb": 0.0,
        "seconds": 0.0,
    }
