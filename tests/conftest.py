"""Options of the test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--chaos", default="60", metavar="[START:]END", help="seeds of the chaos schedules: 60, or 60:560 for others"
    )
    parser.addoption(
        "--chaos-training", default="5", metavar="[START:]END", help="the same for those with real training"
    )
