"""Checkpoints: what is saved comes back, on other meshes too; what is half written does not count."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product

import jax
import numpy as np
import pytest
import tensorstore
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from conf.formats import RunFileError
from conf.schema.training.settings import CheckpointSettings
from tests.conftest import wide
from tests.controller.localcloud.conftest import cloud as cloud
from tests.trainer.buckets import BUCKET
from tests.trainer.buckets import bucket as bucket
from tests.trainer.conftest import make_mesh
from trainer.checkpoint import manager as checkpoint_manager
from trainer.checkpoint.manager import BrokenCheckpointError, CheckpointManager
from trainer.checkpoint.storage import RunStorage, create_file, without_lines


def arrays(step: int, *sizes: int) -> dict[str, jax.Array]:
    """A sharded, a replicated and a scalar array, on eight devices in a row or on a mesh of other sizes."""
    mesh = make_mesh(*(sizes or (8, 1, 1)))
    whole = np.arange(64, dtype=np.float32).reshape(16, 4) + step
    places = {"rows": PartitionSpec("data", "tensor"), "everywhere": PartitionSpec()}
    state = {name: jax.device_put(whole, NamedSharding(mesh, spec)) for name, spec in places.items()}
    return state | {"step": jax.device_put(np.int32(step), NamedSharding(mesh, PartitionSpec()))}


def abstract(*sizes: int) -> dict[str, jax.ShapeDtypeStruct]:
    found = arrays(0, *sizes)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), found)


@pytest.fixture(scope="module")
def state() -> dict[str, jax.Array]:
    return arrays(1)


def kept(keep: int, **others) -> CheckpointSettings:
    given = {"save_interval": 2, "max_to_keep": keep, "best": None, "verify_interval": 0, "max_outage_hours": 24}
    return CheckpointSettings(**given | {"verify_data": True} | others)


def written(folder, keep: int, state, *steps: int, **others) -> None:
    """Checkpoints of these steps, in this order."""
    with CheckpointManager(str(folder), kept(keep, **others)) as checkpoints:
        for step in steps:
            checkpoints.save(step, state, {"step": step})


def names(folder) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def assert_equal(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_restored_on_any_mesh(tmp_path, state):
    with CheckpointManager(str(tmp_path), kept(1)) as checkpoints:
        assert checkpoints.latest_step() is None
    written(tmp_path, 1, state, 3)
    with CheckpointManager(str(tmp_path), kept(1)) as checkpoints:
        for sizes in ((8, 1, 1), (2, 2, 2), (1, 1, 1)):
            restored, position = checkpoints.restore(checkpoints.latest_step(), wanted := abstract(*sizes))
            assert position == {"step": 3}
            assert_equal(restored, state)
            assert restored["rows"].sharding == wanted["rows"].sharding


def test_the_newest_are_kept_and_a_half_written_one_does_not_count(tmp_path, state):
    written(tmp_path, 2, state, 1, 2, 3)
    assert names(tmp_path) == ["2", "3"]
    half = tmp_path / "checkpoints/4.orbax-checkpoint-tmp-1700000000"  # as Orbax names one until it is complete
    (half / "state").mkdir(parents=True)
    with CheckpointManager(str(tmp_path), kept(2)) as again:
        assert again.latest_step() == 3
        again.save(5, state, {})
    assert names(tmp_path) == ["3", "5"]


def test_the_reference_is_saved_once_and_rewritten_if_it_is_half_written(tmp_path, state, monkeypatch):
    checkpoints, other = CheckpointManager(str(tmp_path), kept(1)), arrays(2)
    for saved in (state, other):
        checkpoints.save_reference(saved)
        assert_equal(checkpoints.restore_reference(abstract(1, 4, 2)), state)
    # as in a bucket, where what is written lies under its last name from the start
    monkeypatch.setattr("orbax.checkpoint.utils.is_checkpoint_finalized", lambda path: False)
    checkpoints.save_reference(other)
    assert_equal(checkpoints.restore_reference(abstract()), other)
    checkpoints.close()


def test_a_save_changes_each_manifest_once(tmp_path):
    """Cloud Storage takes one change of an object a second, for which every further one would wait."""
    state = {f"array{i}": arrays(i) for i in range(12)}
    with CheckpointManager(str(tmp_path), kept(1)) as checkpoints:
        checkpoints.save_reference(state)
        checkpoints.save(1, state, {})
    manifests = sorted(tmp_path.rglob("manifest.ocdbt"))
    assert len(manifests) == 4, "that of the process and that of all, of both"
    for manifest in manifests:
        opened = tensorstore.KvStore.open(f"file://{manifest.parent}/").result()
        versions = tensorstore.ocdbt.dump(opened).result()["versions"]
        assert [version["generation_number"] for version in versions] == [1], manifest


def cut_reference(folder) -> None:
    """Leave nothing in the files of the arrays."""
    for file in (folder / "reference").rglob("d/*"):
        file.write_bytes(b"")


def other_reference_sum(folder, change) -> None:
    file = folder / "reference_checksums.json"
    content = json.loads(file.read_text())
    change(content["checksums"])
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: other_reference_sum(folder, lambda sums: sums.update(rows=sums["rows"] ^ 1)), "rows differs"),
        (lambda folder: other_reference_sum(folder, lambda sums: sums.pop("everywhere")), "everywhere differs"),
        (lambda folder: (folder / "reference_checksums.json").write_text("[]"), "has no format"),
        (lambda folder: (folder / "reference_checksums.json").write_text("{"), "is no JSON"),
        (lambda folder: shutil.rmtree(folder / "reference/d"), "is damaged"),
        (cut_reference, "is damaged"),
        (lambda folder: (folder / "reference/manifest.ocdbt").unlink(), "is damaged"),
    ],
)
def test_a_damaged_reference_is_one_line_and_is_not_trained_with(tmp_path, state, damage, words):
    with CheckpointManager(str(tmp_path), kept(1)) as checkpoints:
        checkpoints.save_reference(state)
        damage(tmp_path)
        with pytest.raises(RunFileError, match=words) as told:
            checkpoints.restore_reference(abstract(1, 4, 2))
    assert "\n" not in str(told.value)


def test_a_reference_of_an_earlier_version_is_read_with_a_warning(tmp_path, state, caplog):
    with CheckpointManager(str(tmp_path), kept(1)) as checkpoints:
        checkpoints.save_reference(state)
        (tmp_path / "reference_checksums.json").unlink()
        assert_equal(checkpoints.restore_reference(abstract()), state)
    said = f"{tmp_path}/reference_checksums.json is missing: whether the arrays beside it were altered is not known"
    assert [record.message for record in caplog.records if record.name == "root"] == [said]


def test_a_checkpoint_of_another_model_or_format_is_refused(tmp_path, state):
    written(tmp_path, 1, state, 2)
    file = tmp_path / "checkpoints/2/position/metadata"
    words = r"dir: rows is \(16, 4\) in the checkpoint of step 2, but \(8, 4\) in the config; .*"
    other = abstract() | {"rows": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=state["rows"].sharding)}
    with CheckpointManager(str(tmp_path), kept(1)) as checkpoints:
        with pytest.raises(RunFileError, match=words):
            checkpoints.restore(2, other)
        file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 2}))
        said = r"^dir: the checkpoint of step 2 has format 2; this slipway reads format 1: update slipway$"
        with pytest.raises(RunFileError, match=said):
            checkpoints.restore_latest(abstract())


def test_the_best_stays_beside_the_newest(tmp_path, state):
    best = {"best": {"metric": "eval_loss", "mode": "min"}}
    checkpoints = CheckpointManager(str(tmp_path), kept(2, save_interval=3, **best), metrics=("eval_loss",))
    assert [step for step in range(1, 8) if checkpoints.should_save(step, evaluates=step % 4 == 0)] == [3, 4, 6]
    for step, loss in ((1, 3.0), (2, 1.5), (3, 1.5), (4, 2.0)):
        checkpoints.save(step, state, {})
        checkpoints.record_score(step, eval_loss=loss, other=9.0)
    checkpoints.close()
    written(tmp_path, 2, state, 5, 6, **best)  # not evaluated, as where the run is cut short
    assert names(tmp_path) == ["2", "5", "6"]
    assert json.loads((tmp_path / "scores.json").read_text())["best"] == 2
    unknown = {"metric": "eval_los", "mode": "min"}
    with pytest.raises(RunFileError, match=r"checkpoint\.best\.metric: eval_los .*; choices: eval_loss"):
        CheckpointManager(str(tmp_path), kept(1, best=unknown), metrics=("eval_loss",))


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_neither_is_nor_displaces_the_best(tmp_path, state, mode, bad, capfd):
    best = {"best": {"metric": "eval_loss", "mode": mode}}
    with CheckpointManager(str(tmp_path), kept(1, **best)) as checkpoints:
        for step, loss in ((1, bad), (2, 1.5), (3, bad), (4, bad)):
            checkpoints.save(step, state, {})
            checkpoints.record_score(step, eval_loss=loss)
    assert names(tmp_path) == ["2", "4"]
    found = json.loads((tmp_path / "scores.json").read_text())
    assert (found["best"], found["scores"]) == (2, {"2": 1.5})
    said = [line for line in capfd.readouterr().out.splitlines() if "best" in line]
    assert said == [f"WARNING: eval_loss after update {step} is {bad}: it cannot be the best" for step in (1, 3, 4)]
    found["scores"] |= {"4": bad, "3": None}  # as an earlier version wrote them
    (tmp_path / "scores.json").write_text(json.dumps(found))
    written(tmp_path, 1, state, 5, **best)
    assert names(tmp_path) == ["2", "5"]
    with CheckpointManager(str(tmp_path / "new"), kept(1, **best)) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.record_score(1, eval_loss=bad)
        checkpoints.save(2, state, {})
    assert names(tmp_path / "new") == ["2"]
    assert not (tmp_path / "new/scores.json").exists()


@pytest.mark.parametrize("writes", [True, False])
def test_an_evaluation_that_is_repeated_and_no_number_takes_the_score_back_on_all_processes(tmp_path, writes):
    settings = kept(1, best={"metric": "eval_loss", "mode": "min"})
    root = epath.Path(tmp_path)
    scores = checkpoint_manager.Retention(root, settings, RunStorage(str(root)), writes)
    for step, loss in ((1, 0.5), (2, 0.7), (1, math.nan)):
        scores.record_score(step, loss)
    assert scores.best_step([1, 2]) == 2


def test_whatever_file_is_damaged_is_noticed_or_not_needed(tmp_path, state):
    written(tmp_path, 1, state, 2)
    checkpoints = CheckpointManager(str(tmp_path), kept(1))
    files, noticed = sorted(path for path in (tmp_path / "checkpoints/2").rglob("*") if path.is_file()), Counter()
    for path, damage in product(files, ("deleted", "cut")):
        whole = path.read_bytes()
        path.unlink()
        if damage == "cut":
            path.write_bytes(whole[: len(whole) // 2])
        try:
            restored, position = checkpoints.restore(2, abstract())
        except BrokenCheckpointError:
            noticed[damage, path.name] += 1
        else:
            assert position == {"step": 2}
            assert_equal(restored, state)
        path.write_bytes(whole)
    checkpoints.close()
    for damage in ("deleted", "cut"):
        assert {(damage, name) for name in ("metadata", "_METADATA", "manifest.ocdbt")} <= noticed.keys()
        assert sum(count for (kind, _), count in noticed.items() if kind == damage) > 3  # and files of arrays


def alter(folder, step: int) -> None:
    """As if the bytes of an array were others than those that were saved."""
    file = folder / f"checkpoints/{step}/position/metadata"
    content = json.loads(file.read_text())
    content["checksums"]["rows"] ^= 1
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("change", [{"checksums": None}, {"checksums": []}, {"checksums": ...}, {"position": ...}])
def test_a_position_that_lacks_what_was_saved_is_that_of_a_broken_checkpoint(tmp_path, state, caplog, change):
    written(tmp_path, 2, state, 2, 4)
    file = tmp_path / "checkpoints/4/position/metadata"
    content = json.loads(file.read_text()) | change
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))
    with CheckpointManager(str(tmp_path), kept(2)) as read:
        assert read.restore_latest(abstract()).step == 2
    assert "checkpoint of step 4 is broken, skipping it: worker 0: position is not what was saved" in caplog.messages


def test_a_broken_checkpoint_is_skipped_with_one_warning_and_then_replaced(tmp_path, state, caplog):
    written(tmp_path, 2, state, 2, 4, 6)
    alter(tmp_path, 6)
    read = CheckpointManager(str(tmp_path), kept(2))
    step, restored, position = read.restore_latest(abstract())
    assert (step, position) == (4, {"step": 4})
    assert_equal(restored, state)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING" and record.name == "root"]
    assert warnings == ["checkpoint of step 6 is broken, skipping it: rows differs from what was saved"]
    read.save(5, state, {})  # the broken one is not one of the two that are kept
    read.save(6, state, {"step": 6})
    read.close()
    assert names(tmp_path) == ["5", "6"]
    with CheckpointManager(str(tmp_path), kept(2)) as again:
        assert again.restore_latest(abstract()).position == {"step": 6}


@pytest.mark.parametrize(("steps", "starts_over"), [((2,), True), ((2, 4), False)])
def test_where_all_are_broken_at_most_the_first_interval_is_lost(tmp_path, state, steps, starts_over):
    written(tmp_path, 2, state, *steps)
    for step in steps:
        alter(tmp_path, step)
    checkpoints = CheckpointManager(str(tmp_path), kept(2))
    if starts_over:
        assert checkpoints.restore_latest(abstract()) is None
        checkpoints.save(2, state, {})
        assert checkpoints.restore_latest(abstract()).step == 2
    else:
        with pytest.raises(RunFileError, match=r"dir: cannot read any of the checkpoints \(2, 4\)"):
            checkpoints.restore_latest(abstract())
    checkpoints.close()


def test_a_store_that_cannot_be_reached_is_not_taken_for_a_broken_checkpoint(tmp_path, state, monkeypatch):
    checkpoints = CheckpointManager(str(tmp_path), kept(1))
    checkpoints.save(2, state, {})

    def unreachable(folder):
        raise ValueError("UNAVAILABLE: 503")

    monkeypatch.setattr(checkpoint_manager, "check_database", unreachable)
    with pytest.raises(ValueError, match="503"):
        checkpoints.restore_latest(abstract())
    checkpoints.close()


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
@pytest.mark.parametrize("size", [7, *wide(60 << 20)])
def test_a_file_of_a_folder_and_an_object_of_a_bucket_are_created_once(bucket, tmp_path, size) -> None:
    for folder in (str(tmp_path), f"{BUCKET}/once-{size}"):
        path = epath.Path(folder) / "journal" / "0.npz"
        create_file(path, b"a" * size)
        with pytest.raises(FileExistsError):
            create_file(path, b"b" * size)
        assert path.read_bytes() == b"a" * size
        assert [each.name for each in path.parent.iterdir()] == ["0.npz"]


LOOK_UP = """
import os, sys
from trainer.checkpoint.storage import find_credentials
if sys.argv[1] == "quiet":
    find_credentials("gs://slipway-nowhere/runs/x")
else:
    import tensorstore
    tensorstore.KvStore.open("gs://slipway-nowhere/runs/x/").result().read("credentials").result()
os.write(2, b"afterwards\\n")
"""


class NotFound(BaseHTTPRequestHandler):
    """A metadata server without an account, and a Cloud Storage without objects."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_only_the_named_lines_are_left_out(capfd):
    with without_lines(re.compile(rb"harmless")):
        os.write(2, b"E1122 harmless: nothing\n")
        os.write(2, b"E1122 serious\nlast, without an end of line")
    os.write(2, b"\nafterwards\n")
    assert capfd.readouterr().err == "E1122 serious\nlast, without an end of line\nafterwards\n"


def test_tensorstore_finds_its_credentials_in_silence(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        root = f"127.0.0.1:{server.server_port}"
        env = {**os.environ, "HOME": str(tmp_path), "GCE_METADATA_ROOT": root}
        env = {**env, "TENSORSTORE_GCS_HTTP_URL": f"http://{root}"}
        said = [
            subprocess.run([sys.executable, "-c", LOOK_UP, how], capture_output=True, text=True, env=env, check=True)
            for how in ("quiet", "loud")
        ]
        server.shutdown()
    assert said[0].stderr == "afterwards\n"
    assert "Could not find the credentials file" in said[1].stderr  # else there is nothing to leave out any more
