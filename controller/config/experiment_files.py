"""Check a user's files of `slipway/experiment/` before Hydra reads them: its own messages do not name the file."""

import re
from collections.abc import Iterable
from pathlib import Path

from controller.core.errors import ConfigError

HEADER = "# @package _global_"
PACKAGE = re.compile(r"#\s*@package\s+_global_\s*$")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def check_experiment_files(folder: Path, overrides: Iterable[str]) -> None:
    """Check the files that `experiment=NAME` selects in the user's folder.

    Raises:
        ConfigError: a file is empty, begins with a byte-order mark, or lacks the header that makes its keys those of
            the whole config.
    """
    for override in overrides:
        key, _, name = override.lstrip("+").partition("=")
        file = folder / "experiment" / f"{name}.yaml"
        if key == "experiment" and re.fullmatch(r"[\w.-]+", name) and file.is_file():
            _check(file, f"{folder.name}/experiment/{name}.yaml")


def _check(file: Path, shown: str) -> None:
    content = file.read_bytes()
    if content.startswith(BYTE_ORDER_MARK):
        raise ConfigError(f"{shown}: begins with a byte-order mark; save it as UTF-8 without one")
    lines = [line.strip() for line in content.decode(errors="replace").splitlines()]
    if all(not line or line.startswith("#") for line in lines):
        raise ConfigError(f"{shown}: is empty; begin with {HEADER!r} and set what differs, such as loop.steps")
    if not PACKAGE.match(next(line for line in lines if line)):  # Hydra ignores it below another comment
        raise ConfigError(
            f"{shown}: must begin with the line {HEADER!r}; without it, its keys are those of a section `experiment`"
        )
