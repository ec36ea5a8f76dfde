"""Keeps composed configs on disk, because importing and running Hydra takes longer than the rest of `plan`.

A key is a hash of everything that composing reads: the bundled and the user's YAML, the overrides, the environment
variables that the bundled YAML names, and the schema, which says which keys take text. A config that may depend on
anything else, or hold a secret, is not kept.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import conf
from controller.core.this_process import state_home

CONFIG_DIR = Path(conf.__file__).parent
MOST_FILES = 100
_ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)")
_OTHER_SOURCES = re.compile(r"\$\{[^}]*:|hydra")
"""A resolver (time, environment), or a setting of Hydra's own such as a search path."""


def cache_file(overrides: Sequence[str], extra_dir: Path | None) -> Path | None:
    """Return where the composed config of these inputs is kept; None if it may not be kept."""
    files = _yaml_files(CONFIG_DIR)
    bundled = {str(path): path.read_bytes() for path in files}
    theirs = {str(path): path.read_bytes() for path in _yaml_files(extra_dir)} if extra_dir else {}
    texts = [*overrides, *(read.decode("utf-8", "replace") for read in theirs.values())]
    if any(_OTHER_SOURCES.search(text) for text in texts):
        return None
    names = {"SLIPWAY_HOME", *(name for read in bundled.values() for name in _ENVIRONMENT.findall(read.decode()))}
    key = hashlib.sha256()
    rules = [_modified(f"controller.config.{name}") for name in ("compose", "kinds", "texts")]
    rules += [path.stat().st_mtime_ns for path in sorted((CONFIG_DIR / "schema").rglob("*.py"))]
    where = [str(CONFIG_DIR), str(extra_dir), _modified("hydra"), *rules, _plugins()]
    variables = {name: os.environ.get(name) for name in sorted(names)}
    key.update(json.dumps([where, list(overrides), variables]).encode())
    for path, read in (bundled | theirs).items():
        key.update(f"\0{path}\0{len(read)}\0".encode() + read)
    home = state_home()
    return home / "cache" / "composed" / f"{key.hexdigest()[:32]}.json"


def load(file: Path) -> dict[str, Any] | None:
    """Return the kept config; None if there is none, or if it cannot be read."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def store(file: Path, data: dict[str, Any]) -> None:
    """Keep a composed config that JSON represents exactly. A folder that cannot be written only costs time."""
    text = json.dumps(data, default=repr)
    if json.loads(text) != data:
        return
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(text)
        draft.replace(file)
        kept = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in kept[:-MOST_FILES]:
            old.unlink(missing_ok=True)


def _modified(module: str) -> int:
    """Return when a module was installed or edited, without importing it: another version may compose differently."""
    spec = find_spec(module)
    return Path(spec.origin).stat().st_mtime_ns if spec and spec.origin else 0


def _plugins() -> list[tuple[str, int]]:
    """Return the plugins of Hydra with the times of their folders: one may change the search path of the YAML."""
    spec = find_spec("hydra_plugins")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    found = (path for folder in folders if folder.is_dir() for path in folder.iterdir() if path.name != "__pycache__")
    return sorted((str(path), path.stat().st_mtime_ns) for path in found)


def _yaml_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.yaml") if path.is_file())
