"""Every table and lock says of which day it is; what it says is read."""

from datetime import date
from pathlib import Path

import pytest

from conf.as_of import UndatedError, all_facts, dated_files, facts_of

TABLES = {"permissions.yaml", "prices.yaml", "regions.yaml", "tpu_types.yaml"}
LOCKS = {"requirements.txt", "driver.txt", "evals.txt", "wandb.txt"}


def test_every_table_and_lock_is_dated() -> None:
    assert {file.name for file in dated_files()} == TABLES | LOCKS
    found = list(all_facts())
    assert {facts.file for facts in found} == TABLES | LOCKS
    assert all(facts.since >= date(2024, 1, 1) for facts in found)
    locks = [file for file in dated_files() if file.suffix == ".txt"]
    assert all("--hash=sha256:" in file.read_text() for file in locks)


def test_a_table_without_a_date_is_refused_by_name(tmp_path: Path) -> None:
    table = tmp_path / "chips.yaml"
    table.write_text("# As of yesterday\na: 1  # as of 2026-01-01: not at the beginning of its line\n")
    with pytest.raises(UndatedError, match=r"chips.yaml does not say of which day it is: add a line `# as of 20"):
        list(all_facts(tmp_path))


def test_a_date_may_lack_day_or_month_and_a_file_may_have_several(tmp_path: Path) -> None:
    table = tmp_path / "chips.yaml"
    table.write_text("# Chips.\n# as of 2026: zones (page)\n# as of 2026-07: price\na: 1\n# as of 2026-07-14: b\n")
    found = facts_of(table)
    assert [(facts.what, facts.since) for facts in found] == [
        ("zones (page)", date(2026, 1, 1)), ("price", date(2026, 7, 1)), ("b", date(2026, 7, 14))]  # fmt: skip
