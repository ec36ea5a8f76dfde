"""Finds the packages `conf`, `controller` and `trainer`, which keep their short names but are not on `sys.path`.

So no file of another project can overwrite them, and a project's own `conf` or `trainer` stays visible to every
process that does not use Slipway. A process that does use it has one package per name; a conflict is an ImportError.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

NAMES = ("conf", "controller", "trainer")
_HERE = Path(__file__).resolve().parent
ROOT = _HERE / "packages" if (_HERE / "packages").is_dir() else _HERE.parents[2]
"""Folder of the three packages: `slipway/packages` of a wheel, or the clone of an editable installation."""


class OwnPackages:
    """Finds the three packages below ROOT, whatever `sys.path` holds."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in NAMES:
            return PathFinder.find_spec(fullname, [str(ROOT)], target)
        package = fullname.partition(".")[0]
        if package not in NAMES:
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is None and (theirs := _another_package(package)):
            raise ImportError(
                f"there is no {fullname} in Slipway's package {package!r}; {theirs} is hidden by it since this process "
                f"imported slipway.api. {_ADVICE}",
                name=fullname,
            )
        return found


_ADVICE = "One process cannot use both packages: rename yours, or start the command `slipway` as a program of its own."


def find_own_packages() -> None:
    """Make the three packages importable in this process.

    Raises:
        ImportError: this process has imported another package of one of these names.
    """
    for name in NAMES:
        loaded = sys.modules.get(name)
        if loaded is not None and not _is_ours(loaded):
            raise ImportError(
                f"Slipway needs its own package {name!r}, but this process has already imported another one: "
                f"{_origin(loaded)}. {_ADVICE}",
                name=name,
            )
    if not any(isinstance(finder, OwnPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, OwnPackages())


def _is_ours(module: ModuleType) -> bool:
    return bool(module.__file__) and Path(module.__file__).resolve().is_relative_to(ROOT)


def _origin(module: ModuleType) -> str:
    return module.__file__ or ", ".join(map(str, getattr(module, "__path__", ()))) or "built in the program"


def _another_package(name: str) -> str | None:
    """Return where `sys.path` has a package of that name which is not ours."""
    found = PathFinder.find_spec(name, [entry for entry in sys.path if Path(entry).resolve() != ROOT])
    if found is None:
        return None
    return found.origin or ", ".join(found.submodule_search_locations or ())
