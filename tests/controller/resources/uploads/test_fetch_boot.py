"""The startup script of a VM that fetches: it waits for its metadata, and runs the agent that it finds there."""

from __future__ import annotations

import base64
import io
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from controller.resources.uploads import fetch_boot

AGENT = b"""
import sys
from pathlib import Path
tries = Path(sys.argv[0]).with_name("tries")
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
print(sys.argv[1], sys.stdin.read(), flush=True)
sys.exit(len(tries.read_text()) < 3)
"""


class Metadata:
    """A metadata server that does not answer at first."""

    def __init__(self, content: bytes, failures: int) -> None:
        self.content, self.failures = content, failures

    def open(self, request: Any, timeout: float) -> Any:
        assert request.headers == {"Metadata-flavor": "Google"}
        self.failures -= 1
        if self.failures >= 0:
            raise OSError("not yet")
        return io.BytesIO(self.content)


@pytest.mark.parametrize(("failures", "starts"), [(0, True), (3, True), (4, False)])
def test_the_agent_gets_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failures: int, starts: bool
) -> None:
    orders = {"agent": base64.b64encode(zlib.compress(AGENT)).decode(), "request": {"bucket": "b"}}
    server = Metadata(json.dumps(orders).encode(), failures)
    monkeypatch.setattr(fetch_boot, "build_opener", lambda handler: server)
    monkeypatch.setattr(fetch_boot.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    if not starts:
        with pytest.raises(OSError, match="not yet"):
            fetch_boot.main()
        return
    fetch_boot.main()
    assert capfd.readouterr().out.splitlines()[-3:] == ['fetch_ordered {"bucket": "b"}'] * 3, "a crash is no end"
