"""Objects of a bucket with adversarial names and contents: none is executed, written outside, or blocks the rest."""

import io
import json
import os
import subprocess
import sys
import unicodedata
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from etils import epath

from conf.formats import RunFileError
from conf.schema.training import run_yaml
from controller.cli.verbs import results
from controller.core.errors import SlipwayError
from controller.core.this_process import Clock
from controller.lease_store import BucketLeaseStore
from controller.multirun.jobs import fetch_output, output_object
from controller.records import index
from controller.records.fetch import choose_step
from controller.records.ledger import Launch, Ledger, Result, parse_record, read_alerts
from controller.records.recorder import _with_pinned, read_run_record
from controller.report.gather import gather_runs
from controller.resources import deletions
from controller.resources.pod import capacity_log
from controller.resources.uploads.archives import Wheels
from controller.resources.uploads.source_assets import PINNED, SourceCopy
from controller.run.launch import PodQueue
from controller.sweep.sweep_session import load_assignments
from tests.adversarial import CANARY, changed, contents, names, payload
from tests.fakes.google import MemoryStorage
from tests.fakes.sessions import open_results_of
from tests.golden import golden
from trainer.corpus.source import LineError, parse_json
from trainer.pretrained.integrity import read_checksums

RUN = "q-0123abcd"
GOOD = {
    "metrics.jsonl": b'{"step": 1}\n', "logs/worker-0.log": b"hello\n", "checkpoints/4/state/_METADATA": b"{}",
    "tb/events.out.tfevents.1.a.0": b"\0", "a b/\xe9\xe8 (1).txt": b"x", ".hydra/config.yaml": b"a: 1\n",
}  # fmt: skip
"""What a program writes."""
OBEYED_PARTS = (
    ".git",
    ".hg",
    ".svn",
    ".envrc",
    ".vscode",
    ".idea",
    ".python-version",
    "conftest.py",
    "sitecustomize.py",
)


def get(folder: Path, objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run `slipway get` of a run with these objects into a folder, and return its exit code."""
    open_results_of(RUN, objects, monkeypatch)
    options = SimpleNamespace(showing=lambda _: nullcontext(), state_dir=folder.parent / "state")
    flags = Namespace(run=RUN, path=None, to=str(folder), list=False, json=True)
    return results.run_get(cast(Any, SimpleNamespace(options=options, flags=flags)))


def files_of(folder: Path) -> dict[str, bytes]:
    found = (Path(where) / name for where, _, names in os.walk(folder) for name in names)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def as_others_see(part: str) -> str:
    """A name as file systems compare it that ignore case, forms of Unicode, streams, and dots and spaces at its end."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", part) if unicodedata.category(c) != "Cf")
    return plain.casefold().partition(":")[0].rstrip(". ")


def test_no_name_is_obeyed_leads_out_or_blocks_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = names()
    assert len(hostile) >= 200
    assert len(set(hostile.values())) >= 7
    folder = tmp_path / "above/got"
    folder.parent.mkdir()
    assert get(folder, {name: payload(name) for name in hostile} | GOOD, monkeypatch) == 1, "what is skipped is told"
    written = files_of(folder)
    written.pop(".gitignore", None)  # our own
    assert {name: written.get(name) for name in GOOD} == GOOD
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_relative_to(folder)} == {
        "above"
    }
    obeyed = [name for name in written if any(as_others_see(part) in OBEYED_PARTS for part in name.split("/"))]
    assert obeyed == []
    assert [name for name in written if not name.isprintable() or len(name.encode()) > 4000] == []
    said = json.loads(capsys.readouterr().out)
    assert sorted(said["files"]) == sorted(written), "what was written is what is told"
    home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    for words in (
        ["git", "status"],
        [sys.executable, "-c", "import json, random"],
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        ["bash", "-lic", "true"],
    ):
        subprocess.run(
            words, cwd=folder, env=home, capture_output=True, check=False, timeout=400, stdin=subprocess.DEVNULL
        )
    assert list(tmp_path.rglob(CANARY)) == []


def test_one_such_object_never_blocks_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(names()):
        folder = tmp_path / f"{number}/got"
        folder.parent.mkdir()
        assert get(folder, {name: payload(name), "metrics.jsonl": b"{}"}, monkeypatch) in (0, 1), name
        assert (folder / "metrics.jsonl").read_bytes() == b"{}", name
        assert [path.name for path in folder.parent.iterdir()] == ["got"], name


def test_two_names_of_one_file_are_told_and_the_first_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link stands for a disk on which names that differ in case, or in the form of their letters, are the same."""
    folder = tmp_path / "got"
    for one, other in (("A", "a"), ("\u00e9", "e\u0301"), ("Logs", "LOGS")):
        (folder / one).mkdir(parents=True)
        (folder / other).symlink_to(one)
    objects = {f"{name}/x": name.encode() for name in ("A", "a", "\u00e9", "e\u0301", "Logs", "LOGS")}
    for _ in range(2):
        assert get(folder, objects | {"z": b"z"}, monkeypatch) == 1
        said = json.loads(capsys.readouterr().out)
        assert [row["why"].partition(" as ")[0] for row in said["skipped"]] == ["is the same file"] * 3
        assert sorted(said["files"]) == ["A/x", "Logs/x", "z", "\u00e9/x"]
        assert {name: (folder / name).read_bytes() for name in said["files"]} == {
            name: (objects | {"z": b"z"})[name] for name in said["files"]
        }


def storage(**objects: bytes) -> MemoryStorage:
    return MemoryStorage(b={name.replace("__", "/"): content for name, content in objects.items()})


def of_metadata(key: str, content: bytes) -> Any:
    """A bucket whose object has this text as custom metadata, which is Unicode."""
    described = {"name": f"index/{RUN}.json", "metadata": {key: content.decode(errors="replace")}}
    facts = described | {"generation": "1", "updated": "2026-01-01T00:00:00.000Z"}
    return SimpleNamespace(object_metadata=lambda *_: (facts, 0.0), objects=lambda *_: [facts])


def read_scores(content: bytes) -> Any:
    prefix = f"runs/{RUN}"
    made = MemoryStorage(b={f"{prefix}/checkpoints/4/commit_success.txt": b"", f"{prefix}/scores.json": content})
    return choose_step(made, "b", RUN, "best", "--best")


def read_report(content: bytes) -> Any:
    try:
        row = json.loads(content)
    except (ValueError, RecursionError):
        row = {}
    row = (row if isinstance(row, dict) else {"metrics": row}) | {"run": RUN}
    return gather_runs([row], lambda run, name: [io.BytesIO(content), io.BytesIO(content)])


def read_queue(content: bytes) -> Any:
    made = storage(pods__p__waiting__a=content)
    made.object_metadata = lambda *_: ({"updated": "2026-01-01T00:00:00.000Z"}, 1767225600.0)  # type: ignore[method-assign]
    return PodQueue(made, Clock(), "b", "p").waiting_runs()


def read_file(read: Callable[[Path], Any], name: str = "file") -> Callable[[bytes], Any]:
    def act(content: bytes) -> Any:
        file = Path(name)
        file.write_bytes(content)
        return read(file)

    return act


def read_pinned(content: bytes) -> Any:
    copy = SourceCopy(
        storage(**{f"a__{PINNED}": content}), "b", "a", "gs://x/y", Path("w"), cast(Any, None), cast(Any, None)
    )
    return copy.pin().source_files()


def read_assignments(content: bytes) -> Any:
    return load_assignments(storage(sweeps__s__pods__1=content), "b", "s")


def read_output(content: bytes) -> Any:
    return fetch_output(MemoryStorage(b={output_object(RUN): content}), "b", RUN, Path("output"), 100.0)


def read_object_of_ledger(content: bytes) -> Any:
    return read_alerts(Ledger(MemoryStorage(b={f"runs/{RUN}/alerts.json": content}), "b", RUN))


def read_wheels(content: bytes) -> Any:
    made = Wheels(name="w", bucket="b", python="3.11", lines=())
    return made.observe(cast(Any, SimpleNamespace(google=MemoryStorage(b={"wheels/w/manifest.json": content}))), {})


def read_source(name: str) -> Callable[[bytes], Any]:
    """What the record of a run keeps of an asset with a source, out of `source.json` and `manifest.json`."""

    def read(content: bytes) -> Any:
        objects = {"p/source.json": b'{"format": 1, "revision": ""}', "p/manifest.json": b"{}", f"p/{name}": content}
        plan = SimpleNamespace(bucket="b", assets=[SimpleNamespace(identity="i", prefix="p")])
        return _with_pinned({"source": "gs://x", "identity": "i"}, cast(Any, plan), cast(Any, MemoryStorage(b=objects)))

    return read


RECORDED = golden("record")["run"]
SOURCE_FILE = {"name": "a", "path": "a", "size": 1, "sha256": "", "blob": "1"}
READERS: dict[str, tuple[Any, Callable[[bytes], Any]]] = {
    "launch": (golden("launch"), lambda content: parse_record(content, Launch.from_json, "launch")),
    "result": (golden("result"), lambda content: parse_record(content, Result.from_json, "result")),
    "record": (golden("record"), lambda content: read_run_record(content, "record", RECORDED, "lab-slipway")),
    "lease": (golden("lease"), lambda content: BucketLeaseStore(of_metadata("lease", content), "b", "p").read()),
    "row": (golden("row"), lambda content: index.list_published_rows(of_metadata("row", content), "b")),
    "alerts": (golden("alerts"), read_object_of_ledger),
    "scores": ({"format": 1, "metric": "m", "mode": "min", "best": 4, "scores": {"4": 0.5}}, read_scores),
    "assignment": ({"format": 1, "pod": 1, "run": RUN}, read_assignments),
    "capacity": (golden("capacity"), lambda content: capacity_log._parse(content)),
    "deletion": (golden("deletion"), lambda content: deletions._parse(content, "here", [])),
    "queue": ({"format": 1, "run_id": RUN, "since": 1.0}, read_queue),
    "source": ({"format": 1, "source": "gs://x/y", "revision": "", "files": [SOURCE_FILE]}, read_pinned),
    "report": (golden("row") | {"step": 1, "time": "2026-01-01T00:00:00Z", "loss": 0.5}, read_report),
    "wheels": ({"format": 1, "wheels": [{"name": "a.whl"}]}, read_wheels),
    "source.json": ({"format": 1, "revision": "1"}, read_source("source.json")),
    "manifest.json": ({"a": "0" * 64, "b": "md5:x"}, read_source("manifest.json")),
    "output of a job": (None, read_output),
    "row of data": ({"question": "1+1", "answer": "2"}, parse_json),
    "run.yaml": (None, read_file(run_yaml.load, "run.yaml")),
    "checksums": ({"format": 1, "checksums": {"a": 1}}, read_file(lambda file: read_checksums(epath.Path(file)))),
}  # fmt: skip
"""A document as Slipway writes it, and what reads it out of a bucket or a run's folder."""


def tried_on(reader: str) -> list[tuple[str, bytes]]:
    """What each reader gets: what is no document, and its own document with each value changed."""
    return [*contents().items(), *changed(READERS[reader][0])]


@pytest.mark.parametrize("reader", READERS)
def test_whatever_an_object_holds_its_reader_returns_or_says_in_one_line(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (inside := tmp_path / "in").mkdir()
    monkeypatch.chdir(inside)
    document, read = READERS[reader]
    if document is not None:
        read(json.dumps(document).encode())
    tried = tried_on(reader)
    assert len(tried) >= 100
    told: dict[str, str] = {}
    for kind, content in tried:
        try:
            read(content)
        except (SlipwayError, RunFileError, LineError, UnicodeDecodeError) as error:  # the last: of a row, by name
            told[kind] = str(error)
        except Exception as error:
            raise AssertionError(f"{kind}: {type(error).__name__}: {str(error)[:200]}") from error
    assert [kind for kind, text in told.items() if len(text) > 20_000 or ("\n" in text and reader != "run.yaml")] == []
    assert [path for path in tmp_path.rglob(CANARY) if path.is_file() and path.parent != inside / "output"] == []
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_over_a_thousand_contents_are_tried() -> None:
    assert len({content for reader in READERS for _, content in tried_on(reader)}) >= 1000
