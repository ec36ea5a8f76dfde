"""Facts about a worker right after its first boot, and how long SSH to it takes."""

import base64
import json
import time
from collections.abc import Callable
from typing import Any

from controller.context import Context
from controller.core.errors import SlipwayError
from controller.resources.pod.node import Node

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


def survey_workers(
    context: Context, node: Node, monotonic: Callable[[], float] = time.monotonic
) -> list[dict[str, Any]]:
    """Return the facts of every worker of a READY node; of one that does not answer, the error."""
    fleet = node.fleet(context)
    return [_survey(context, node, worker, monotonic) for worker in range(len(fleet))]


def _survey(context: Context, node: Node, worker: int, monotonic: Callable[[], float]) -> dict[str, Any]:
    """Connect anew, so that the time of a connection is known, and run the script."""
    fact: dict[str, Any] = {"node": node.name, "uid": node.status.uid, "worker": worker}
    fresh = context.make_fleet(node.ssh_target(context))
    try:
        connection, times = fresh.ssh_connection(worker).connection(), list[float]()
        for _ in range(TRIES):  # the first one opens the connection
            began = monotonic()
            connection.run("true", hide=True, timeout=60)
            times.append(round(monotonic() - began, 3))
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
