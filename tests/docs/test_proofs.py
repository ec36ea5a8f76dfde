"""The tests that documents name as proof of what they say exist, are collected, and run wherever CI does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.docs import proofs
from tests.paths import ROOT

ROWS = proofs.rows()
MAYBE_SKIPPED = (  # by a mark; by a fixture
    "tests/trainer/fit/test_report.py::test_what_helps_is_found_on_a_chip_that_is_too_small",
    "tests/controller/gcloud/test_guides.py::test_every_block_works_as_printed_or_corrected",
)


def test_every_test_that_a_document_names_exists() -> None:
    assert len([row for row in ROWS if row.startswith("docs/reliability.md")]) > 20
    assert len([row for row in ROWS if row.startswith("docs/guides.yaml")]) > 200
    assert [(row, name) for row, named in ROWS.items() for name in named if not proofs.exists(name)] == []
    assert not proofs.exists("tests/docs/test_proofs.py::test_that_is_not_there")


@pytest.mark.deep
def test_a_test_of_every_row_runs_wherever_ci_does() -> None:
    """One that is skipped for want of a package, of data or of a device proves nothing by itself."""
    files = sorted({name.partition("::")[0] for named in ROWS.values() for name in named})
    collect = ["--collect-only", "--deep", "-n", "0", "-p", "tests.docs.proofs", *files]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *collect], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    collected = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["tests/')]
    always = {test for test, skips in collected if not skips}
    always |= {test.partition("::")[0] for test in always}
    reasons = {test: skips for test, skips in collected if skips}
    assert {reason for test in MAYBE_SKIPPED for reason in reasons[test]} >= {"needs libtpu"}
    rows = {row: named for row, named in ROWS.items() if " " in row}  # of tables; prose may say where a test runs
    unproven = {row: named for row, named in rows.items() if not always.intersection(named)}
    assert {row: {name: reasons.get(name) for name in named} for row, named in unproven.items()} == {}


def test_every_defence_of_the_security_page_names_one() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    defended = page.partition("## What is defended")[2].partition("## What is not defended")[0]
    claims = [claim for claim in defended.split("\n\n") if claim.startswith("**")]
    assert len(claims) >= 10
    assert [claim[:40] for claim in claims if "::test_" not in claim] == []
