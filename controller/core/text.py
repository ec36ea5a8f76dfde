"""Format text for people."""

import difflib
from collections.abc import Sequence, Set

from controller.core.layout import shorten

MAX_ID_WIDTH = 26
"""Width of an id on a narrow terminal, if the names of the runs differ."""


def is_folder(bucket: str) -> bool:
    """Return whether a bucket is a folder of this machine, as for `cloud=here`."""
    return bucket.startswith("/")


def object_url(bucket: str, name: str = "") -> str:
    """Return where an object is: `gs://BUCKET/NAME`, or its path if the bucket is a folder."""
    base = bucket if is_folder(bucket) else f"gs://{bucket}"
    return f"{base}/{name}" if name else base


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: `1 worker`, `4 workers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def nearest_names(wanted: str, names: Set[str]) -> str:
    """Return up to four of the names, those that resemble the wanted one if any do; empty if there are none."""
    return ", ".join(difflib.get_close_matches(wanted, sorted(names), n=4, cutoff=0.3) or sorted(names)[:4])


def short_ids(ids: Sequence[str]) -> list[str]:
    """Return what differs between the ids: their hashes alone if all have the same name, else also the name's start."""
    names = {run.rpartition("-")[0] for run in ids}
    return [run.rpartition("-")[2] if len(names) == 1 else shorten(run, MAX_ID_WIDTH) for run in ids]


def short_overrides(titles: Sequence[str]) -> list[str]:
    """Shorten `optimizer.lr=1e-4` to `lr=1e-4`, unless two keys would be called the same."""
    keys = {word.partition("=")[0].lstrip("'") for title in titles for word in title.split(" ") if "=" in word}
    ends = [key.rpartition(".")[2] for key in keys]
    unique = {key: end for key, end in zip(keys, ends, strict=True) if ends.count(end) == 1}

    def short(word: str) -> str:
        quoted, equals, value = word.partition("=")
        key = quoted.lstrip("'")
        return f"{quoted.removesuffix(key)}{unique.get(key, key)}={value}" if equals else word

    return [" ".join(map(short, title.split(" "))) for title in titles]
