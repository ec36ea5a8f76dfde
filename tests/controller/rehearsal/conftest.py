"""Prints the table of rehearsals at the end of a session that was given this folder, or the test in it."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    called = [report for state in ("passed", "failed") for report in terminalreporter.getreports(state)]
    rows = {
        f"{row}  {r.outcome}"
        for r in called
        if r.when == "call"
        for key, row in r.user_properties
        if key == "rehearsal"
    }
    if rows:
        terminalreporter.section("rehearsals")
        terminalreporter.write_line("\n".join(sorted(rows)))
