"""All objects of a run's record are deleted or cut short while it runs: it ends as usual, and says so.

Each object by itself is in `tests/controller/run/test_damaged_objects.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controller.cli import main

DAMAGE = """
import os, sys, time
from pathlib import Path

run, how, pattern = Path(os.environ["SLIPWAY_RUN_URL"]), sys.argv[1], sys.argv[2]
while not (run / "record.json").is_file():
    time.sleep(0.02)
found = [path for path in run.glob(pattern) if path.is_file()]
assert found, pattern
for path in found:
    path.unlink() if how == "deleted" else path.write_text({"cut": '{"format": 1, "att', "other": "[]"}[how])
print("damaged", *sorted(str(path.relative_to(run)) for path in found), flush=True)
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (repository := tmp_path / "repository").mkdir()
    (repository / "damage.py").write_text(DAMAGE)
    monkeypatch.chdir(repository)
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "state"))
    return ["cloud=here", "cloud.backend=cpu", "program=command"]


@pytest.mark.e2e
@pytest.mark.parametrize("how", ["cut", "deleted"])
def test_a_run_survives_the_loss_of_its_record(
    words: list[str], how: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = main.run(["up", *words, f"program.command=[python,damage.py,{how},**/*]"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, ""), out
    results = [*tmp_path.rglob("runs/*/result.json")]
    assert results
    assert all(json.loads(result.read_text())["outcome"] == "finished" for result in results)
    if how == "deleted":
        assert "record.json is missing; the run goes on without it" in out
        assert all((result.parent / "record.json").is_file() for result in results)
    else:
        assert "launches/0001.json is damaged" in out
        assert "the run goes on without it" in out
        assert main.run(["status"]) == 0
        [warning] = [line for line in capsys.readouterr().out.splitlines() if "warning: " in line]
        assert warning.startswith(f"     warning: {tmp_path}")
        assert "/launches/0001.json is damaged: " in warning
