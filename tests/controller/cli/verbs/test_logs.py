"""The last lines of a log, and what comes after them."""

from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from controller.cli.verbs.logs import _show_log
from controller.core.errors import ConfigError
from controller.gcp.google_errors import NotFoundError

LOG = "".join(f"line {n}\n" for n in range(6)) + "unfinished"
LATER = " line\nand one more\n"


class Worker:
    """A worker whose log grows between the first look and the second, as a running program's does."""

    def __init__(self, log: str = LOG) -> None:
        self.log, self.asked = log, list[dict[str, Any]]()

    def stream(self, worker: int, verb: object, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.asked.append(request)
        text = self.log[request.get("log_offset", 0) :]
        if request["follow"]:
            text += LATER
        for at in range(0, len(text), 7):
            yield {"log": text[at : at + 7], "offset": request.get("log_offset", 0) + at + len(text[at : at + 7])}
        yield {"end": {}}


def shown(worker: Worker | None, tail: int | None, follow: bool = False, bucket: str | None = None) -> str:
    def download(*_: str) -> bytes:
        if bucket is None:
            raise NotFoundError("log", 404, "notFound", "no such object")
        return bucket.encode()

    ledger = SimpleNamespace(log_object=lambda worker, attempt: "log")
    google = SimpleNamespace(download=download)
    plan = SimpleNamespace(run_id="r-00000000", bucket="b")
    session: Any = SimpleNamespace(plan=plan, ledger=ledger, context=SimpleNamespace(google=google))
    text: list[str] = []
    fleet: Any = worker
    _show_log(session, fleet, 1, Namespace(follow=follow, tail=tail), 0, text.append)
    return "".join(text)


@pytest.mark.parametrize(
    ("tail", "expected"),
    [(None, LOG), (0, ""), (1, "unfinished"), (3, "line 4\nline 5\nunfinished"), (7, LOG), (100, LOG)],
)
def test_the_last_lines_and_all_that_follows_none_twice(tail: int | None, expected: str) -> None:
    assert shown(Worker(), tail) == shown(None, tail, bucket=LOG) == expected
    assert shown(Worker(), tail, follow=True) == expected + LATER
    assert shown(None, tail, follow=True, bucket=LOG) == expected


def test_a_log_that_has_no_line_yet_is_followed() -> None:
    assert shown(Worker(""), 5, follow=True) == LATER


def test_without_a_log_it_says_so() -> None:
    with pytest.raises(ConfigError, match="no log for worker 0, attempt 1, on the pod or in the bucket"):
        shown(Worker(""), 5)
