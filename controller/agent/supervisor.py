"""Starts a program so that it outlives the session, runs once, and is always on record.

On a machine without a pod several agents may start programs at the same time, so devices are locked. A program inherits
the locked files: the kernel releases a lock when the last of its processes has ended.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .attempts import SecretMask, active_attempt, attempt_status, secret_environment, state, store_secrets
from .commands.observe import tidy_locked
from .commands.run_inputs import check_out, run_environment, validate_env
from .commands.venv import venv_state
from .control import SHUTDOWN, finalize_attempt, kill_leftovers, record_notice, watch_notices
from .fs import (
    AgentError,
    attempt_folder,
    complain,
    dump,
    free_gb,
    locked,
    wait_until,
    write_atomic,
    write_heartbeat,
    write_json,
)
from .trackers import end_trackers, start_trackers
from .transfers import GrowingObject, TransferError, object_exists
from .watchdog import keep_watchdog
from .worker_processes import boot_id, oom_kills, process_identity, send_signal, wall_time

if TYPE_CHECKING:
    from .protocol import State, TrackerOrder

VARIABLE = "SLIPWAY_DEVICE_LOCKS"
"""Names one file per device, separated by `:`; without it nothing is locked."""


def lock_devices(run_id: str) -> list[int]:
    """Lock the devices and return the descriptors of the files, which programs inherit.

    Raises AgentError if another run has one of them.
    """
    held: list[int] = []
    for path in map(Path, filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        held.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = path.read_text() or "RUN"
            release_devices(held)
            raise AgentError(
                f"{path.name} is in use by {holder}: wait for its end, end it (`slipway cancel --run {holder}`), or "
                "choose other devices (cloud.devices)"
            ) from None
    for descriptor in held:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, run_id.encode(), 0)
        os.set_inheritable(descriptor, True)
    return held


def release_devices(held: list[int]) -> None:
    for descriptor in held:
        os.close(descriptor)


LOG_UPLOAD_SECONDS = 30.0
HEARTBEAT_SECONDS = 15.0
"""The dead man's switch looks every 30 s, so it sees one at most 45 s after the last, also without a watchdog: sooner
than after the least `cleanup.idle_minutes` and its grace."""
OOM_SCORE = 500
"""Of a program, from 0 for other processes to 1000: half of the memory counts as used by it in addition."""
EXIT_HOOK = str(Path(__file__).resolve().parent / "exit_hook")
"""Folder of the `sitecustomize` that Python imports at start-up."""


def start(
    run_id: str,
    attempt: int,
    argv: list[str],
    code: str,
    venv: str,
    env: dict[str, str] | None = None,
    defaults: dict[str, str] | None = None,
    bucket: str | None = None,
    log_object: str = "",
    exit_object: str = "",
    successor: str = "",
    fence_seconds: float = 0.0,
    secrets: dict[str, str] | None = None,
    notice: str | None = None,
    exit_hook: bool = False,
    trackers: list[TrackerOrder] | None = None,
) -> State:
    """Start the program, at most once, under a supervisor that outlives this session; return its `state`.

    The child inherits the lock until exec closes it, after its pid is recorded. Thus an interruption never leaves an
    unrecorded program, and two starts never overlap.

    Args:
        run_id: run that the attempt belongs to.
        attempt: number of the attempt.
        argv: command, run without a shell; its first word is looked up in the venv, then in PATH.
        code: tree hash of installed code; the program runs in a copy of it.
        venv: fingerprint of an installed venv.
        env: variables of the program, on top of those of `write_config`.
        defaults: more variables, which those of this VM and of `write_config` override.
        bucket: bucket for the log and exit.json; None: upload nothing.
        log_object: object name of the log.
        exit_object: object name of exit.json.
        successor: object name of the next attempt's record, which ends this attempt; empty: nothing does.
        fence_seconds: interval of the lookups for it.
        secrets: more variables of the program, which override the others and are deleted once it has ended.
        notice: signal that tells the program that this VM will go away, such as SIGTERM; None: send none.
        exit_hook: whether a JAX program ends at once after an uncaught exception; see exit_hook/sitecustomize.py.
        trackers: trackers that get the metrics.
    """
    if not argv or not all(isinstance(word, str) and "\0" not in word for word in argv):
        raise AgentError(f"not a command: {argv!r}")
    order = {"run_id": run_id, "attempt": attempt, "argv": argv, "code": code, "venv": venv}
    order |= {"env": validate_env(env or {}), "defaults": validate_env(defaults or {})}
    order |= {"bucket": bucket, "log_object": log_object, "exit_object": exit_object}
    order |= {"successor": successor, "fence_seconds": fence_seconds}
    order |= {"notice": signal.Signals[notice].name if notice else None, "exit_hook": exit_hook}
    order |= {"trackers": trackers or []}
    folder = attempt_folder(run_id, attempt)
    with locked("start") as lock:
        if attempt_status(folder)["state"] == "absent":
            if other := active_attempt():
                raise AgentError(f"run {other['run_id']}, attempt {other['attempt']}, is still running on this worker")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            tidy_locked()
            release_devices(lock_devices(run_id))  # the supervisor locks them for good; here an error has a reader
            store_secrets(folder.parent, validate_env(secrets or {}))
            _spawn_supervisor(folder, order, lock.fileno())
    return state(run_id, attempt)


def _spawn_supervisor(folder: Path, order: dict[str, Any], lock: int) -> None:
    command = [sys.executable, str(Path(sys.argv[0]).resolve()), "supervise"]
    with (folder / "supervisor.log").open("ab") as log, tempfile.TemporaryFile() as stdin:
        stdin.write(dump({"order": order, "lock": lock}))
        stdin.seek(0)
        supervisor = subprocess.Popen(
            command, stdin=stdin, stdout=log, stderr=log, start_new_session=True, pass_fds=[lock]
        )
    wait_until(lambda: (folder / "pid.json").exists() or supervisor.poll() is not None, 60)
    if not (folder / "pid.json").exists():
        said = (folder / "supervisor.log").read_text(errors="replace").strip()
        why = f": {said.splitlines()[-1].removeprefix('AgentError: ')}" if said else ""
        raise AgentError(f"the program did not start{why}", said[-4000:])


def supervise(order: dict[str, Any], lock: int) -> dict[str, Any]:
    """Run the supervisor that `start` spawns: start the program, wait for it, upload its log.

    Args:
        order: the arguments of `start`, all but the secrets.
        lock: descriptor of the lock that the child inherits.
    """
    os.set_inheritable(lock, False)
    run_id, successor = order["run_id"], order["successor"]
    folder = attempt_folder(run_id, order["attempt"])
    if not venv_state(order["venv"]):
        raise AgentError(f"the venv {order['venv']} is not on this worker: install it first")
    code_sha256 = check_out(order["code"], folder.parent / "work")
    own = {"SLIPWAY_ATTEMPT": folder.name.partition("-")[2], "SLIPWAY_SUCCESSOR": successor}
    given = {**order["env"], **secret_environment(folder.parent)}
    own["SLIPWAY_CODE_SHA256"] = code_sha256
    environment = run_environment(folder.parent, order["venv"], given, own, order["defaults"])
    write_shell_file(folder.parent, environment, set(secret_environment(folder.parent)))
    plain = dict(environment)
    if order["exit_hook"] or os.environ.get("SLIPWAY_ONE_PROCESS"):
        environment["SLIPWAY_EXIT_HOOK"] = str(int(order["exit_hook"]))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (EXIT_HOOK, environment.get("PYTHONPATH"))))
    begun = {"boot_id": boot_id(), "started": wall_time(), "supervisor": process_identity()}
    begun |= {key: order[key] for key in ("bucket", "log_object", "exit_object")} | {"oom_kills": oom_kills()}
    devices = lock_devices(run_id)
    program = _spawn_program(folder, order["argv"], environment, begun)
    release_devices(devices)  # the program has them
    os.close(lock)
    trackers = start_trackers(folder, order, plain)

    def tell(kind: str, number: int | None) -> None:
        record_notice(folder, kind)
        if number is not None:
            send_signal(os.killpg, program, number)

    # When the VM shuts down, every process gets SIGTERM: the program may save, and its end is still recorded.
    signal.signal(signal.SIGTERM, lambda *_: tell(SHUTDOWN, signal.SIGTERM))
    watch_notices(lambda kind: tell(kind, signal.Signals[order["notice"]] if order["notice"] else None))
    ended, over = threading.Event(), threading.Event()
    copy = GrowingObject(folder / "log", begun["bucket"], begun["log_object"]) if begun["bucket"] else None
    uploads = threading.Thread(target=_upload_log_periodically, args=(folder, copy, ended), daemon=True)
    uploads.start()
    heart = threading.Thread(target=keep_heartbeat, args=(over,), daemon=True)
    heart.start()
    replaced = fence(program, order["bucket"], successor, order["fence_seconds"], ended)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    finish, starved = wall_time(), oom_kills() - begun["oom_kills"]
    send_signal(os.killpg, program, signal.SIGKILL)
    end_trackers(folder, len(order["trackers"]), trackers, None if replaced.is_set() else status)
    kill_leftovers(folder)
    ended.set()
    how = {"code": status, "signal": None} if status >= 0 else {"code": None, "signal": signal.Signals(-status).name}
    error = "a later attempt has replaced this one" if replaced.is_set() else None
    how |= {"error": error, "ended": finish, "oom_kills": starved, "free_gb": round(free_gb(), 3)}
    try:
        return finalize_attempt(folder, how, lambda: uploads.join() or copy)
    finally:
        over.set()
        heart.join()


def write_shell_file(run: Path, environment: dict[str, str], secrets: set[str]) -> None:
    """Write `shell.sh` into the run's folder: it sets the program's variables, except secrets, and enters its folder.

    Bash reads it as the rcfile of an interactive shell; any POSIX shell can source it.
    """
    changed = {
        name: value
        for name, value in sorted(environment.items())
        if name not in secrets and os.environ.get(name) != value
    }
    worker = environment.get("SLIPWAY_WORKER", "").strip("'")
    lines = [
        "[ -r ~/.bashrc ] && . ~/.bashrc",
        *(f"export {name}={shlex.quote(value)}" for name, value in changed.items()),
        rf"PS1='worker {worker}:\w\$ '",
        f"cd {shlex.quote(str(run / 'work'))}",
    ]
    write_atomic(run / "shell.sh", "".join(f"{line}\n" for line in lines).encode())


def _spawn_program(folder: Path, argv: list[str], environment: dict[str, str], begun: dict[str, Any]) -> int:
    """Fork; the child records its own pid before it becomes the program, so a running program is always on record."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        with suppress(OSError):  # when memory runs out, the kernel ends this before those that look after it
            path = Path("/proc/self/oom_score_adj")
            path.write_text(str(max(OOM_SCORE, int(path.read_text()))))
        write_json(folder / "pid.json", {**begun, "program": process_identity()})
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder.parent / "work")
        os.umask(0o022)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvpe(argv[0], argv, environment)  # noqa: S606 (no shell on purpose)
    except (OSError, ValueError) as error:
        os.write(2, f"slipway: cannot start {argv[0]!r}: {_why_not_started(argv[0], environment, error)}\n".encode())
    finally:
        os._exit(127)


def _why_not_started(program: str, environment: dict[str, str], error: Exception) -> str:
    """Explain why the first word of the command cannot be executed; runs in the run's copy of the code."""
    import shutil

    if shutil.which(program, os.F_OK, environment["PATH"]) is None:
        if "/" in program:
            return "there is no such file among the shipped files (program.command)"
        return "no such program in the venv or on the PATH; correct program.command, or install it with program.setup"
    if isinstance(error, PermissionError):
        return f"the file is not executable; run `chmod +x {program}`, or name its interpreter in program.command"
    if isinstance(error, FileNotFoundError):
        return "the file exists, but the interpreter in its first line (#!) does not"
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def fence(program: int, bucket: str | None, successor: str, seconds: float, ended: threading.Event) -> threading.Event:
    """Kill a program once the record of the next attempt exists; return an event that is set then.

    A run that moves to another pod leaves this one without a controller: the old one was stopped, cut off or fenced.
    Once the record of the next attempt exists, everything below the run's prefix belongs to that attempt.

    Args:
        program: process group of the program.
        bucket: bucket of the run; None: nothing is on record.
        successor: object name of the next attempt's record; empty: nothing replaces this attempt.
        seconds: interval of the lookups.
        ended: set when the program has ended.
    """
    replaced = threading.Event()

    def end() -> None:
        replaced.set()
        send_signal(os.killpg, program, signal.SIGKILL)  # it must not save: the bucket is the next attempt's

    if bucket and successor:
        order = (bucket, successor, seconds, ended, end)
        threading.Thread(target=_watch_for_successor, args=order, daemon=True).start()
    return replaced


def _watch_for_successor(
    bucket: str, successor: str, seconds: float, ended: threading.Event, end: Callable[[], None]
) -> None:
    while not ended.wait(seconds):
        try:
            if object_exists(bucket, successor):
                end()
                return
        except TransferError as error:  # the next lookup counts
            complain(f"cannot look for a later attempt: {error}")


def keep_heartbeat(over: threading.Event) -> None:
    """Show that the pod is in use until the end is on record, and start its watchdog again if that has died.

    The last look is the supervisor's last act: from then on nobody else is sure to look.
    """
    while not over.wait(HEARTBEAT_SECONDS):
        write_heartbeat()
        keep_watchdog()
    keep_watchdog()


def _upload_log_periodically(folder: Path, copy: GrowingObject | None, ended: threading.Event) -> None:
    """Upload what is new of the log periodically, spending at most about a tenth of the time on it."""
    seen, pause, log, mask = 0, LOG_UPLOAD_SECONDS, folder / "log", SecretMask.for_run(folder.parent)
    while copy and not ended.wait(pause):
        before = time.monotonic()
        try:
            seen = mask.mask_file(log, seen)
            copy.send(seen)
        except TransferError as error:  # the final upload is the one that counts
            complain(f"cannot upload the log: {error}")
        pause = max(LOG_UPLOAD_SECONDS, 10 * (time.monotonic() - before))
