"""Nothing that only Linux has is used when a module is imported: macOS must be able to start every command."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.paths import ROOT

IMPORT_AS_ON_MACOS = """
import importlib, os, pkgutil, select, signal, socket, sys, time
import conf, controller

names = [
    found.name
    for package in (conf, controller)
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    if not found.name.endswith("__main__") and "standins" not in found.name
]
for name in names:
    importlib.import_module(name)  # and the libraries, which choose their own code for macOS
for name in names:
    del sys.modules[name]
for module, absent in {
    os: ["sched_getaffinity", "sched_setaffinity", "pidfd_open", "memfd_create", "setns", "unshare", "splice",
         "getrandom", "posix_fadvise", "eventfd", "copy_file_range", "O_TMPFILE", "O_PATH", "O_DIRECT"],
    select: ["epoll"],
    signal: ["sigtimedwait", "sigwaitinfo", "SIGPWR", "SIGSTKFLT", "SIGRTMIN"],
    socket: ["AF_NETLINK", "AF_PACKET", "SO_BINDTODEVICE", "SOCK_CLOEXEC", "SOCK_NONBLOCK"],
    time: ["CLOCK_BOOTTIME"],
}.items():
    for name in absent:
        vars(module).pop(name, None)
vars(__import__("resource")).pop("prlimit", None)
sys.platform = "darwin"
os.uname = lambda: os.uname_result(("Darwin", "mac", "23", "", "arm64"))
for name in names:
    importlib.import_module(name)
print(len(names))
"""


@pytest.mark.deep
def test_every_module_can_be_imported() -> None:
    argv = [sys.executable, "-W", "ignore", "-c", IMPORT_AS_ON_MACOS]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 250


def test_the_check_can_fail() -> None:
    broken = IMPORT_AS_ON_MACOS.replace("print(len(names))", "from os import sched_getaffinity")
    broken = broken.replace("in (conf, controller)", "in ()")
    argv = [sys.executable, "-W", "ignore", "-c", broken]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "cannot import name 'sched_getaffinity'" in done.stderr
