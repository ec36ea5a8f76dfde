"""The user's own modules: which files are shipped, and what they define, without importing them."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.schema.config import Config
from controller.agent.commands.code import unpack
from controller.agent.tree_hash import tree_hash
from controller.core.errors import ConfigError
from controller.inputs.code import take_snapshot
from controller.inputs.modules import DefinitionError, find_signature, module_files, taken_names
from controller.sweep.definition import JobBuilder
from tests.controller.checks.inputs.test_extensions import compose_config


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def config(tmp_path: Path, *overrides: str) -> Config:
    return compose_config("+experiment=quickstart", f"run.state_dir={tmp_path}/state", *overrides)


REWARD = r"loop.rewards={my_rewards\:brief: 1.0}"


def test_modules_are_shipped_beside_the_trainer_and_identify_the_run(tmp_path: Path) -> None:
    write(tmp_path / "slipway", {"my_rewards.py": "def brief(response, answer): return 1", "lab/tools.py": ""})
    write(tmp_path / "slipway", {"lab/__init__.py": "", "__pycache__/old.py": "", ".hidden/x.py": "", "notes.md": ""})
    without = take_snapshot(config(tmp_path), tmp_path)
    assert without.sha256 == take_snapshot(config(tmp_path), tmp_path / "slipway").sha256
    found = take_snapshot(config(tmp_path, REWARD), tmp_path)
    own = [name for name in found.paths if name.startswith("modules/")]
    assert own == ["modules/lab/__init__.py", "modules/lab/tools.py", "modules/my_rewards.py"]
    assert set(found.paths) - {*own} == set(without.paths)
    assert found.sha256 != without.sha256
    (tmp_path / "archive").write_bytes(found.archive)
    unpack(tmp_path / "archive", tmp_path / "tree")
    assert tree_hash(tmp_path / "tree") == found.sha256
    write(tmp_path / "slipway", {"my_rewards.py": "def brief(response, answer): return 2"})
    assert take_snapshot(config(tmp_path, REWARD), tmp_path).sha256 != found.sha256


def test_the_runs_of_a_sweep_share_code_only_with_the_same_modules(tmp_path: Path) -> None:
    write(tmp_path / "slipway", {"my_rewards.py": "def brief(response, answer): return 1"})
    builder = JobBuilder(tmp_path)
    plain, own = (builder.build_plan(found) for found in (config(tmp_path), config(tmp_path, REWARD)))
    assert "modules/my_rewards.py" not in plain.snapshot.paths
    assert "modules/my_rewards.py" in own.snapshot.paths


def test_other_folders_may_hold_them(tmp_path: Path) -> None:
    write(tmp_path, {"src/lab/rewards.py": "", "slipway/mine.py": ""})
    both = config(tmp_path, "code.modules=[slipway, src]", "code.exclude=[mine.py]")
    assert list(module_files(both, tmp_path)) == ["lab/rewards.py"]
    with pytest.raises(ConfigError, match=r"code\.modules: there is no folder .*/nowhere; set the folders"):
        module_files(config(tmp_path, "code.modules=[nowhere]"), tmp_path)
    write(tmp_path, {"src/mine.py": "", "slipway/mine.py": ""})
    with pytest.raises(ConfigError, match=r"code\.modules: .* would be the same module; rename one"):
        module_files(config(tmp_path, "code.modules=[slipway, src]"), tmp_path)


SOURCE = """
import math
from functools import partial as bound
try:
    import fast
except ImportError:
    fast = None
LIMIT: int = 3
first, second = 1, 2
def plain(response, answer): ...
def full(a, /, b, c=1, *rest, d, e=2, **more): ...
@bound
def decorated(response): ...
class Thing: ...
if LIMIT:
    def conditional(x): ...
"""


def test_what_a_module_defines_is_read_from_its_syntax(tmp_path: Path) -> None:
    write(tmp_path, {"mine.py": SOURCE, "star.py": "from os import *", "broken.py": "def f(:\n", "null.py": "\0"})
    write(tmp_path, {"pkg/__init__.py": "from .inner import helper", "pkg/inner.py": "def helper(x): ..."})
    files = {path.relative_to(tmp_path).as_posix(): path for path in sorted(tmp_path.rglob("*.py"))}

    def find(reference: str, *, installed: bool = False) -> str | None:
        found = find_signature(reference, files, installed=installed)
        return None if found is None else str(found)

    assert find("mine:plain") == "(response, answer)"
    assert find("mine:full") == "(a, /, b, c=Ellipsis, *rest, d, e=Ellipsis, **more)"
    assert find("pkg.inner:helper") == "(x)"
    names = ("math", "bound", "fast", "LIMIT", "second", "decorated", "Thing", "conditional")
    assert [find(f"mine:{name}") for name in names] == [None] * len(names)
    assert find("star:anything") is None
    assert find("pkg:helper") is None
    assert find("trainer.rewards.functions:boxed") == "(response, answer)"
    assert find("optax:scale_by_lion") is None
    assert find("statistics:fmean") is not None
    for reference, message in {
        "mine:plian": r"mine\.py defines no plian; it defines plain, full, decorated, Thing",
        "broken:f": r"broken\.py, line 1: ",
        "null:f": r"null\.py",
        "nowhere:f": r"no module nowhere in the folders of code\.modules, which are shipped; there are broken, mine, ",
        "pytest:raises": r"no module pytest in the folders",
        "statistics:fmeen": r"statistics\.py defines no fmeen",
    }.items():
        with pytest.raises(DefinitionError, match=message):
            find(reference)
    assert find("pytest:raises", installed=True) is None
    with pytest.raises(DefinitionError, match="no package nowhere is installed"):
        find("nowhere:f", installed=True)


def test_a_name_that_is_taken_is_said(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("random.py", "optax/__init__.py", "trainer.py", "mine.py")}
    taken = {"random.py": "Python's standard library", "__init__.py": "the package optax", "trainer.py": "Slipway"}
    assert {path.name: owner for path, owner in taken_names(files)} == taken
