"""Whatever a config names is read from a bucket as it is from a folder, in blocks of fsspec's cache."""

import importlib
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import gcsfs.retry
import jax
import numpy as np
import orbax.checkpoint as ocp
import pyarrow as pa
import pytest
import yaml
from etils import epath
from etils.epath import backend
from gcsfs import GCSFileSystem
from jax.sharding import NamedSharding, PartitionSpec
from pyarrow import parquet

from conf.schema.training.data import CustomDocuments, CustomQuestions, Gsm8kData, JsonlData, ParquetData, TextData
from conf.schema.training.model import Model
from conf.schema.training.run_yaml import RunFile
from conf.schema.training.settings import CheckpointSettings
from tests.controller.localcloud.conftest import cloud as cloud
from tests.groups import CONF, load_group, load_yaml
from tests.paths import ROOT
from tests.trainer.buckets import BUCKET, NAME
from tests.trainer.buckets import bucket as bucket
from tests.trainer.conftest import make_lm_run, make_mesh
from tests.trainer.data.corpora import make_documents, write_jsonl, write_parquet, write_text
from tests.trainer.fixtures import make_core
from tests.trainer.models.test_lora import LORA
from trainer.checkpoint.manager import CheckpointManager
from trainer.corpus import files
from trainer.corpus.buckets import BucketFileSystem
from trainer.data.batches import read_texts
from trainer.data.gsm8k import called_problems, read_problems
from trainer.data.streams import open_source
from trainer.distributed.fingerprint import file_fingerprint
from trainer.evaluation import core, harness
from trainer.models.weights import init_params
from trainer.policy.run_files import tokenizer_files
from trainer.pretrained import peft_files, run_weights, store
from trainer.puzzles.__main__ import main as build_puzzles
from trainer.puzzles.dataset import PuzzleDataset
from trainer.puzzles.sources import SUDOKU, read_arrays, read_csv
from trainer.rl.remote import journal
from trainer.tokenizer.__main__ import main as train_tokenizer
from trainer.tokenizer.loading import load_tokenizer

FIXTURES = ROOT / "tests" / "trainer" / "fixtures"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, bucket: BucketFileSystem) -> Path:
    """A folder with an input of every kind; the bucket has a copy."""
    made = tmp_path_factory.mktemp("inputs")
    texts = make_documents(300)
    rows = [{"question": f"{text}?", "answer": f"so\n#### {i}"} for i, text in enumerate(texts)]
    (made / "rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), made / "rows.parquet")
    write_text(made / "docs.txt", texts)
    write_jsonl(made / "docs.jsonl", texts)
    write_parquet(made / "docs.parquet", texts, 50)
    words = ["sudoku", "--source", "generated", "--side", "4", "--subsample", "40", "--test", "20"]
    assert build_puzzles([*words, "--output", str(made / "puzzles")]) == 0
    shutil.copytree(ROOT / "tests/trainer/puzzles/sudoku_extreme", made / "csv")
    boards = np.load(made / "puzzles/train/inputs.npy"), np.load(made / "puzzles/train/labels.npy")
    arrays = dict(zip(("inputs", "labels"), (board.astype(np.int64) for board in boards), strict=True))
    count = len(boards[0])
    arrays |= {"puzzle_identifiers": np.zeros(count), "puzzle_indices": np.arange(count + 1)}
    (made / "arrays/train").mkdir(parents=True)
    for name, array in {**arrays, "group_indices": np.arange(count + 1)}.items():
        np.save(made / f"arrays/train/all__{name}.npy", array)
    words = ["train", str(made / "docs.txt"), "--output", str(made / "tokenizer"), "--vocab", "300"]
    assert train_tokenizer(words) == 0
    (made / "tokenizer/chat_template.jinja").write_text("{{ messages }}")
    for name in ("llama3", "lora_llama3"):
        shutil.copytree(FIXTURES / name, made / name)
    write_weights(made)
    make_core.write_bundle(made / "eval_bundle")
    shutil.make_archive(str(made / "eval_bundle"), "zip", made, "eval_bundle")
    bucket.put(f"{made}/", f"{BUCKET}/", recursive=True)
    return made


def write_weights(folder: Path) -> None:
    """A folder of ours, and a checkpoint of a run."""
    run = make_lm_run(folder)
    experiment = RunFile.model_validate(run)
    params = jax.tree.map(np.asarray, init_params(experiment.model, jax.random.key(0)))
    store.write_params(epath.Path(folder / "ours"), params, experiment.model)
    checkpoints = CheckpointManager(str(folder / "run"), experiment.checkpoint)
    everywhere = NamedSharding(make_mesh(1, 1, 1), PartitionSpec())
    checkpoints.save(2, {"params": jax.device_put(params, everywhere)}, {})
    checkpoints.close()
    (folder / "run/run.yaml").write_text(yaml.safe_dump(run))


def numbered(path: str) -> Iterator[dict[str, str]]:
    """A user's own questions, through fsspec, line by line, as of a file."""
    with fsspec.open(path, "rb") as opened:
        stream: Any = opened
        for number, line in enumerate(iter(lambda: stream.readline(80), b"")):
            yield {"question": line.decode(errors="replace"), "answer": str(number)}


def lines_of(path: str) -> list[str]:
    """A user's own documents, through epath, as text."""
    with epath.Path(path).open() as stream:
        return stream.readlines()


def questions(kind: type[Gsm8kData | CustomQuestions], group: str, **changes: Any) -> Callable[[str], Any]:
    def read(address: str) -> Any:
        data = kind(**load_group(f"data/{group}") | {"path": address, "eval_path": address} | changes)
        rows_of = read_problems if isinstance(data, Gsm8kData) else called_problems
        problems, _ = rows_of(data, address, "data.path")  # pyright: ignore[reportArgumentType]
        return [problem._replace(place="") for problem in problems]

    return read


def documents(kind: type[Any], group: str, **changes: Any) -> Callable[[str], Any]:
    def read(address: str) -> Any:
        source = open_source(kind(**load_group(f"data/{group}") | {"path": address} | changes), address, "data.path")
        groups = [source.read(i) for i in range(len(source))]
        return [group.take(range(len(group))) for group in groups]

    return read


def weights(address: str) -> Any:
    folder = epath.Path(address)
    return jax.tree.map(np.asarray, store.read_params(folder, store.read_model(folder)))


def adapter(address: str) -> Any:
    cfg = store.read_model(epath.Path(FIXTURES / "llama3"))
    assert isinstance(cfg, Model)
    return peft_files.read_adapter(epath.Path(address), cfg.model_copy(update={"lora": LORA["llama3"]}))


def puzzles(address: str) -> Any:
    opened = PuzzleDataset.open(address)
    return [vars(split) for split in (opened.train, opened.test)], vars(opened)["splits"]


def tokenizer(address: str) -> Any:
    data = TextData(**load_group("data/text") | {"path": "none", "tokenizer": address})
    return load_tokenizer(address).encode(["one and two"]), dict(tokenizer_files(data))


def bundle(address: str) -> Any:
    read = core._open_bundle(address)
    return [read(name) for name in (core.TASKS, core.METADATA, "eval_data/some/plain.jsonl")]


OWN = {"options": {}, "source": f"{__name__}:numbered"}
READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "questions in JSON lines": ("rows.jsonl", questions(Gsm8kData, "gsm8k")),
    "questions in Parquet": ("rows.parquet", questions(Gsm8kData, "gsm8k")),
    "questions of an own function": ("rows.jsonl", questions(CustomQuestions, "questions", **OWN)),
    "text": ("docs.txt", lambda at: read_texts(TextData(**load_group("data/text") | {"path": at}))),
    "documents in text": ("docs.txt", documents(TextData, "text", separator="\n\n", packing="stream")),
    "documents in JSON lines": ("docs.json*", documents(JsonlData, "jsonl")),
    "documents in Parquet": ("*docs.parquet", documents(ParquetData, "parquet")),
    "documents of an own function": (
        "docs.txt",
        documents(CustomDocuments, "documents", **OWN | {"source": f"{__name__}:lines_of"}),
    ),
    "puzzles": ("puzzles", puzzles),
    "puzzles in CSV": ("csv/test.csv", lambda at: tuple(read_csv(at, SUDOKU, None, 0))),
    "puzzles of the study": ("arrays", lambda at: tuple(read_arrays(at, "train", SUDOKU))),
    "tokenizer": ("tokenizer/tokenizer.json", tokenizer),
    "weights of Hugging Face": ("llama3", weights),
    "weights of ours": ("ours", weights),
    "weights of a run": ("run/checkpoints/2", weights),
    "adapter": ("lora_llama3", adapter),
    "CORE": ("eval_bundle", bundle),
    "CORE in an archive": ("eval_bundle.zip", bundle),
}


@pytest.mark.parametrize("kind", READERS)
def test_it_is_read_from_the_bucket_as_from_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(GCSFileSystem, "default_block_size", 1000)
    monkeypatch.setattr(files, "BUFFER_BYTES", 333)
    name, read = READERS[kind]
    ours, theirs = read(f"{folder}/{name}"), read(f"{BUCKET}/{name}")
    assert jax.tree.structure(theirs) == jax.tree.structure(ours)
    assert jax.tree.leaves(ours)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(theirs), jax.tree.leaves(ours), strict=True))


def test_tasks_of_the_harness(folder: Path, tmp_path: Path) -> None:
    found = list[dict[str, bytes]]()
    for address in (f"{folder}/eval_bundle", f"{BUCKET}/eval_bundle"):
        target = tmp_path / "tasks"
        target.mkdir()
        harness._copy(epath.Path(address), target)
        found.append({str(path): path.read_bytes() for path in target.rglob("*") if path.is_file()})
        shutil.rmtree(target)
    assert len(found[0]) > 5
    assert found[0] == found[1]


def test_a_stream_of_an_object_does_what_a_files_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GCSFileSystem, "default_block_size", 1000)
    monkeypatch.setattr(files, "BUFFER_BYTES", 300)

    def use(stream: Any) -> list[Any]:
        target = bytearray(700)
        done = [stream.readable(), stream.seekable(), stream.writable(), stream.readline(7), stream.readline()]
        done += [stream.readinto(target), bytes(target), stream.tell(), stream.peek(1)[:1], stream.read1(5)]
        done += [stream.seek(-90, io.SEEK_END), stream.readlines(), stream.read(1), stream.readline(4)]
        done += [stream.seek(0), stream.readlines(600), stream.seek(3, io.SEEK_CUR), next(stream), stream.read()]
        text = io.TextIOWrapper(stream, "utf-8")
        done += [text.seek(0), text.readline(), text.read()]
        text.detach()
        return done

    with (folder / "docs.jsonl").open("rb") as stream:
        wanted = use(stream)
    for opened in (
        files.open_file(f"{BUCKET}/docs.jsonl"),
        files.open_file(epath.Path(f"{BUCKET}/docs.jsonl")),
        files.open_file(f"file://{folder}/docs.jsonl"),
        epath.Path(f"{BUCKET}/docs.jsonl").open("rb"),
    ):
        with opened as stream:
            assert use(stream) == wanted


def test_programs_write_to_a_bucket_what_they_write_to_a_folder(folder: Path) -> None:
    words = ["sudoku", "--source", f"{BUCKET}/csv", "--output", f"{BUCKET}/new/puzzles", "--test", "3"]
    assert build_puzzles(words) == 0
    assert PuzzleDataset.open(f"{BUCKET}/new/puzzles").splits["test"]["groups"] == 3
    words = ["train", f"{BUCKET}/docs.txt", "--output", f"{BUCKET}/new/tokenizer", "--vocab", "300"]
    assert train_tokenizer(words) == 0
    for name in ("tokenizer.json", "token_bytes.npy"):
        assert epath.Path(f"{BUCKET}/new/tokenizer/{name}").read_bytes() == (folder / "tokenizer" / name).read_bytes()


def test_an_object_that_is_replaced_while_it_is_read_is_named(folder: Path, bucket: BucketFileSystem) -> None:
    """Its generation tells."""
    for name, kind, group in (("docs.parquet", ParquetData, "parquet"), ("docs.jsonl", JsonlData, "jsonl")):
        address = f"{BUCKET}/replaced/{name}"
        bucket.put(str(folder / name), address)
        source = open_source(kind(**load_group(f"data/{group}") | {"path": address}), address, "data.path")
        source.read(0)
        bucket.put(str(folder / name), address)
        words = rf"^data\.path: {address} was replaced while the run reads it: generation \d+, first \d+; run it again"
        with pytest.raises(files.RunFileError, match=words):
            source.read(0)


def test_nothing_of_the_trainer_opens_an_address_in_another_way() -> None:
    """`read_bytes` and `read_text` of epath read a whole object, by the same file system."""
    opens = re.compile(r"fsspec\.open|\.open\(\"rb?\"\)|\.open\(\)")
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "trainer").rglob("*.py") if opens.search(path.read_text())}
    local = {"trainer/distributed/fingerprint.py", "trainer/telemetry/metrics.py", "trainer/telemetry/uploads.py"}
    assert found == local


SETTINGS = CheckpointSettings(**load_yaml(CONF / "config.yaml")["checkpoint"])


def test_the_trainer_uses_it_for_all_paths_of_buckets() -> None:
    registry = importlib.import_module("fsspec.registry")
    with (
        mock.patch.dict(registry._registry, clear=True),
        mock.patch.dict(registry.known_implementations),
        mock.patch.dict(fsspec.config.conf, clear=True),
    ):
        files.use_buckets(24)
        assert fsspec.config.conf == {"gs": {"max_outage_hours": 24}, "gcs": {"max_outage_hours": 24}}
        assert {fsspec.get_filesystem_class(scheme) for scheme in ("gs", "gcs")} == {BucketFileSystem}


def refuse(cloud: Any, match: str, times: int) -> None:
    storm = {"kind": "http", "status": 503, "match": match, "times": times}
    cloud.call_ok("POST", "emulator/faults", {"key": f"{match} {times}", "faults": [storm]})


def test_it_outlasts_a_storm(cloud, bucket, monkeypatch):
    monkeypatch.setattr(gcsfs.retry, "min", lambda *_: 0.0, raising=False)  # of the pauses
    refuse(cloud, "POST /upload", 100)
    bucket.pipe(f"{BUCKET}/storm", b"bytes")
    assert bucket.cat(f"{BUCKET}/storm") == b"bytes"
    with pytest.raises(FileNotFoundError):
        bucket.cat(f"{BUCKET}/none")
    refuse(cloud, f"GET .*/{NAME}/o/storm.*", 200)
    patient = BucketFileSystem(max_outage_hours=1.0)
    assert patient.cat(f"{BUCKET}/storm") == b"bytes"
    refuse(cloud, f"GET .*/{NAME}/o/storm.*", 150)
    with pytest.raises(gcsfs.retry.HttpError):
        bucket.cat(f"{BUCKET}/storm")


def steps_of_orbax(address: str) -> Any:
    with ocp.CheckpointManager(address) as manager:
        return manager.all_steps(read=True)


def newest(address: str) -> Any:
    manager = CheckpointManager(address.rpartition("/")[0], SETTINGS)
    found = {manager.latest_step(), manager._newest_complete()} - {None}
    manager.close()
    return found


ASKERS: dict[str, Callable[[str], Any]] = {
    "fsspec": lambda at: fsspec.filesystem("gs").ls(at),
    "fsspec, recursively": lambda at: fsspec.filesystem("gs").find(at),
    "fsspec, a pattern": lambda at: fsspec.url_to_fs(at)[0].glob(f"{at}/*"),
    "epath": lambda at: list(epath.Path(at).iterdir()),
    "epath, a pattern": lambda at: list(epath.Path(at).glob("*.npz")),
    "epath, recursively": lambda at: [names for _, folders, names in epath.Path(at).walk() if folders or names],
    "Orbax, names of steps": lambda at: list(ocp.path.step.standard_name_format().find_all(at)),
    "Orbax, its manager": steps_of_orbax,
    "checkpoints of this run": newest,
    "checkpoints of a run": lambda at: run_weights.checkpoint_steps(epath.Path(at).parent),
    "journal": lambda at: journal._numbers(epath.Path(at)),
    "fingerprint": lambda at: file_fingerprint(at).replace("absent", ""),
}


@pytest.mark.parametrize("ask", ASKERS.values(), ids=ASKERS)
def test_a_folder_is_what_is_in_it_now(cloud, bucket, monkeypatch, ask):
    """It was never there; another attempt writes to it and deletes it, also between two calls of one listing."""
    folder = f"{ask.__name__}-{id(ask)}/checkpoints"
    names = [f"{folder}/5/commit_success.txt", f"{folder}/5/_CHECKPOINT_METADATA", f"{folder}/00000005.npz"]
    assert not ask(f"{BUCKET}/{folder}")
    for name in names:
        path = f"upload/storage/v1/b/{NAME}/o?uploadType=media&name={name.replace('/', '%2F')}"
        cloud.call_ok("POST", path, {})
    assert ask(f"{BUCKET}/{folder}")
    for name in names:
        cloud.call_ok("DELETE", f"storage/v1/b/{NAME}/o/{name.replace('/', '%2F')}")
    assert not ask(f"{BUCKET}/{folder}")
    monkeypatch.setattr(backend.fsspec_backend, "exists", lambda _: True)
    assert not ask(f"{BUCKET}/{folder}")


@pytest.mark.parametrize("at", ["gs://absent", "gs://absent/folder"])
def test_a_bucket_that_is_not_there_is_named(bucket, at):
    with pytest.raises(FileNotFoundError, match="absent"):
        bucket.ls(at)
    with pytest.raises(FileNotFoundError, match="absent"):
        list(epath.Path(at).iterdir())
