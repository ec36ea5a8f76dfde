"""The stages of a first contact, as the run's events tell them; the preemption by hand; facts about the workers."""

import base64
import json
import threading
import time
from typing import Any

from controller.context import Context
from controller.core.errors import SlipwayError
from controller.core.events import Event
from controller.core.this_process import InterruptedSleepError
from controller.gcp.answers import OperationFailedError
from controller.plan.build import Plan
from controller.resources.pod.node import Node
from controller.witness.drill import CHECKPOINT, TimeLimit
from controller.witness.recording import Recording, Stage

SCRIPT = r"""
import glob, grp, importlib.metadata, json, os, platform, re, resource, shutil, subprocess, urllib.request

METADATA = "http://" + os.environ.get("GCE_METADATA_HOST", "metadata.google.internal") + "/computeMetadata/v1/"
PACKAGES = ("jax", "jaxlib", "libtpu", "libtpu-nightly", "torch", "torch-xla", "uv", "pip")


def read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def metadata(path):
    request = urllib.request.Request(METADATA + path, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=3) as answer:
            return answer.read().decode()
    except (OSError, ValueError) as error:
        return "error: " + str(error)


def output(*command):
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "error: " + str(error)
    return (done.stdout or done.stderr).strip()


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def programs():
    return {read(path).strip() for path in glob.glob("/proc/[0-9]*/comm")}


system = dict(line.split("=", 1) for line in read("/etc/os-release").splitlines() if "=" in line)
sshd = output("sudo", "-n", "sshd", "-T")
disks = {path: shutil.disk_usage(path) for path in ("/", os.path.expanduser("~"), "/dev/shm") if os.path.exists(path)}
memory = re.search(r"MemTotal:\s+(\d+)", read("/proc/meminfo"))
print(json.dumps({
    "system": system.get("PRETTY_NAME", "").strip('"'),
    "kernel": platform.release(),
    "machine": platform.machine(),
    "python": platform.python_version(),
    "packages": {name: version(name) for name in PACKAGES},
    "uptime_seconds": float((read("/proc/uptime") or "0").split()[0]),
    "boot_state": output("systemctl", "is-system-running"),
    "image": metadata("instance/image"),
    "machine_type": metadata("instance/machine-type"),
    "metadata_names": metadata("instance/attributes/").split(),
    "scopes": metadata("instance/service-accounts/default/scopes").split(),
    "device_nodes": sorted(glob.glob("/dev/accel*") + glob.glob("/dev/vfio/*")),
    "environment_names": sorted(os.environ),
    "sshd": {key: value for key, _, value in (line.partition(" ") for line in sshd.splitlines())
             if key in ("maxstartups", "maxsessions", "logingracetime", "clientaliveinterval")},
    "sudo": output("sudo", "-n", "true") == "",
    "groups": sorted(grp.getgrgid(number).gr_name for number in os.getgroups()),
    "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "cpus": os.cpu_count(),
    "memory_gb": round(int(memory[1]) / 2**20, 1) if memory else None,
    "free_gb": {path: round(usage.free / 2**30, 1) for path, usage in disks.items()},
    "apt_programs": sorted(name for name in programs() if re.match(r"apt|dpkg|unattended-upgr", name)),
    "apt_locks": [path for path in ("/var/lib/dpkg/lock-frontend", "/var/lib/apt/lists/lock") if os.path.exists(path)],
}))
"""
"""Standard library only; prints names of variables and metadata, never their values."""
TRIES = 3


def survey_workers(context: Context, node: Node) -> list[dict[str, Any]]:
    """Return the facts of every worker of a READY node; of one that does not answer, the error."""
    return [_survey(context, node, worker) for worker in range(len(node.fleet(context)))]


def _survey(context: Context, node: Node, worker: int) -> dict[str, Any]:
    """Connect anew, so that the time of a connection is known, and run the script."""
    fact: dict[str, Any] = {"node": node.name, "uid": node.status.uid, "worker": worker}
    fresh = context.make_fleet(node.ssh_target(context))
    try:
        connection, times = fresh.ssh_connection(worker).connection(), list[float]()
        for _ in range(TRIES):  # the first one opens the connection
            began = time.monotonic()
            connection.run("true", hide=True, timeout=60)
            times.append(round(time.monotonic() - began, 3))
        code = base64.b64encode(SCRIPT.encode()).decode()
        ran = connection.run(
            f"python3 -c 'import base64; exec(base64.b64decode(\"{code}\"))'", hide=True, warn=True, timeout=120
        )
        fact |= {"ssh_first_seconds": times[0], "ssh_again_seconds": times[1:]}
        lines = ran.stdout.splitlines()
        fact |= json.loads(lines[-1]) if ran.exited == 0 and lines else {"error": ran.stderr.strip()[-2000:]}
    except (SlipwayError, OSError, EOFError, ValueError) as error:
        fact["error"] = str(error)
    finally:
        fresh.close()
    return fact


STAGES = ("look", "first run", "checkpoint", "preempt", "recover", "clean up", "verify")
"""look: checks and price. first run: from enabled APIs to the launched program. checkpoint: until it is in the bucket.
preempt: the node is deleted by hand, until the program runs on a new one. recover: until the run has finished. clean
up: `down --all`. verify: what is left."""
FACTS_SECONDS = 180.0
"""How long the clean-up waits for the facts about the workers."""


class StageLog:
    """Keeps the stages of a recording. A stage begins when the one before it ends; the rest are skipped."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._lock = threading.RLock()

    def begin(self, name: str) -> None:
        with self._lock:
            self.end("ok")
            self._recording.stages.append(Stage(name, self._recording.seconds()))

    def end(self, outcome: str, detail: str = "") -> None:
        """End the stage in progress, if there is one."""
        with self._lock:
            if (stage := self._recording.stage) is not None:
                stage.outcome, stage.detail = outcome, detail
                stage.seconds = round(self._recording.seconds() - stage.began, 3)

    def note(self, message: str) -> None:
        if (stage := self._recording.stage) is not None:
            stage.notes.append(message)

    def skip_rest(self) -> None:
        """Record the stages before the clean-up that never began."""
        known = {stage.name for stage in self._recording.stages}
        for name in STAGES[: STAGES.index("clean up")]:
            if name not in known:
                self._recording.stages.append(Stage(name, self._recording.seconds(), outcome="skipped"))

    def on_event(self, event: Event) -> None:
        """Record what happens to a resource, and what the user is told."""
        if (stage := self._recording.stage) is None:
            return
        if event.kind == "note":
            stage.notes.append(event.message)
        elif event.kind == "step_started":
            if all(step["resource"] != event.subject or step["outcome"] != "running" for step in stage.steps):
                stage.steps.append(self._step(event) | {"waiting_for": event.message})
        elif event.kind in ("step_done", "step_failed"):
            steps = [s for s in stage.steps if s["resource"] == event.subject and s["outcome"] == "running"]
            step = steps[-1] if steps else self._step(event)
            if not steps:
                stage.steps.append(step)
            step["outcome"] = "ok" if event.kind == "step_done" else f"failed: {event.message}"
            step["action"] = event.data.get("action", "")
            step["seconds"] = round(self._recording.seconds() - step["began"], 3)

    def _step(self, event: Event) -> dict[str, Any]:
        title, began = event.data.get("title", event.subject), self._recording.seconds()
        return {"resource": event.subject, "title": title, "began": began, "outcome": "running"}


class FirstRun:
    """Follows the events of the drill: surveys the workers, and deletes the node once a checkpoint is in the bucket."""

    def __init__(self, plan: Plan, context: Context, recording: Recording, log: StageLog, limit: TimeLimit) -> None:
        self._plan, self._context, self._recording = plan, context, recording
        self._log, self._limit = log, limit
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._surveyed = False
        self._told: set[tuple[Any, Any]] = set()
        self._resumed_at: int | None = None
        self.preempted = False
        """Whether the node was deleted by hand."""

    def on_event(self, event: Event) -> None:
        """Move on to the next stage, before `StageLog` records the event."""
        attempt = event.data.get("attempt")
        if event.kind == "step_done" and event.subject.startswith("ssh/") and not self._surveyed:
            self._surveyed = True
            self._spawn(self._survey)
        elif event.kind == "note" and isinstance(attempt, int) and "verdict" not in event.data:
            self._log.begin("checkpoint" if attempt == 1 else "recover")
            if attempt == 1:
                self._spawn(self._preempt)
        elif event.kind == "metrics" and event.data["metrics"].get("phase") == "train":
            self._note_step(event.data["metrics"])

    def _note_step(self, metrics: dict[str, Any]) -> None:
        """Remember the first step that is new in the last attempt, which repeats the lines of the one before it."""
        line = metrics.get("step"), metrics.get("time")
        stage = self._recording.stage
        if stage is None or stage.name != "recover":
            self._told.add(line)
        elif line not in self._told and self._resumed_at is None:
            self._resumed_at = metrics.get("step")

    def problem(self) -> str:
        """Return what the finished run failed to show, empty if nothing."""
        if not self.preempted:
            return "the pod was not preempted by hand"
        if self._resumed_at != CHECKPOINT + 1:
            return f"the second attempt began at step {self._resumed_at}, not {CHECKPOINT + 1}"
        return ""

    def close(self) -> None:
        """Wait until the facts are recorded and no request is under way."""
        self._closed.set()
        for thread in self._threads:
            thread.join(FACTS_SECONDS)

    def _spawn(self, target: Any) -> None:
        thread = threading.Thread(target=target, daemon=True, name=f"witness-{target.__name__}")
        self._threads.append(thread)
        thread.start()

    def _survey(self) -> None:
        try:
            node = self._plan.observe_pod(self._context)
            if isinstance(node, Node):
                self._recording.workers.extend(survey_workers(self._context, node))
        except (SlipwayError, InterruptedSleepError) as error:
            self._recording.workers.append({"error": str(error)})

    def _preempt(self) -> None:
        try:
            while not self._has_checkpoint():
                if self._closed.wait(self._context.poll_seconds):
                    return
            node = self._plan.node.find(self._context)
            if node is None or self._closed.is_set():
                return
            self._log.begin("preempt")
            self.preempted = True
            node.plane.delete_by_hand(self._context, node.name, node.place.zone)
        except InterruptedSleepError:
            return
        except OperationFailedError as error:  # the controller may have replaced the node already
            self._log.note(f"the deletion by hand: {error}")
        except SlipwayError as error:  # the program would wait for ever
            self._limit.stop(f"the node could not be preempted by hand: {error}")

    def _has_checkpoint(self) -> bool:
        prefix = f"runs/{self._plan.run_id}/checkpoints/{CHECKPOINT}/commit_success"
        answer = self._context.google.call("storage", "objects.list", bucket=self._plan.bucket, prefix=prefix)
        return bool(answer.get("items"))
