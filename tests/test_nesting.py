"""Lists that are nested until Python's recursion limit end no reader of JSON that others write.

`python -m tests.test_nesting FOLDER`, a process of its own: what the collector finalizes at that depth fails, in
whatever test runs then.
"""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conf.json_lines import LineError, parse_json
from controller.agent import attempts, control
from controller.agent.attempts import SecretMask
from controller.agent.fs import AgentError, read_json
from controller.checks import input_first_row
from controller.core.errors import CloudError
from controller.core.json_documents import DamagedRecordError, load_json
from controller.inputs.definitions import DefinitionError, find_signature
from controller.lease_store import BucketLeaseStore
from controller.report import gather
from controller.resources import dead_mans_switch, deletions
from controller.resources.pod import capacity_log
from controller.ssh.agent_link import AgentLink
from controller.witness import stand_ins
from tests.paths import ROOT
from trainer.environments.verifiers_env import parse_calls

NESTED = "[" * 100_000
LEASE: Any = SimpleNamespace(
    object_metadata=lambda *_: (
        {"generation": "1", "updated": "2026-01-01T00:00:00Z", "metadata": {"lease": NESTED}},
        0.0,
    )
)


def refused(error: type[Exception], words: str, act: Callable[[], object]) -> None:
    """Assert that an act raises this error."""
    with pytest.raises(error, match=words):
        act()


def said_of_metrics(file: Path, line: str) -> list[dict[str, Any]]:
    """Return what the agent says of a metrics.jsonl with this line."""
    file.write_text(f"{line}\n")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        control._emit_metrics(file, 0, SecretMask({}))
    return [json.loads(line) for line in out.getvalue().splitlines()]


def read_all(folder: Path) -> None:
    """Give it to every reader; each says what it says of any other line that is none."""
    refused(DamagedRecordError, "x.json is damaged", lambda: load_json(NESTED, "x.json"))
    refused(CloudError, "is not a lease written by slipway", BucketLeaseStore(LEASE, "b", "pod").read)
    link: Any = SimpleNamespace(_error=lambda kind, *words: CloudError(f"{kind}: {words[0]}"))
    refused(CloudError, "`observe` did not return JSON", lambda: AgentLink._parse(link, "observe", NESTED.encode()))
    assert list(gather.parse_lines([[NESTED.encode(), b'{"a": 1}']])) == [{"a": 1}]
    [line] = said_of_metrics(folder / "metrics.jsonl", NESTED)
    assert "is not a JSON object" in line["warning"]
    assert len(line["warning"]) < 300
    (folder / "summary.json").write_text(NESTED)
    assert "not JSON" in cast(Any, attempts._read_summary(folder))["error"]
    (folder / ".slipway").mkdir()
    (folder / ".slipway/watchdog.json").write_text(NESTED)
    refused(AgentError, "watchdog.json is damaged: no JSON", lambda: read_json(folder / ".slipway/watchdog.json"))
    known = {str(folder / ".slipway/watchdog.json"): (500.0, 60.0)}
    with contextlib.redirect_stderr(io.StringIO()):
        assert dead_mans_switch.read_limits([str(folder)], "boot-1", 0.0, known) == (500.0, 60.0)
    deep = '{"a": ' * 300 + "1" + "}" * 300
    (folder / "summary.json").write_text(deep)
    assert "it is nested too deeply" in cast(Any, attempts._read_summary(folder))["error"]
    [line] = said_of_metrics(folder / "metrics.jsonl", deep)
    assert "is nested too deeply" in line["warning"]
    (folder / "rows.jsonl").write_text(NESTED[:20_000])
    refused(
        input_first_row._UnreadableError,
        "line 1 is JSON that is nested too deeply",
        lambda: input_first_row._first_row(folder / "rows.jsonl", (), parquet=False),
    )
    (folder / "deep.py").write_text(f"x = {'-' * 20_000}1\n")
    files = {"deep.py": folder / "deep.py"}
    refused(DefinitionError, "deep.py", lambda: find_signature("deep:f", files, installed=False))
    assert capacity_log._parse(NESTED) is None
    notes: list[str] = []
    assert deletions._parse(NESTED.encode(), "here", notes) == []
    assert "here is not a pending deletion written by slipway" in notes[0]
    assert stand_ins._parsed(NESTED) is None
    refused(LineError, "is JSON that is nested too deeply", lambda: parse_json(NESTED.encode()))
    call = f"<tool_call>{NESTED}"
    assert parse_calls(call) == (call, [])


def test_nested_lists_are_an_error_like_any_other(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.test_nesting", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


if __name__ == "__main__":
    read_all(Path(sys.argv[1]))
