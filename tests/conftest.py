"""Options of the test suite."""

from __future__ import annotations

import pytest
from hypothesis import settings


def pytest_configure() -> None:
    settings.load_profile("ci")  # hypothesis' own: no deadlines, which a busy machine misses, and the same examples


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--chaos", default="60", metavar="[START:]END", help="seeds of the chaos schedules: 60, or 60:560 for others"
    )
    parser.addoption(
        "--chaos-training", default="5", metavar="[START:]END", help="the same for those with real training"
    )
