"""The start of `up`: a bucket that answers nothing but 503 for a while."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.gcp.errors import GoogleError
from controller.records.ledger import Ledger, Result
from controller.run.drive import drive
from tests.controller.run.test_damaged_objects import opened


def test_a_storm_at_the_start_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, monkeypatch) as (options, plan, context):
        done = Result(plan.run_id, "finished", 1, 2.0, 1.0)
        storm = GoogleError("storage objects.get_media", 503, "UNAVAILABLE", "backend error")
        answers: list[Any] = [storm, storm, storm]

        def result(_: Ledger) -> Result | None:
            if answers:
                raise answers.pop()
            return done

        monkeypatch.setattr(Ledger, "result", result)
        monkeypatch.setattr(context.clock, "sleep", lambda _: None)
        said: list[str] = []

        class Screen(SimpleNamespace):
            def __call__(self, event: Any) -> None:
                said.append(event.message)

        assert drive(options, plan, context, None, cast(Any, Screen(show_result=lambda *_, **__: None))) == done
        assert not answers
        assert [text for text in said if "answers 503 UNAVAILABLE; waiting, for at most 10 minutes" in text]
