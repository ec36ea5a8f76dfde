"""The first process of a box: `python -I -S init.py SETTINGS`, with the standard library alone.

A box has namespaces of its own for users, mounts, processes, IPC and network, which Linux gives ordinary users too. Its
root is a file system in memory with the paths to read, read-only, so that it ends with the box and cannot outgrow its
size. This process is number 1 in it: the kernel ends everything else when it ends, and it ends when its socket closes.
It starts commands, sees to the limits of all their processes together, and answers trainer/sandbox/box.py on that
socket, whose packets are JSON objects.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys

POLL_SECONDS = 0.02
SPARE_BYTES = 1 << 30
"""What the kernel gives a process beyond the box's memory, since a program that it refuses counts as an error."""
USER = 1000
"""The only user of a box: whoever started it, without the rights of root."""
HOME = "/home/box"
"""The same in every box, since the policy reads it."""
ROOT, OLD = "/proc", ".old"
"""Where the root is built, in a folder that every machine has and no path to read is in; where the old one goes."""
PACKET = 1 << 16
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {
    **{"dev/fd": "/proc/self/fd", "dev/stdin": "fd/0", "dev/stdout": "fd/1", "dev/stderr": "fd/2"},
    "dev/shm": "/tmp",  # noqa: S108 - of the box
}
FILES = {"passwd": f"box:x:{USER}:{USER}::{HOME}:/bin/sh\n", "group": f"box:x:{USER}:\n"}
NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
MNT_DETACH, SYS_MOUNT_SETATTR, SYS_PIVOT_ROOT = 2, 442, {"x86_64": 155, "aarch64": 41}
AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY, ATTR_NOSUID = -100, 0x8000, 1, 2
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1

libc = ctypes.CDLL(None, use_errno=True)


def call(what: str, function: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError, which names what it was for."""
    given = [argument.encode() if isinstance(argument, str) else argument for argument in arguments]
    if getattr(libc, function)(*given):
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    call(f"mount {target}", "mount", source, target, kind, ctypes.c_ulong(flags), data)


def enter_namespaces(*, has_network: bool) -> None:
    """Leave this process's namespaces; children are in the new one of processes."""
    user, group = os.getuid(), os.getgid()
    call("no_new_privs", "prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("unshare", "unshare", NEWUSER | NEWNS | NEWPID | NEWIPC | (0 if has_network else NEWNET))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{USER} {user} 1"), ("gid_map", f"{USER} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
            file.write(text)


def build_root(readable: list[str], disk: int) -> None:
    """Make a root of `disk` bytes with the readable paths; the old one is gone."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("box", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk},nr_inodes={disk // 4096 + 1024},mode=755")
    os.chdir(ROOT)
    for folder in (OLD, "proc", "tmp", "etc", "dev", HOME[1:]):
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    for path in (*readable, *(f"/dev/{name}" for name in DEVICES)):
        bind(path)
    for name, text in FILES.items():
        with open(f"etc/{name}", "w") as file:  # noqa: PTH123
            file.write(text)
    for path, target in LINKS.items():
        os.symlink(target, path)  # noqa: PTH211
    mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    call("pivot_root", "syscall", ctypes.c_long(SYS_PIVOT_ROOT[os.uname().machine]), ".", OLD)
    os.chdir("/")
    call("umount the old root", "umount2", OLD, MNT_DETACH)
    os.rmdir(OLD)  # noqa: PTH106


def bind(path: str) -> None:
    """Show a file or folder in the new root, read-only; a link is copied, and what is missing is left out."""
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    place = f".{path}"
    os.makedirs(os.path.dirname(place), exist_ok=True)  # noqa: PTH103, PTH120
    if stat.S_ISLNK(kind):
        os.symlink(os.readlink(path), place)  # noqa: PTH115, PTH211
        return
    if stat.S_ISDIR(kind):
        os.makedirs(place, exist_ok=True)  # noqa: PTH103
    else:
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o600))
    mount(path, place, None, MS_BIND | MS_REC)
    given = struct.pack("QQQQ", ATTR_NOSUID | ATTR_RDONLY, 0, 0, 0)
    number, size = ctypes.c_long(SYS_MOUNT_SETATTR), ctypes.c_size_t(len(given))
    call(f"mount_setattr {path}", "syscall", number, AT_FDCWD, place, AT_RECURSIVE, given, size)


def open_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        name, flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", name, flags | IFF_UP))


class Init:
    """Starts commands, and ends the box at a limit."""

    def __init__(self, limits: dict, control: socket.socket) -> None:
        self.limits, self.control = limits, control
        self.commands: dict[int, dict] = {}
        """What runs, by the number of its process: the request, its output, and the box's CPU seconds before it."""

    def serve(self) -> None:
        """Answer until the other side closes the socket, or a limit is exceeded."""
        cause = ""
        self.reply({"id": 0})
        while not cause:
            if select.select([self.control], [], [], POLL_SECONDS)[0]:
                packet, descriptors, _, _ = socket.recv_fds(self.control, PACKET, 2)
                if not packet:
                    return
                self.answer(json.loads(packet), descriptors)
            cause = self.exceeded() or self.reap()
        self.reply({"killed": cause})

    def answer(self, request: dict, descriptors: list[int]) -> None:
        match request["do"]:
            case "run":
                self.start(request, *descriptors)
            case "kill":
                started = [process for process, command in self.commands.items() if command["id"] == request["id"]]
                with contextlib.suppress(ProcessLookupError):
                    for process in started:
                        os.killpg(process, signal.SIGKILL)
            case "socket":
                with socket.socket() as made:
                    self.reply({"id": request["id"]}, made.fileno())

    def start(self, request: dict, payload: int, stdin: int) -> None:
        """Start a command with stdin, and with outputs that are files of the box."""
        with os.fdopen(payload, "rb") as file:
            how = json.load(file)
        outputs = [os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600) for _ in range(2)]  # noqa: S108
        used, process = self.cpu_seconds(), os.fork()
        if not process:
            self.execute(how, (stdin, *outputs))
        os.close(stdin)
        self.commands[process] = {**request, "outputs": outputs, "used": used}

    def execute(self, how: dict, descriptors: tuple[int, ...]) -> None:
        """Become the command."""
        try:
            os.setsid()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            os.closerange(3, 1 << 16)
            for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(ignored, signal.SIG_DFL)
            for name, most in (
                (resource.RLIMIT_CORE, 0),
                (resource.RLIMIT_DATA, self.limits["memory"] + SPARE_BYTES),
                (resource.RLIMIT_FSIZE, self.limits["disk"]),
                (resource.RLIMIT_NPROC, 16 * self.limits["processes"]),  # threads count, of which BLAS has one per core
            ):
                _, hard = resource.getrlimit(name)
                most = most if hard == resource.RLIM_INFINITY else min(most, hard)
                resource.setrlimit(name, (most, most))
            os.chdir(HOME)
            os.execvpe(how["argv"][0], how["argv"], how["env"])  # noqa: S606
        except OSError as error:
            os.write(2, f"{how['argv'][0]}: {error}\n".encode())
        finally:
            os._exit(127)

    def reap(self) -> str:
        """Collect what has ended, and tell of commands. Return the limit that ended one, or an empty text."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                command, code = self.commands.pop(ended[0], None), os.waitstatus_to_exitcode(ended[1])
                if command is None:
                    continue
                if code == -signal.SIGXFSZ:
                    return "output"
                self.reply({"id": command["id"], "code": code}, *command["outputs"])
                for output in command["outputs"]:
                    os.close(output)
        return ""

    def exceeded(self) -> str:
        """Return the limit that the box exceeds, or an empty text."""
        found, pages, cpu = processes(), 0, self.cpu_seconds()
        for name in found:
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/statm") as file:  # noqa: PTH123
                pages += int(file.read().split()[1])
        over = {
            "processes": len(found) > self.limits["processes"],
            "memory": pages * resource.getpagesize() > self.limits["memory"],
            "timeout": any(cpu - command["used"] > self.limits["cpu"] for command in self.commands.values()),
            "output": os.statvfs("/").f_bavail == 0,
        }
        return next((name for name, is_over in over.items() if is_over), "")

    def cpu_seconds(self) -> float:
        """Return what the box has used, by processes that run and that have ended."""
        ended = os.times()
        total = ended.children_user + ended.children_system
        for name in processes():
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat") as file:  # noqa: PTH123
                fields = file.read().rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        return total

    def reply(self, answer: dict, *descriptors: int) -> None:
        socket.send_fds(self.control, [json.dumps(answer).encode()], list(descriptors))


def processes() -> list[str]:
    """Return the numbers of the processes of the box but for this one."""
    return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]  # noqa: PTH208


def main() -> None:
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control"])
    try:
        enter_namespaces(has_network=settings["has_network"])
        process = os.fork()
        if process:
            control.close()
            os.waitpid(process, 0)
            return
        build_root(settings["readable"], settings["limits"]["disk"])
        if not settings["has_network"]:
            open_loopback()
        with open("/proc/sys/user/max_user_namespaces", "w") as file:  # noqa: PTH123
            file.write("0")  # no box in a box, whose first process could mount
        call("prctl", "prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (OSError, KeyError) as error:
        socket.send_fds(control, [json.dumps({"refused": str(error)}).encode()], [])
        return
    Init(settings["limits"], control).serve()


if __name__ == "__main__":
    main()
