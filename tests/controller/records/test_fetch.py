"""Downloads of a run's files, complete or absent and only what the record says; and model.weights=run:ID."""

import gzip
import io
import json
import math
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conf.schema.config import Config
from controller.agent.fs import tree_hash
from controller.core.errors import CloudError, ConfigError
from controller.core.json_documents import DamagedRecordError
from controller.records import fetch, restore
from controller.records.fetch import RemoteFile, fetch_checkpoint, fetch_file, is_complete, list_files
from controller.records.recorded_code import restore_code
from controller.run.options import RunOptions
from tests.fakes.google import MemoryStorage
from tests.golden import golden

CONTENT = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PART_BYTES", 1000)


@pytest.fixture
def bucket() -> MemoryStorage:
    folder = "runs/r-1/"
    own = {f"{folder}result.json": b"{}", f"{folder}logs/a.log": CONTENT, f"{folder}logs/": b"", f"{folder}empty": b""}
    left = {f"{folder}parts/5f0c": b"lines that no file has yet", "runs/r-2/parts/5f0c": b""}
    return MemoryStorage(b={**own, **left, "runs/r-12/logs/b.log": b"other"})


def listed(bucket: MemoryStorage, path: str = "") -> list[str]:
    return sorted(file.path for file in list_files(bucket, "b", "runs/r-1", path))


def test_the_files_of_a_run_a_folder_or_one_file_are_listed(bucket: MemoryStorage) -> None:
    assert listed(bucket) == ["empty", "logs/a.log", "result.json"]
    assert listed(bucket, "logs/") == listed(bucket, "logs/a.log") == ["logs/a.log"]
    with pytest.raises(ConfigError, match=r"runs/r-1/log: no such file or folder; it has empty, logs/, result.json"):
        listed(bucket, "log")
    for run in ("none", "r-2"):
        with pytest.raises(ConfigError, match="the bucket has no files of this run"):
            list_files(bucket, "b", f"runs/{run}", "")


def test_an_interrupted_download_continues_and_a_complete_one_is_not_repeated(
    bucket: MemoryStorage, tmp_path: Path
) -> None:
    [file] = list_files(bucket, "b", "runs/r-1", "logs")
    target, moved = tmp_path / "logs/a.log", []
    bucket.ranges_left = 4
    with pytest.raises(ConnectionError):
        fetch_file(bucket, "b", file, target, moved.append)
    assert not target.exists()
    assert not is_complete(file, target)
    bucket.ranges_left = 100
    fetch_file(bucket, "b", file, target, moved.append)
    assert target.read_bytes() == CONTENT
    assert bucket.sent == len(CONTENT)
    assert [path.name for path in target.parent.iterdir()] == ["a.log"]
    assert is_complete(file, target)
    target.write_bytes(CONTENT[:-1] + b"x")
    assert not is_complete(file, target)


def test_an_empty_file_arrives_and_content_that_is_not_what_was_listed_is_refused(
    bucket: MemoryStorage, tmp_path: Path
) -> None:
    [empty], [file] = (list_files(bucket, "b", "runs/r-1", path) for path in ("empty", "logs"))
    fetch_file(bucket, "b", empty, tmp_path / "empty", lambda _: None)
    assert (tmp_path / "empty").read_bytes() == b""
    changed = RemoteFile(file.name, file.path, file.size, "6", file.md5)
    with pytest.raises(CloudError, match="was replaced during the download"):
        fetch_file(bucket, "b", changed, tmp_path / "a", lambda _: None)
    bucket.download_range = lambda bucket, name, generation, begin, end: CONTENT[::-1][begin:end]
    with pytest.raises(CloudError, match="does not match its checksum"):
        fetch_file(bucket, "b", file, tmp_path / "b", lambda _: None)
    assert not (tmp_path / "b").exists()


def test_of_a_checkpoint_no_bad_name_is_copied_and_the_rest_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    below = dict.fromkeys(("state/a", "../../../../planted", "/etc/planted", "state/.git/config", "s\x1bc"), b"x")
    bucket = MemoryStorage(bucket={f"runs/r-1/checkpoints/3/{name}": content for name, content in below.items()})
    folder = fetch_checkpoint(bucket, "bucket", "r-1", 3, tmp_path / "a/state", lambda *_: None)
    written = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert written == [(folder / "state/a").relative_to(tmp_path).as_posix()]
    said = capsys.readouterr().err
    assert said.count("warning: not copied: ") == 4
    assert "\x1b" not in said


def test_a_checkpoint_is_copied_once_and_replaces_another(tmp_path: Path) -> None:
    run = "runs/r-1/"
    needed = {f"{run}run.yaml": b"model: 1", f"{run}tokenizer/vocab.json": b"{}"}
    first, second = {f"{run}checkpoints/3/state/a": CONTENT}, {f"{run}checkpoints/9/state/a": b"nine"}
    others = {f"{run}logs/a.log": CONTENT, f"{run}checkpoints/30/b": b"thirty"}
    bucket = MemoryStorage(bucket=needed | first | second | others)
    moves: list[tuple[str, int, int]] = []

    def fetch_step(step: int) -> Path:
        return fetch_checkpoint(bucket, "bucket", "r-1", step, tmp_path, lambda *move: moves.append(move))

    folder = fetch_step(3)
    assert folder == tmp_path / "weights/r-1/checkpoints/3"
    below = folder.parents[1]
    copied = {path.relative_to(below).as_posix() for path in below.rglob("*") if path.is_file()}
    assert copied == {"run.yaml", "tokenizer/vocab.json", "checkpoints/3/state/a"}
    assert (folder / "state/a").read_bytes() == CONTENT
    sizes = len(CONTENT) + sum(map(len, needed.values()))
    assert (sum(size for _, size, _ in moves), {total for _, _, total in moves}) == (sizes, {sizes})
    sent = bucket.sent
    assert fetch_step(3) == folder
    assert bucket.sent == sent
    assert (fetch_step(9) / "state/a").read_bytes() == b"nine"
    assert not folder.exists()


def test_a_checkpoint_on_this_machine_is_where_it_is_and_a_full_disk_is_named(tmp_path: Path) -> None:
    def moved(*_: object) -> None:
        raise AssertionError("nothing is copied")

    bucket = MemoryStorage(bucket={"runs/r-1/run.yaml": b"model: 1"})
    results = str(tmp_path / "results")
    assert fetch_checkpoint(bucket, results, "r-1", 3, tmp_path, moved) == Path(results, "runs/r-1/checkpoints/3")
    (tmp_path / "weights").write_text("no folder")
    with pytest.raises(ConfigError, match=r"^run\.state_dir: .*weights/r-1 cannot be written: "):
        fetch_checkpoint(bucket, "bucket", "r-1", 3, tmp_path, moved)


def archived(name: str) -> Any:
    """A bucket that has one archive, whatever it is asked for."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo(name))
    return SimpleNamespace(download=lambda *_: buffer.getvalue())


@pytest.mark.parametrize("sha256", ["../../planted", "a" * 63, "A" * 64, 1, "a" * 64 + "\n"])
def test_what_is_no_hash_names_no_file(tmp_path: Path, sha256: Any) -> None:
    google = archived("code.py")
    with pytest.raises(ConfigError, match="invalid SHA-256"):
        restore_code(google, {"run": "r", "bucket": "b", "code_sha256": sha256}, tmp_path / "a/state")
    assert list(tmp_path.iterdir()) == []
    assets = [{"kind": "dataset", "name": "d", "identity": "i" * 12, "files": {"f": sha256}}]
    with pytest.raises(ConfigError, match="invalid SHA-256"):
        restore._recorded_inputs(google, {"run": "r", "bucket": "b", "run_yaml": "", "assets": assets}, "r", tmp_path)


@pytest.mark.parametrize("name", ["code.py", "../../planted"])
def test_code_that_is_not_what_the_record_says_is_not_kept(tmp_path: Path, name: str) -> None:
    google = archived(name)
    with pytest.raises(ConfigError, match=r"does not match the record|leads outside it"):
        restore_code(google, {"run": "r", "bucket": "b", "code_sha256": "a" * 64}, tmp_path / "state")
    assert [path.name for path in (tmp_path / "state/code").iterdir()] == []
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize(
    "packed",
    [b"", b"no archive", b"\x1f\x8b\x08\0\0\0\0\0\0\xffcut", gzip.compress(b"x" * 2000)],
    ids=["empty", "text", "cut", "no tar"],
)
def test_what_is_no_archive_is_one_line(tmp_path: Path, packed: bytes) -> None:
    google: Any = SimpleNamespace(download=lambda *_: packed)
    with pytest.raises(ConfigError, match=r"--run r: (cannot unpack the code in|the code in .* does not match)"):
        restore_code(google, {"run": "r", "bucket": "b", "code_sha256": "a" * 64}, tmp_path)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ((), ""),
        (("modules/__pycache__/own.cpython-311.pyc",), "in place of its source"),
        (("a/b/__pycache__/x",), "in place of its source"),
        ((".git/config",), r"has '\.git/config', which tools obey"),
        (("sub/.GIT/config", "HEAD"), "which tools obey"),
        ((".hg/hgrc",), "which tools obey"),
        (("HEAD", "config", "objects/x", "refs/x"), "has 'HEAD', which tools obey"),
        (("tests/bare/HEAD", "tests/bare/config", ".github/x", ".gitignore", ".vscode/x"), ""),
    ],
)
def test_code_holds_nothing_beside_its_hash_and_no_repository(
    tmp_path: Path, extra: tuple[str, ...], words: str
) -> None:
    tree, buffer = tmp_path / "tree", io.BytesIO()
    for name in ("modules/own.py", *extra):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path in sorted(path for path in tree.rglob("*") if path.is_file()):
            tar.add(path, path.relative_to(tree).as_posix())
    google: Any = SimpleNamespace(download=lambda *_: buffer.getvalue())
    document = {"run": "r", "bucket": "b", "code_sha256": tree_hash(tree)}
    if not words:
        assert "modules/own.py" in restore_code(google, document, tmp_path / "state").files
        return
    with pytest.raises(ConfigError, match=words):
        restore_code(google, document, tmp_path / "state")
    assert [path.name for path in (tmp_path / "state/code").iterdir()] == []


RUN = "sft-12345678"
WORDS = ["cloud=here", "cloud.backend=cpu", "+experiment=quickstart", "mesh=data"]


def config(*words: str) -> Config:
    return RunOptions((*WORDS, *words)).config()[0]


@pytest.fixture
def run(home: Path) -> Path:
    """The folder of a finished run of cloud=here, with checkpoints of steps 4 and 10, and half of one of 12."""
    folder = home.parent / "results/runs" / RUN
    for step in (4, 10, 12):
        (folder / f"checkpoints/{step}/state").mkdir(parents=True)
        (folder / f"checkpoints/{step}/state/manifest.ocdbt").touch()
    for step in (4, 10):
        (folder / f"checkpoints/{step}/commit_success.txt").touch()
    scores = {"format": 1, "metric": "eval_accuracy", "mode": "max", "best": 4, "scores": {"4": 0.8, "10": 0.7}}
    (folder / "scores.json").write_text(json.dumps(scores))
    made = {"run": RUN, "bucket": str(home.parent / "results"), "config": config().model_dump(mode="json")}
    write_record(home, golden("record") | made)
    return folder


def write_record(home: Path, record: dict[str, Any]) -> None:
    file = home / "runs" / record["run"] / "record.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record))


@pytest.mark.parametrize(("reference", "step"), [("", 10), ("@best", 4), ("@4", 4)])
def test_a_run_means_one_checkpoint(run: Path, reference: str, step: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = config(f"model.weights=run:{RUN}{reference}")
    assert found.model is not None
    assert found.model.weights == f"{run}/checkpoints/{step}", "so a repeat starts from the same weights"
    assert f"model.weights: run:{RUN}{reference} is step {step}" in capsys.readouterr().err


@pytest.mark.usefixtures("run")
def test_what_cannot_be_started_from_is_one_line(home: Path) -> None:
    other = json.loads((home / f"runs/{RUN}/record.json").read_text())
    other["config"]["model"] = None
    write_record(home, other | {"run": "own-1"})
    for words, message in (
        ([f"model.weights=run:{RUN}@12"], f"{RUN} has checkpoints of steps 4, 10"),
        ([f"model.weights=run:{RUN}@last"], "is none of run:ID, run:ID@best and run:ID@STEP"),
        (["model.weights=run:own-1"], "own-1 is no run of the bundled trainer, so it has no weights"),
        (["model.weights=run:sft-0"], "model.weights: sft-0: no such run on this machine"),
        ([f"model.weights=run:{RUN}", "model.dim=128"], f"model.dim: is 128, but 64 in {RUN}"),
    ):
        with pytest.raises(ConfigError, match=message):
            config(*words)
    with pytest.raises(ConfigError, match=r"cloud=local cannot read; `slipway export"):
        RunOptions(("cloud=local", *WORDS[2:], f"model.weights=run:{RUN}")).config()


@pytest.mark.parametrize(
    ("scores", "step"),
    [
        ({"4": math.nan, "10": 0.7}, 10),
        ({"4": 0.1, "10": math.nan}, 4),
        ({"4": None, "10": 0.1}, 10),
        ({"4": math.inf, "10": -1e9}, 10),
    ],
)
def test_a_score_that_is_no_number_is_not_the_best(run: Path, scores: dict[str, Any], step: int) -> None:
    for mode in ("max", "min"):
        known = json.loads((run / "scores.json").read_text())
        (run / "scores.json").write_text(json.dumps(known | {"mode": mode, "scores": scores}))
        found = config(f"model.weights=run:{RUN}@best")
        assert found.model is not None
        assert found.model.weights == f"{run}/checkpoints/{step}"
    (run / "scores.json").write_text(json.dumps(known | {"scores": dict.fromkeys(scores, math.nan)}))
    with pytest.raises(ConfigError, match="did not record a best checkpoint"):
        config(f"model.weights=run:{RUN}@best")


def test_a_run_without_scores_has_no_best_and_one_without_checkpoints_says_so(run: Path) -> None:
    for odd in ("[]", "{", "[" * 9999, '{"scores": []}', '{"scores": {"x": 1}}', '{"scores": {"4": 1}}'):
        (run / "scores.json").write_text(odd)
        with pytest.raises(DamagedRecordError, match=r"scores\.json is damaged"):
            config(f"model.weights=run:{RUN}@best")
    (run / "scores.json").unlink()
    with pytest.raises(ConfigError, match=r"did not record a best checkpoint \(checkpoint\.best\)"):
        config(f"model.weights=run:{RUN}@best")
    for file in run.glob("checkpoints/*/commit_success.txt"):
        file.unlink()
    with pytest.raises(ConfigError, match=f"{RUN} has no complete checkpoint in .* yet; the bundled trainer saves"):
        config(f"model.weights=run:{RUN}")
