"""TensorBoard's files as they come from a bucket to which workers write."""

from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.summary import Writer

from controller.cli import main
from controller.cli.verbs import reports
from controller.records import index
from controller.report.gather import TensorBoardMirror, folder_name
from tests.controller.report.recorded import write_sweep


class Bucket(dict[str, bytes]):
    """Objects by name; the generation of each changes with its content."""

    def list_all(self, api: str, method: str, items: str, **where: Any) -> list[dict[str, Any]]:
        found = {name: crc32(content) for name, content in self.items() if name.startswith(where["prefix"])}
        return [{"name": name, "generation": str(generation)} for name, generation in found.items()]

    def download(self, bucket: str, name: str) -> bytes:
        return self[name]


def test_each_run_is_one_of_tensorboards(tmp_path: Path) -> None:
    bucket: Any = Bucket()
    for run, value in (("q-1", 1.0), ("q-2", 2.0)):
        writer = Writer(str(tmp_path / "there" / run))
        writer.add_scalar("loss", value, 3)
        writer.close()
        [file] = (tmp_path / "there" / run).iterdir()
        bucket[f"runs/{run}/tb/{file.name}"] = file.read_bytes()
    mirror = TensorBoardMirror(bucket, "b", {run: tmp_path / "here" / f"lr=1_{run}" for run in ("q-1", "q-2")})
    assert mirror.update({"q-1", "q-2"}) == 2
    assert mirror.update({"q-1", "q-2"}) == 0
    found = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "here"))
    found.Reload()
    assert sorted(found.Runs()) == ["lr=1_q-1", "lr=1_q-2"]


def test_a_file_that_grows_is_gone_on_with_in_place(tmp_path: Path) -> None:
    bucket: Any = Bucket()
    mirror, file = TensorBoardMirror(bucket, "b", {"q-1": tmp_path / "q"}), tmp_path / "q" / "events.1"
    bucket["runs/q-1/tb/events.1"] = b"one"
    mirror.update({"q-1"})
    with file.open("rb") as reader:
        assert reader.read() == b"one"
        bucket["runs/q-1/tb/events.1"] = b"one two"
        assert mirror.update({"q-1"}) == 1
        assert reader.read() == b" two"
    bucket["runs/q-1/tb/events.1"] = b"other"
    mirror.update({"q-1"})
    assert file.read_bytes() == b"other"


def test_workers_name_no_other_file(tmp_path: Path) -> None:
    bucket: Any = Bucket()
    for name in ("../../planted", "a/../../planted", "/planted", "", ".ssh", "a//b", "a\nb", "a" * 300):
        bucket[f"runs/q-1/tb/{name}"] = b"x"
    assert TensorBoardMirror(bucket, "b", {"q-1": tmp_path / "a" / "b"}).update({"q-1"}) == 0
    assert list(tmp_path.iterdir()) == []
    assert folder_name("lr=0.1 kl=0 seed 3", "quickstart-0123abcd") == "lr=0.1_kl=0_seed_3_0123abcd"
    assert folder_name("../../é\x00/$(x)", "quickstart-0123abcd") == "x_0123abcd"
    assert folder_name("..", "quickstart-0123abcd") == "quickstart-0123abcd"


def test_which_bucket(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = write_sweep(home, seeds=(0,), steps=30)
    rows: list[Any] = [{"run": run, "cloud": "gcp", "project": "a-project", "bucket": "b"} for run in ids]
    index.append_rows(home, rows)
    command = main.parse(["tensorboard", "--sweep", "quickstart"])
    assert reports.compose_config(rows, command).cloud.project == "a-project"
    shown = reports.display_names(index.load_rows(home), home)
    assert shown[ids[3]] == f"lr=0.0007_kl_coef=0.001_seed_0_{ids[3][-8:]}"
    index.append_rows(home, [{"run": ids[0], "bucket": "another"}])
    assert main.run(["tensorboard", "--sweep", "quickstart"]) == 2
    assert "these runs are in several buckets" in capsys.readouterr().err
