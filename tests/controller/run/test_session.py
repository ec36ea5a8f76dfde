"""A session says what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controller.core.errors import SlipwayError
from controller.run.options import RunOptions
from controller.run.session import open_session


def test_reading_a_record_shows_a_spinner_that_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    shown: list[str] = []

    @contextmanager
    def waiting() -> Iterator[Callable[[str], object]]:
        yield shown.append
        shown.append("not reached: the error passes through")

    options = RunOptions(run_id="quickstart-00000000", overrides=("cloud=here",), waiting=waiting)
    with pytest.raises(SlipwayError, match="quickstart-00000000"), open_session(options):
        pass
    assert shown == ["reading the record of quickstart-00000000"]
