"""The first process of a box: `python -I -S init.py SETTINGS`, with the standard library alone.

A box has namespaces of its own for users, mounts, processes, IPC and network, as `unshare(1)` makes them, so that an
ordinary user can have one. Its root has the paths to read, read-only, and one folder to write. This process is number 1
in it: the kernel ends everything else when it ends. It starts commands, sees to the limits of all their processes
together, and answers requests of trainer/sandbox/box.py on a socket of packets, each a JSON object.
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
import time

POLL_SECONDS = 0.02
FOLDER_SECONDS = 0.5
"""Between two looks at the size of the folder."""
SPARE_BYTES = 1 << 30
"""What the kernel gives a process beyond twice the box's memory, since a program that it refuses counts as an error."""
USER = 1000
"""The only user of a box: whoever started it."""
HOME = "/home/box"
"""The same in every box, since the policy reads it."""
OLD = "/.old"
PACKET = 1 << 16
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {"/dev/fd": "/proc/self/fd", "/dev/stdin": "fd/0", "/dev/stdout": "fd/1", "/dev/stderr": "fd/2"}
FILES = {
    "/etc/passwd": f"box:x:{USER}:{USER}::/:/bin/sh\n",
    "/etc/group": f"box:x:{USER}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
}
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
MNT_DETACH, SYS_MOUNT_SETATTR, SYS_PIVOT_ROOT = 2, 442, {"x86_64": 155, "aarch64": 41}
AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY, ATTR_NOSUID = -100, 0x8000, 1, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1

libc = ctypes.CDLL(None, use_errno=True)


def call(what: str, function: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError, which names what it was for."""
    given = [argument.encode() if isinstance(argument, str) else argument for argument in arguments]
    if getattr(libc, function)(*given):
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    call(f"mount {target}", "mount", source, target, kind, ctypes.c_ulong(flags), data)


def enter_namespaces() -> None:
    """Leave this process's namespaces; children are in the new one of processes."""
    user, group = os.getuid(), os.getgid()
    call("no_new_privs", "prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("unshare", "unshare", NEWUSER | NEWNS | NEWPID | NEWIPC | NEWUTS | NEWNET)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{USER} {user} 1"), ("gid_map", f"{USER} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
            file.write(text)


def build_root(readable: list[str], home: str, temporary: str) -> None:
    """Make a root of the readable paths, the folder to write and another as /tmp; the old one is gone."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("box", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=16m,mode=755")  # noqa: S108 - hidden, not used
    os.chdir("/tmp")  # noqa: S108
    os.mkdir(OLD[1:])  # noqa: PTH102
    number = SYS_PIVOT_ROOT[os.uname().machine]
    call("pivot_root", "syscall", ctypes.c_long(number), ".", OLD[1:])
    os.chdir("/")
    for path in readable:
        bind(path, path, read_only=True)
    for path, text in FILES.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        with open(path, "w") as file:  # noqa: PTH123
            file.write(text)
    for name in DEVICES:
        bind(f"/dev/{name}", f"/dev/{name}", read_only=False)
    for path, target in LINKS.items():
        os.symlink(target, path)  # noqa: PTH211
    os.makedirs("/proc", exist_ok=True)  # noqa: PTH103
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    bind(temporary, "/tmp", read_only=False)  # noqa: S108 - of the box
    bind(temporary, "/dev/shm", read_only=False)  # noqa: S108
    bind(home, HOME, read_only=False)
    call("umount the old root", "umount2", OLD, MNT_DETACH)
    os.rmdir(OLD)  # noqa: PTH106
    set_attributes("/", ATTR_RDONLY | ATTR_NOSUID)


def bind(source: str, path: str, *, read_only: bool) -> None:
    """Show a file or folder of the old root in the new one; a link is copied, and what is missing is left out."""
    source = OLD + source
    try:
        kind = os.lstat(source).st_mode
    except FileNotFoundError:
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    if stat.S_ISLNK(kind):
        os.symlink(os.readlink(source), path)  # noqa: PTH115, PTH211
        return
    if stat.S_ISDIR(kind):
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    mount(source, path, None, MS_BIND | MS_REC)
    set_attributes(path, ATTR_NOSUID | (ATTR_RDONLY if read_only else 0), AT_RECURSIVE)


def set_attributes(path: str, attributes: int, flags: int = 0) -> None:
    given = struct.pack("QQQQ", attributes, 0, 0, 0)
    number = ctypes.c_long(SYS_MOUNT_SETATTR)
    call(f"mount_setattr {path}", "syscall", number, AT_FDCWD, path, flags, given, ctypes.c_size_t(len(given)))


def open_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        name, flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", name, flags | IFF_UP))


class Init:
    """Starts commands, and kills everything in the box at a limit."""

    def __init__(self, settings: dict, control: socket.socket) -> None:
        self.settings, self.control = settings, control
        self.commands: dict[int, dict] = {}
        """What runs, by the number of its process: number of the request, and CPU seconds of the box when it began."""
        self.cause = ""
        """Why everything was killed, until it has ended."""
        self.looked = 0.0

    def serve(self) -> None:
        """Answer until the other side closes the socket."""
        self.reply({"id": 0})
        while True:
            if select.select([self.control], [], [], POLL_SECONDS)[0]:
                packet, descriptors, _, _ = socket.recv_fds(self.control, PACKET, 4)
                if not packet:
                    return
                self.answer(json.loads(packet), descriptors)
            self.reap()
            self.look()

    def answer(self, request: dict, descriptors: list[int]) -> None:
        match request["do"]:
            case "run":
                with os.fdopen(descriptors[0], "rb") as payload:
                    how = json.load(payload)
                process = self.start(how, descriptors[1:])
                self.commands[process] = {"id": request["id"], "cpu": how["cpu"], "used": self.cpu_seconds()}
                for descriptor in descriptors[1:]:
                    os.close(descriptor)
            case "kill":
                self.kill(request["cause"])
            case "listen" | "dial":
                address = "127.0.0.1", request["port"]
                try:
                    made = (socket.create_server if request["do"] == "listen" else socket.create_connection)(address)
                except OSError as error:
                    self.reply({"id": request["id"], "error": error.strerror})
                else:
                    with made:
                        self.reply({"id": request["id"]}, made.fileno())

    def start(self, how: dict, descriptors: list[int]) -> int:
        process = os.fork()
        if process:
            return process
        try:
            os.setsid()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            os.closerange(3, 1 << 16)
            for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(ignored, signal.SIG_DFL)
            limits = self.settings["limits"]
            for name, most in (
                (resource.RLIMIT_CORE, 0),
                (resource.RLIMIT_DATA, 2 * limits["memory"] + SPARE_BYTES),
                (resource.RLIMIT_FSIZE, limits["disk"]),
                (resource.RLIMIT_NPROC, 2 * limits["processes"]),
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

    def reap(self) -> None:
        """Collect what has ended, and tell of commands."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if process == 0:
                break
            if (command := self.commands.pop(process, None)) is not None:
                code, cause = os.waitstatus_to_exitcode(status), self.cause
                if not cause and code == -signal.SIGXFSZ:
                    cause = "output"
                self.reply({"id": command["id"], "code": code, "cause": cause})
        if self.cause and not processes():
            self.cause = ""

    def look(self) -> None:
        """Kill everything that is over a limit."""
        limits, pages, count, cpu = self.settings["limits"], 0, 0, self.cpu_seconds()
        for name in processes():
            count += 1
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/statm") as file:  # noqa: PTH123
                pages += int(file.read().split()[1])
        if count > limits["processes"]:
            self.kill("processes")
        elif pages * resource.getpagesize() > limits["memory"]:
            self.kill("memory")
        elif any(cpu - command["used"] > command["cpu"] for command in self.commands.values()):
            self.kill("timeout")
        elif time.monotonic() > self.looked + FOLDER_SECONDS:
            self.looked = time.monotonic()
            folders = (HOME, "/tmp")  # noqa: S108
            if sum(folder_bytes(folder, limits["disk"]) for folder in folders) > limits["disk"]:
                self.kill("output")

    def kill(self, cause: str) -> None:
        if not self.cause:
            self.cause = cause
            self.reply({"killed": cause})
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # everything but this process

    def cpu_seconds(self) -> float:
        """Return what the box has used, by processes that run and that have ended."""
        ended = os.times()
        total = ended.children_user + ended.children_system
        for name in processes():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:  # noqa: PTH123
                fields = file.read().rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        return total

    def reply(self, answer: dict, *descriptors: int) -> None:
        socket.send_fds(self.control, [json.dumps(answer).encode()], list(descriptors))


def processes() -> list[str]:
    """Return the numbers of the processes of the box but for this one."""
    return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]  # noqa: PTH208


def folder_bytes(folder: str, most: int) -> int:
    """Return the size of a folder on disk, or something more than `most`; a file counts as a block at least."""
    total = 0
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            with contextlib.suppress(OSError):
                total += 4096 + 512 * os.lstat(os.path.join(place, name)).st_blocks  # noqa: PTH118
            if total > most:
                return total
    return total


def main() -> None:
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control"])
    try:
        call("prctl", "prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != settings["parent"]:
            return
        enter_namespaces()
        process = os.fork()
        if process:
            control.close()
            os.waitpid(process, 0)
            return
        call("prctl", "prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        build_root(settings["readable"], settings["home"], settings["temporary"])
        open_loopback()
        with open("/proc/sys/user/max_user_namespaces", "w") as file:  # noqa: PTH123
            file.write("0")  # no box in a box, whose first process could mount
        call("prctl", "prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (OSError, KeyError) as error:
        socket.send_fds(control, [json.dumps({"refused": str(error)}).encode()], [])
        return
    Init(settings, control).serve()


if __name__ == "__main__":
    main()
