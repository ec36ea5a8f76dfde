"""Slipway as pip installs it, beside projects that have packages of the same names."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from conf.schema.config import Config
from controller import api
from controller.inputs.code import take_snapshot
from tests.conftest import deep
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
    assert "usage" in installed.expect("-m", "slipway", "--help", cwd=project)


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
@pytest.mark.parametrize("flags", [["."], ["--editable", "."]])
def test_pip_makes_the_command(flags: list[str], project: Path, tmp_path: Path) -> None:
    """The quickstart's plan, with the real pip, from a folder with packages of the same names."""
    venv.create(tmp_path / "venv", symlinks=True, with_pip=True)
    made = Installation(tmp_path / "venv", tmp_path)
    (made.site / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    made.expect("-m", "pip", "install", "--no-deps", "--no-build-isolation", *flags, cwd=ROOT)
    said = made.expect(str(made.folder / "bin" / "slipway"), "plan", "+experiment=quickstart", cwd=project)
    assert "v5litepod-16" in said
