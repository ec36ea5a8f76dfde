"""Downloads of a run's files: complete or absent, resumable, inside the folder, and only what the record says."""

import base64
import hashlib
import io
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.core.errors import CloudError, ConfigError
from controller.gcp.errors import NotFoundError
from controller.records import downloads, restore
from controller.records.downloads import RemoteFile, fetch_checkpoint, fetch_file, is_complete, list_files, local_path

CONTENT = bytes(range(256)) * 40


class Bucket:
    """A bucket with the files of one run, which counts the bytes sent and may fail after some parts."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.sent, self.parts_left = files, 0, 10**9

    def list_all(self, api: str, method: str, items: str, *, prefix: str, **_: Any) -> list[dict[str, str]]:
        assert (api, method, items) == ("storage", "objects.list", "items")
        return [
            {"name": name, "size": str(len(data)), "generation": "7", "md5Hash": md5(data)}
            for name, data in self.files.items()
            if name.startswith(prefix)
        ]

    def download_range(self, _: str, name: str, generation: str, begin: int, end: int) -> bytes:
        if generation != "7":
            raise NotFoundError("storage objects.get", 404, "notFound", "No such object")
        if not self.parts_left:
            raise ConnectionError("cut")
        self.parts_left -= 1
        self.sent += end - begin
        return self.files[name][begin:end]


def md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PART_BYTES", 1000)


@pytest.fixture
def bucket() -> Any:
    folder = "runs/r-1/"
    return Bucket({f"{folder}result.json": b"{}", f"{folder}logs/a.log": CONTENT, "runs/r-12/logs/b.log": b"other",
                   f"{folder}logs/": b"", f"{folder}empty": b""})  # fmt: skip


def listed(bucket: Any, path: str = "") -> list[str]:
    return sorted(file.path for file in list_files(bucket, "b", "runs/r-1", path))


def test_the_files_of_a_run_a_folder_or_one_file_are_listed(bucket: Any) -> None:
    assert listed(bucket) == ["empty", "logs/a.log", "result.json"]
    assert listed(bucket, "logs/") == listed(bucket, "logs/a.log") == ["logs/a.log"]
    with pytest.raises(ConfigError, match=r"runs/r-1/log: no such file or folder; it has empty, logs/, result.json"):
        listed(bucket, "log")
    with pytest.raises(ConfigError, match="the bucket has no files of this run"):
        list_files(bucket, "b", "runs/none", "")


def test_an_interrupted_download_continues_and_a_complete_one_is_not_repeated(bucket: Any, tmp_path: Path) -> None:
    [file] = list_files(bucket, "b", "runs/r-1", "logs")
    target, moved = tmp_path / "logs/a.log", []
    bucket.parts_left = 4
    with pytest.raises(ConnectionError):
        fetch_file(bucket, "b", file, target, moved.append)
    assert not target.exists()
    assert not is_complete(file, target)
    bucket.parts_left = 100
    fetch_file(bucket, "b", file, target, moved.append)
    assert target.read_bytes() == CONTENT
    assert bucket.sent == len(CONTENT)
    assert [path.name for path in target.parent.iterdir()] == ["a.log"]
    assert is_complete(file, target)
    target.write_bytes(CONTENT[:-1] + b"x")
    assert not is_complete(file, target)


def test_an_empty_file_arrives_and_content_that_is_not_what_was_listed_is_refused(bucket: Any, tmp_path: Path) -> None:
    [empty], [file] = (list_files(bucket, "b", "runs/r-1", path) for path in ("empty", "logs"))
    fetch_file(bucket, "b", empty, tmp_path / "empty", lambda _: None)
    assert (tmp_path / "empty").read_bytes() == b""
    changed = RemoteFile(file.name, file.path, file.size, "6", file.md5)
    with pytest.raises(CloudError, match="was replaced during the download"):
        fetch_file(bucket, "b", changed, tmp_path / "a", lambda _: None)
    bucket.files[file.name] = CONTENT[::-1]
    with pytest.raises(CloudError, match="does not match its checksum"):
        fetch_file(bucket, "b", file, tmp_path / "b", lambda _: None)
    assert not (tmp_path / "b").exists()


def test_no_name_leads_out_of_the_folder(tmp_path: Path) -> None:
    for path in ("../x", "a/../../x", "/etc/passwd", "a\0b"):
        with pytest.raises(ConfigError, match="is no path inside a folder"):
            local_path(tmp_path, path)


def test_a_checkpoint_is_copied_once_and_replaces_another(tmp_path: Path) -> None:
    run = "runs/r-1/"
    needed = {f"{run}run.yaml": b"model: 1", f"{run}tokenizer/vocab.json": b"{}"}
    first, second = {f"{run}checkpoints/3/state/a": CONTENT}, {f"{run}checkpoints/9/state/a": b"nine"}
    bucket: Any = Bucket(needed | first | second | {f"{run}logs/a.log": CONTENT, f"{run}checkpoints/30/b": b"thirty"})
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

    bucket: Any = Bucket({"runs/r-1/run.yaml": b"model: 1"})
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
        restore._restore_code(google, {"run": "r", "bucket": "b", "code_sha256": sha256}, tmp_path / "a/state")
    assert list(tmp_path.iterdir()) == []
    assets = [{"kind": "dataset", "name": "d", "identity": "i" * 12, "files": {"f": sha256}}]
    with pytest.raises(ConfigError, match="invalid SHA-256"):
        restore._recorded_inputs(google, {"run": "r", "bucket": "b", "run_yaml": "", "assets": assets}, "r", tmp_path)


@pytest.mark.parametrize("name", ["code.py", "../../planted"])
def test_code_that_is_not_what_the_record_says_is_not_kept(tmp_path: Path, name: str) -> None:
    google = archived(name)
    with pytest.raises(Exception, match=r"does not match the record|leads outside it"):
        restore._restore_code(google, {"run": "r", "bucket": "b", "code_sha256": "a" * 64}, tmp_path / "state")
    assert [path.name for path in (tmp_path / "state/code").iterdir()] == []
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
