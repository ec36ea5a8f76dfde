"""conf/laptop.txt is enough for a laptop that only launches, without JAX and the trainer's libraries, also on macOS."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.paths import ROOT

LINES = [
    line
    for file in ("driver.in", "laptop.txt")
    for line in (ROOT / "conf" / file).read_text().splitlines()
    if line and line[0] not in "#-"
]
RUN_WITHOUT = """
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
sys.argv = ["slipway", *{words!r}]
runpy.run_module("controller", run_name="__main__")
"""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _with_dependencies(lines: list[str]) -> set[str]:
    found: set[str] = set()
    wanted = [Requirement(line) for line in lines]
    while wanted:
        one = wanted.pop()
        if (name := _normal(one.name)) in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        try:
            wanted += [Requirement(line) for line in requires(one.name) or []]
        except PackageNotFoundError:  # for another system
            continue
    return found


def python(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-W", "ignore", "-c", script]
    environment = {**os.environ, "SLIPWAY_HOME": str(folder / "home")}
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_missing_dependency_is_one_line(tmp_path: Path) -> None:
    """As of `python -m controller` in a clone before its installation."""
    script = RUN_WITHOUT.format(absent={"pydantic"}, words=["plan", "+experiment=quickstart"])
    done = python(script, tmp_path)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {sys.executable} lacks the package pydantic; install Slipway with its dependencies")


def test_it_is_a_part_of_the_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert set(LINES) <= set(project)


def test_a_laptop_needs_no_jax(tmp_path: Path) -> None:
    words = ["plan", "+experiment=gemma2b_gsm8k", "cloud.project=a-project"]
    kept = _with_dependencies(LINES)
    absent = {
        top
        for top, owners in packages_distributions().items()
        if not kept.intersection(map(_normal, owners)) and "slipway" not in owners
    }
    assert {"jax", "aiohttp", "pyarrow"} <= absent
    script = RUN_WITHOUT.format(absent=absent, words=words)
    done = python(script, tmp_path)
    assert "No module named" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout, done.stderr


# Nothing that only Linux has may be used when a module is imported: macOS must be able to start every command.
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
    done = python(IMPORT_AS_ON_MACOS, ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 250
