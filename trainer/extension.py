"""The user's modules on a worker: they are put on the module search path, and what the config names is imported."""

import os
import sys
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import conf
from conf import extension
from conf.formats import IMPORTS_VARIABLE, RunFileError


def add_modules(folder: Path | None = None) -> None:
    """Put the shipped modules on the search path, behind everything else, so that they shadow nothing.

    Worker processes get it too, because they are started with this process's search path.
    """
    folder = folder or Path(conf.__file__).parents[1] / extension.MODULES_FOLDER
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))


def load_extension(kind: str, reference: str, key: str, options: Mapping[str, Any] | None = None) -> Any:
    """Return what a config names, with its options as keyword arguments. Raises RunFileError; see `extension.load`."""
    allowed = os.environ.get(IMPORTS_VARIABLE)
    if allowed is not None and reference not in allowed.split(","):
        raise RunFileError(
            f"{key}: {reference} is not imported: the run's record, which this machine must have made or been told to "
            "trust, does not name it; `slipway plan --run ID` shows the record and asks"
        )
    try:
        found = extension.load(kind, reference, key, options)
    except extension.ExtensionError as error:
        raise RunFileError(str(error)) from error
    return partial(found, **options) if options else found


@cache
def model_family(reference: str) -> Any:
    """Return the object of `model.implementation`, whose methods replace the decoder's. Raises RunFileError."""
    found = load_extension("model family", reference, "model.implementation")
    family = found() if isinstance(found, type) else found
    for name in ("weights", "forward"):
        if not callable(getattr(family, name, None)):
            raise RunFileError(f"model.implementation: model family {reference} has no method {name}")
    return family
