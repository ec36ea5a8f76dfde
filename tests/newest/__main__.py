"""`python -m tests.newest [--blame] [-- PYTEST ARGUMENT…]`: do the tests pass with the newest of everything?

It makes a fresh venv in a temporary folder, installs this checkout with the newest packages that `pyproject.toml` lets
in, pre-releases too, and runs the default tests and the quick start, or only the tests that the arguments choose. A
table says of each direct dependency what is locked, what was tried, and how it went; the exit code is 1 if it failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from uv import find_uv_bin

from tests.paths import ROOT

Runner = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]
"""Runs a command in the checkout; what it says is shown, and returned in `stdout`."""
LOCKS = ("requirements.txt", "driver.txt")
"""Of pods and of bastions; both have the packages that both install."""
IMPORT = """
import importlib, importlib.metadata as metadata, json, sys, warnings
warnings.simplefilter("ignore")
modules = {}
for module, owners in metadata.packages_distributions().items():
    for owner in owners:
        modules.setdefault(owner.lower().replace("_", "-").replace(".", "-"), []).append(module)
found = {}
for name in sys.argv[1:]:
    found[name] = [metadata.version(name), ""]
    for module in sorted(modules.get(name, [])):
        try:
            if module.isidentifier() and not module.startswith("_"):
                importlib.import_module(module)
        except BaseException as error:
            found[name][1] = f"{module}: {type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps(found))
"""
"""Prints the version of each package, and why a module of it cannot be imported; run in the venv."""


@dataclass(frozen=True)
class Row:
    package: str
    locked: str
    newest: str
    verdict: str


@dataclass
class Trial:
    """A venv with the newest packages, and what is run in it."""

    folder: Path
    run: Runner
    arguments: Sequence[str]
    """Of pytest; none: all default tests, and the quick start."""
    failed: list[str] = field(default_factory=list)
    """What went wrong, in words."""

    @property
    def python(self) -> str:
        return str(self.folder / "venv" / "bin" / "python")

    def install(self, *wanted: str, upgrade: bool = True) -> bool:
        newest = ["--upgrade"] if upgrade else []
        command = [
            find_uv_bin(),
            "pip",
            "install",
            "--quiet",
            "--python",
            self.python,
            "--prerelease",
            "allow",
            *newest,
        ]
        return self.run([*command, "--editable", ".[dev]", *wanted]).returncode == 0

    def test(self, *further: str) -> bool:
        """Run the tests; pytest keeps which failed in the trial's folder."""
        usual: str = project()["tool"]["pytest"]["ini_options"]["addopts"]
        options = f"addopts={usual.replace('-p no:cacheprovider', '')}"
        keep = ["-o", options, "-o", f"cache_dir={self.folder / 'pytest'}"]
        return self.run([self.python, "-m", "pytest", *keep, *further, *self.arguments]).returncode == 0

    def quick_start(self) -> bool:
        own = ["env", f"SLIPWAY_HOME={self.folder / 'home'}"]
        return self.run([*own, self.python, "-m", "controller", "+experiment=quickstart"]).returncode == 0

    def look(self, packages: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Return by package the version that was installed, and why it cannot be imported."""
        said = self.run([self.python, "-c", IMPORT, *packages])
        return {name: tuple(found) for name, found in json.loads(said.stdout.splitlines()[-1]).items()}


def main(words: Sequence[str], run: Runner | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.newest", description="The tests with the newest of everything."
    )
    parser.add_argument("--blame", action="store_true", help="run what failed again with one package held at a time")
    parser.add_argument("arguments", nargs="*", metavar="PYTEST ARGUMENT", help="after --; without the quick start")
    given = parser.parse_args(words)
    wanted = dependencies()
    with tempfile.TemporaryDirectory(prefix="slipway-newest-", ignore_cleanup_errors=True) as folder:
        trial = Trial(Path(folder), run or run_here, given.arguments)
        made = trial.run([find_uv_bin(), "venv", "--quiet", "--python", sys.executable, str(trial.folder / "venv")])
        if made.returncode or not trial.install():
            print("the newest packages cannot be installed together; the reason is above")
            return 1
        found = trial.look([*wanted])
        if not trial.test():
            trial.failed.append("tests")
        if not given.arguments and not trial.quick_start():
            trial.failed.append("quick start")
        known = {name: locked_version(name) for name in wanted}
        newer = [name for name in wanted if known[name] != found[name][0]]
        blamed = blame(trial, {name: known[name] for name in newer}) if given.blame and "tests" in trial.failed else {}
    rows = [
        Row(
            name,
            known[name],
            f"{found[name][0]}{bound}",
            blamed.get(name) or _verdict(trial, name in newer, found[name][1]),
        )
        for name, bound in wanted.items()
    ]
    print("\n".join(table(rows)))
    broken = [name for name in wanted if found[name][1]]
    print(_summary(trial, given.arguments, broken, given.blame and not any(map(_is_guilty, blamed.values()))))
    return 1 if trial.failed or broken else 0


def run_here(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout, and show what it says while it says it."""
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    said = list[str]()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(argv, cwd=ROOT, env=environment, **pipes) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            print(line, end="", flush=True)
    return subprocess.CompletedProcess(argv, process.returncode, "".join(said))


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def dependencies() -> dict[str, str]:
    """Return the direct dependencies of this system, those of the tests too, with the bound that holds them back."""
    here = project()["project"]
    found: dict[str, str] = {}
    for one in map(Requirement, [*here["dependencies"], *here["optional-dependencies"]["dev"]]):
        if one.marker is None or one.marker.evaluate():
            above = [str(each) for each in one.specifier if each.operator in ("<", "<=", "==", "~=")]
            found[normal(one.name)] = f" ({','.join(above)})" if above else ""
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_version(package: str) -> str:
    """Return the version of a lock; of this environment where no lock has the package, and - where it lacks it too."""
    for lock in LOCKS:
        for line in (ROOT / "conf" / lock).read_text().splitlines():
            name, equals, rest = line.partition("==")
            if equals and normal(name) == package:
                return rest.split()[0]
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


BLAMED, CANNOT_HOLD = "fails the tests: they pass with the locked one", "newer, cannot be held"


def _is_guilty(verdict: str) -> bool:
    return verdict == BLAMED


def blame(trial: Trial, held: Mapping[str, str]) -> dict[str, str]:
    """Run the tests that failed once for each package, with it alone held at its locked version.

    Returns:
        A verdict of each package that is guilty, or that cannot be held.
    """
    kept = trial.folder / "pytest" / "v" / "cache" / "lastfailed"
    failed = kept.read_text() if kept.is_file() else "{}"
    verdicts: dict[str, str] = {}
    for name, locked in held.items():
        if locked == "-":
            continue
        print(f"\nheld: {name}=={locked}", flush=True)
        if not trial.install(f"{name}=={locked}", upgrade=False):
            verdicts[name] = CANNOT_HOLD
        elif trial.test("--last-failed"):
            verdicts[name] = BLAMED
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(failed)
        if not trial.install():
            raise SystemExit("the newest packages cannot be installed again; the reason is above")
    return verdicts


def _verdict(trial: Trial, is_newer: bool, unimportable: str) -> str:
    if unimportable:
        return f"cannot be imported: {unimportable}"
    if not is_newer:
        return "same"
    return f"newer, {' and '.join(trial.failed)} failed" if trial.failed else "newer, passed"


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table."""
    cells = [("package", "locked", "newest", "verdict"), *((r.package, r.locked, r.newest, r.verdict) for r in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _summary(trial: Trial, arguments: Sequence[str], broken: Sequence[str], no_one: bool) -> str:
    tried = (
        f"pytest {' '.join(arguments)}, without the quick start"
        if arguments
        else "the default tests and the quick start"
    )
    if not trial.failed and not broken:
        return f"passed: {tried}"
    wrong = [f"{' and '.join(trial.failed)} failed"] if trial.failed else []
    wrong += [f"cannot be imported: {', '.join(broken)}"] if broken else []
    wrong += ["no package alone is the cause"] if no_one and "tests" in trial.failed else []
    return f"failed: {tried}: {'; '.join(wrong)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
