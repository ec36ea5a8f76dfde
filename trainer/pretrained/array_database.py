"""Files of the database in which Orbax stores arrays: are they all there, and long enough?"""

from collections import defaultdict
from collections.abc import Iterator
from urllib.parse import unquote

import fsspec
import tensorstore
from etils import epath


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
