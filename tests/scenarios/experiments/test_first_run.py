"""docs/first-run.md, command by command in its order, on the emulated cloud: from nothing to metrics and back."""

import re
from typing import Any

import pytest

from controller.localcloud.store import Store
from controller.plan.needed_permissions import CHANGE
from tests.docs.commands import session_of
from tests.docs.reader import Reader, reader

pytestmark = [pytest.mark.e2e, pytest.mark.deep]
__all__ = ["reader"]
PAGE = "docs/first-run.md"


def requests(reader: Reader) -> list[dict[str, Any]]:
    """The laptop's requests so far that were judged, whether the emulated cloud runs or not."""
    file = reader.home / "localcloud" / "state.db"
    if not file.exists():
        return []
    store = Store(file)
    found = [entry for entry in store.log_entries() if entry["client"] == "laptop" and entry.get("permissions")]
    store.close()
    return found


def permissions_printed(words: str, reader: Reader) -> set[str]:
    """What `plan --permissions` prints for an `up`, but for what changes a thing that exists."""
    rows = [line.split("\t") for line in reader.types(f"slipway plan --permissions {words}").splitlines()]
    return {row[0] for row in rows if len(row) > 3 and row[3] != CHANGE}


def test_the_first_run_is_what_the_page_says(reader: Reader) -> None:
    used: set[str] = set()
    printed: set[str] = set()
    for step in session_of(PAGE):
        words = step.words.removeprefix("slipway ")
        before = len(requests(reader))
        reader.does(step)
        if words.startswith("+experiment"):  # now that the APIs are on, its checks ask for everything
            reader.types(f"slipway plan {words}")
        if words.startswith(("+experiment", "down")):
            used |= {name for entry in requests(reader)[before:] for name in entry["permissions"]}
        if words.startswith("+experiment"):
            printed = permissions_printed(words, reader)
    said = {words.removeprefix("slipway "): out for words, out in reader.said.items()}
    run = next(words for words in said if words.startswith("+experiment=quickstart"))
    assert (reader.folder / "slipway" / "cloud" / "mine.yaml").exists()
    plan = next(out for words, out in said.items() if words.startswith("plan +experiment=quickstart cloud=mine"))
    assert "+ create" in plan
    assert "error:" not in plan
    assert re.search(r"\n  accuracy +[\d.]+ → [\d.]+ \(95 %: ", said[run])
    assert "finished" in said["status"]
    assert "accuracy after GRPO" in said["logs"]
    assert "deleted" in said["down"]
    assert "bucket" in said["down --all"]
    assert used == printed
