"""Whether stored arrays are those that were saved: the files of their database, and the checksums beside them."""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

import fsspec
import jax
import tensorstore
from etils import epath

from conf.formats import FORMAT, RunFileError, format_problem
from conf.strict_json import dumps

OUTAGE_PATTERN = re.compile(r"UNAVAILABLE|UNAUTHENTICATED|PERMISSION_DENIED|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED")
"""Status codes in TensorStore's error messages that say nothing about the objects."""


def check_database(folder: epath.Path) -> None:
    """Raise ValueError if a file of the database in `folder` is missing or too short, or its index is damaged.

    Orbax stores arrays in OCDBT (https://google.github.io/tensorstore/kvstore/ocdbt): a B+tree whose leaves give the
    file, offset and length of each chunk of an array. The arrays are not read.
    """
    wanted: dict[str, int] = defaultdict(int)
    for location in _value_locations(folder):
        _, base, name, offset, length = location.split(":")
        file = unquote(base) + unquote(name)
        wanted[file] = max(wanted[file], int(offset) + int(length))
    files, root = fsspec.url_to_fs(str(folder))
    sizes = {name.removeprefix(f"{root}/"): item["size"] for name, item in files.find(root, detail=True).items()}
    for file, size in sorted(wanted.items()):
        if file not in sizes:
            raise ValueError(f"{folder.name}/{file} is missing")
        if sizes[file] < size:
            raise ValueError(f"{folder.name}/{file} has {sizes[file]} bytes, expected at least {size}")


def _value_locations(folder: epath.Path) -> Iterator[str]:
    """Yield <kind>:<folder>:<file>:<offset>:<length> for every node of the tree and every value outside it."""
    base = tensorstore.KvStore.open(f"{folder if '://' in str(folder) else f'file://{folder}'}/").result()
    todo = [tensorstore.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]]
    while todo:
        location = todo.pop()
        yield location
        for entry in tensorstore.ocdbt.dump(base, location).result()["entries"]:
            if "indirect_value" in entry:
                yield entry["indirect_value"]
            elif "location" in entry:
                todo.append(entry["location"])


def write_checksums(file: epath.Path, checksums: Mapping[str, int]) -> None:
    """Write the checksums of arrays, by their dotted paths. Do so before the arrays: whole arrays then have them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dumps({"format": FORMAT, "checksums": checksums}, indent=1) + "\n")


def read_checksums(file: epath.Path) -> dict[str, int] | None:
    """Return what `write_checksums` wrote; None, with a warning, where an earlier version saved arrays without.

    Raises:
        RunFileError: the file is damaged, or of another format.
    """
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        if jax.process_index() == 0:
            logging.warning("%s is missing: whether the arrays beside it were altered is not known", file)
        return None
    except (ValueError, RecursionError):
        raise RunFileError(f"{file}: is damaged: it is no JSON") from None
    if problem := format_problem(content, str(file)):
        raise RunFileError(problem)
    saved = content.get("checksums")
    if not isinstance(saved, dict) or not all(isinstance(value, int) for value in saved.values()):
        raise RunFileError(f"{file}: is damaged: it has no checksums")
    return saved


def altered(found: Mapping[str, int], saved: Mapping[str, int] | None) -> str | None:
    """Return the first array that has another checksum than when it was saved, or that was not saved."""
    return None if saved is None else next((name for name, value in found.items() if saved.get(name) != value), None)
