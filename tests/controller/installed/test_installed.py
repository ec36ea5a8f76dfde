"""Slipway as pip installs it, beside packages of the same names, for a laptop without JAX; and as a library."""

import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from packaging.requirements import Requirement

from conf.schema.config import Config
from controller import api
from controller.context import Progress, format_size
from controller.core.events import Event, Events
from controller.core.this_process import DISTRIBUTION
from controller.inputs.code import take_snapshot
from controller.records import index
from controller.sweep.definition import define_sweep
from tests.conftest import deep, wide
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.fakes.clock import ManualClock
from tests.paths import ROOT

BUILD = "import hatchling.build as b, sys; print(b.build_{}(sys.argv[1]))"
COMMAND = "import sys; from slipway.__main__ import main; sys.exit(main())"
"""What pip's script `slipway` does."""
RUN_NAME = "from slipway import api; print(api.compose('+experiment=quickstart').run.name)"
SHIPPED = """
from pathlib import Path
from slipway import api
from controller.inputs.code import take_snapshot
print(take_snapshot(api.compose("+experiment=quickstart"), Path.cwd()).sha256)
"""


@dataclass(frozen=True)
class Installation:
    """A venv with Slipway and, through a .pth file, the libraries of the tests' own environment."""

    folder: Path
    home: Path

    @property
    def site(self) -> Path:
        [found] = self.folder.glob("lib/python*/site-packages")
        return found

    def python(self, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), "SLIPWAY_HOME": str(self.home / ".slipway")}
        argv = [str(self.folder / "bin" / "python"), *words]
        return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, check=False)

    def expect(self, *words: str, cwd: Path) -> str:
        done = self.python(*words, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module", params=["wheel", *deep("editable")])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-c", BUILD.format(request.param), str(folder)]
    wheel = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()[-1]
    venv.create(folder / "venv", symlinks=True)
    (folder / "home").mkdir()
    made = Installation(folder / "venv", folder / "home")
    with zipfile.ZipFile(folder / wheel) as files:
        files.extractall(made.site)
    (made.site / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return made


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's repository whose packages have Slipway's names."""
    for name in ("conf", "controller", "trainer"):
        (package := tmp_path / "project" / name).mkdir(parents=True)
        (package / "__init__.py").write_text(f"raise SystemExit('the {name} of the project')\n")
    return tmp_path / "project"


def test_pip_installs_one_name(installed: Installation, tmp_path: Path) -> None:
    """`pip install` of a project with a package `trainer` overwrote Slipway's files of that name, without a warning."""
    listed = installed.expect("-c", "from slipway import api; print(*dir(api))", cwd=tmp_path).split()
    assert listed == sorted(api.__all__) == dir(api)
    names = {path.name for path in installed.site.iterdir() if path.suffix not in {".pth", ".dist-info"}}
    assert names <= {"slipway", "hydra_plugins"}, "other names would meet those of other projects"
    done = installed.python("-c", "import conf", cwd=installed.home)
    assert "No module named 'conf'" in done.stderr, "a folder conf/ of the user's is hidden by a package anywhere"


def test_a_project_with_packages_of_the_same_names(installed: Installation, project: Path) -> None:
    assert installed.expect("-c", RUN_NAME, cwd=project) == "quickstart\n"
    page = installed.expect("-m", "slipway", "--help", cwd=project)
    assert "`python -m slipway` is the same in any folder, `python -m controller` in the clone alone" in page
    assert "No module named controller" in installed.python("-m", "controller", cwd=installed.home).stderr
    assert installed.expect("-m", "controller", "--help", cwd=ROOT).splitlines()[:2] == page.splitlines()[:2]


@pytest.mark.deep
def test_installed_packages_of_the_same_names(installed: Installation, project: Path, tmp_path: Path) -> None:
    """Found before Slipway's, as those in site-packages may be, where `pip install` of the project puts them."""
    first = f"import sys; sys.path.insert(0, {str(project)!r}); "
    assert installed.expect("-c", first + RUN_NAME, cwd=tmp_path) == "quickstart\n"
    assert "import" in installed.expect("-c", first + COMMAND, "trainer.convert", "--help", cwd=tmp_path)


@pytest.mark.deep
def test_one_process_cannot_use_both(installed: Installation, project: Path) -> None:
    (project / "conf" / "__init__.py").write_text("")
    (project / "conf" / "mine.py").write_text("")
    theirs_first = installed.python("-c", f"import conf; {RUN_NAME}", cwd=project)
    assert f"already imported another one: {project}/conf/__init__.py" in theirs_first.stderr
    ours_first = installed.python("-c", f"{RUN_NAME}; from conf import mine", cwd=project)
    assert f"{project}/conf/__init__.py is hidden by it" in ours_first.stderr
    for said in (theirs_first.stderr, ours_first.stderr):
        assert said.splitlines()[-1].startswith("ImportError: ")
        assert "rename yours, or start the command `slipway`" in said


def test_every_installation_ships_the_same_code(installed: Installation, tmp_path: Path) -> None:
    config: Config = api.compose("+experiment=quickstart")
    assert installed.expect("-c", SHIPPED, cwd=tmp_path).strip() == take_snapshot(config, tmp_path).sha256


@pytest.mark.deep
@pytest.mark.parametrize("flags", [["."], *wide(["--editable", "."])])
def test_pip_makes_the_command(flags: list[str], project: Path, tmp_path: Path) -> None:
    """The quickstart's plan, with the real pip, from a folder with packages of the same names."""
    venv.create(tmp_path / "venv", symlinks=True, with_pip=True)
    made = Installation(tmp_path / "venv", tmp_path)
    (made.site / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    made.expect("-m", "pip", "install", "--no-deps", "--no-build-isolation", *flags, cwd=ROOT)
    said = made.expect(str(made.folder / "bin" / "slipway"), "plan", "+experiment=quickstart", cwd=project)
    assert "v5litepod-16" in said


SHOWN, KINDS = ("conf", "controller", "trainer", ".github", "findings"), ("py", "yaml", "yml", "txt", "in", "sh")
LINES = [
    line
    for file in ("driver.in", "laptop.txt")
    for line in (ROOT / "conf" / file).read_text().splitlines()
    if line and line[0] not in "#-"
]
INSTALLED_BY_PIP = re.compile(r"pip install (?:-\S+ )*'?(slipway[\w-]*)(?:\[(\w+)\])?")
OTHER_PROJECT = re.compile(r"[\"'` ]slipway(\[\w|==|>=)")
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


def test_no_page_or_message_names_an_installable_that_is_not_ours() -> None:
    """`slipway` on PyPI is another project."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {(table["name"], extra) for extra in ("", *table["optional-dependencies"])}
    folders = ("*.md", "docs/**/*.md", "docs/**/*.ipynb", *(f"{top}/**/*.{kind}" for top in SHOWN for kind in KINDS))
    texts = {path: path.read_text() for glob in folders for path in ROOT.glob(glob)}
    named = {(path, match.groups("")) for path, text in texts.items() for match in INSTALLED_BY_PIP.finditer(text)}
    assert {name for _, name in named} <= ours, {str(path) for path, name in named if name not in ours}
    assert len(named) >= 8
    assert [str(path) for path, text in texts.items() if OTHER_PROJECT.search(text)] == []
    assert version(DISTRIBUTION) == table["version"]
    assert table["name"] == DISTRIBUTION


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


@pytest.mark.e2e
def test_from_a_config_to_rows_metrics_and_the_record(slipway: SlipwayCli) -> None:
    lines = [{"step": 1, "phase": "train", "loss": 2.0}, {"step": 1, "phase": "eval", "eval_loss": 1.5}]
    wanted = "; ".join(f"echo '{json.dumps(line)}' >> $SLIPWAY_RUN_DIR/metrics.jsonl" for line in lines)
    (slipway.repository / "run.sh").write_text(f"{wanted}\necho '{{\"acc\": 0.5}}' > $SLIPWAY_RUN_DIR/summary.json\n")
    words = [*slipway.base_overrides, "tpu.accelerator_type=v5litepod-1", "program.command=[sh,run.sh]"]
    assert api.compose(*words).run.seed == 0
    planned = api.plan(*words)
    assert "create" in {resource["action"] for resource in planned["resources"]}
    row = api.up(*words)
    assert (row["run"], row["state"], row["metrics.acc"]) == (planned["run"], "finished", 0.5)
    assert api.runs("state=finished") == [row]
    assert api.record(row["run"])["config"]["run"]["seed"] == 0
    assert api.up(run=row["run"])["run"] == f"{row['run']}-r1"
    rows = api.sweep(*words, "run.seed=0,1")
    assert rows[0]["run"] == row["run"]
    assert {r["state"] for r in rows} == {"finished"}
    with pytest.raises(api.ConfigError, match="no metrics of it"):
        api.metrics("nobody-1")
    with pytest.raises(api.ConfigError, match="did you mean run"):
        api.compose("run.sead=1")


@pytest.mark.e2e
def test_the_workers_of_a_pod_are_fabric_connections(slipway: SlipwayCli) -> None:
    from fabric import Connection, ThreadingGroup

    two = ("tpu.accelerator_type=v4-16", "tpu.zone=us-central2-b")
    with pytest.raises(api.ConfigError, match="no run was started from this folder"):
        api.pod()
    with pytest.raises(api.ConfigError, match="is absent; run `slipway up`"):
        api.pod(*slipway.line(ECHO_COMMAND, *two))
    assert slipway("up", ECHO_COMMAND, *two, "cleanup.on_success=keep")[0] == 0
    with api.pod() as pod:
        assert len(pod) == 2
        connection = pod.connection(worker=1)
        assert isinstance(connection, Connection)
        ran = connection.run("basename $(dirname $HOME); exit 3", hide=True, warn=True)
        assert (ran.stdout, ran.exited) == ("worker-1\n", 3)
        connection.put(io.BytesIO(b"notes"), "notes.txt")
        assert (connection.run("cat notes.txt", hide=True).stdout, connection.user) == ("notes", "slipway")
        everywhere = ThreadingGroup.from_connections(pod.connections()).run("basename $(dirname $HOME)", hide=True)
        assert sorted(result.stdout for result in everywhere.values()) == [f"worker-{n}\n" for n in range(2)]
        with pytest.raises(api.ConfigError, match="the pod has workers 0 to 1"):
            pod.connection(worker=2)
    with pytest.raises(api.SlipwayError, match="closed on this side"):
        connection.run("true")


def test_the_rows_of_a_search_are_those_that_it_drew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    search = "sweep.search={method: random, trials: 2, metric: loss, mode: min, prune: false, seed: 0}"
    words = ["+experiment=quickstart", "optimizer.lr=interval(1e-5,1e-3)", search]
    made_by = define_sweep(words, Path.cwd()).id
    rows = [{"run": name, "created": at, "sweep": made_by} for at, name in ((2.0, "late"), (1.0, "early"))]
    monkeypatch.setattr(
        "controller.sweep.pod_pool.drive_sweep", lambda options: index.append_rows(tmp_path, [*rows, {"run": "other"}])
    )
    assert [row["run"] for row in api.sweep(*words)] == ["early", "late"]


def test_it_tells_bytes_and_rate_once_a_second() -> None:
    clock, told = ManualClock(), list[Event]()
    events = Events(clock)
    events.add_listener(told.append)
    progress = Progress(cast(Any, SimpleNamespace(clock=clock, events=events)), "model/gemma", 4_000_000_000)
    for _ in range(10):
        clock.elapsed += 0.25
        progress.advance(100_000_000)
    assert [event.message for event in told] == ["400 MB of 4 GB, 400 MB/s", "800 MB of 4 GB, 400 MB/s"]
    assert told[0].data == {"bytes": 400_000_000, "total": 4_000_000_000, "bytes_per_second": 400_000_000}
    assert (told[0].kind, told[0].subject) == ("progress", "model/gemma")
    assert [format_size(n) for n in (0, 999, 1e3, 1.5e6, 2.34e9)] == ["0 B", "999 B", "1 kB", "1.5 MB", "2.34 GB"]
