"""Absent files and objects are named with their key and with what is there instead."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from controller.checks.inputs import files
from controller.context import Context
from controller.core.finding import Check
from controller.gcp.errors import ForbiddenError, NotFoundError
from tests.controller.checks.plans import config

OFFLINE: tuple[Check[...], ...] = (files.files_exist_here, files.validation_has_data)
LIVE: tuple[Check[...], ...] = (files.objects_exist, files.validation_has_objects)
LM = ("cloud.project=acme", "model=tiny", "loop=lm", "optimizer=adamw", "loop.seq_len=1024")
TEXT = (*LM, "data=text", "data.tokenizer=bytes")
JSONL = (*LM, "data=jsonl", "data.tokenizer=bytes")


class Buckets:
    """Cloud Storage by hand: object sizes by `BUCKET/NAME`."""

    def __init__(self, **buckets: dict[str, int]) -> None:
        self.buckets, self.refused = buckets, set[str]()

    def call(self, api: str, method: str, *, bucket: str, prefix: str, **rest: Any) -> dict[str, Any]:
        assert (api, method) == ("storage", "objects.list")
        if bucket in self.refused:
            raise ForbiddenError("list", 403, "forbidden", "no storage.objects.list")
        if bucket not in self.buckets:
            raise NotFoundError("list", 404, "notFound", "no such bucket")
        found = {name: size for name, size in self.buckets[bucket].items() if name.startswith(prefix)}
        if rest.get("delimiter") != "/":
            return {"items": [{"name": name, "size": str(size)} for name, size in found.items()]}
        here = {name for name in found if "/" not in name[len(prefix) :]}
        below = {prefix + name[len(prefix) :].partition("/")[0] + "/" for name in found if name not in here}
        return {"items": [{"name": name} for name in here], "prefixes": sorted(below)}

    def list_all(self, api: str, method: str, items: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        yield from self.call(api, method, **parameters).get(items, [])


def offline(*overrides: str) -> list[str]:
    return [f"{f.check}: {f.severity} {f}" for check in OFFLINE for f in check(config(*overrides))]


def live(google: Buckets, *overrides: str) -> list[str]:
    context = cast(Context, type("Fake", (), {"google": google}))
    return [f"{f.check}: {f.severity} {f}" for check in LIVE for f in check(config(*overrides), context)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in {"train/a.jsonl": 9000, "train/b.jsonl": 9000, "val/a.jsonl": 900, "tokenizer.json": 9}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    return tmp_path


def asset(folder: Path) -> str:
    return f"+assets.datasets.mine.path={folder}"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.path=assets://mine/train/*.jsonl", None),
        ("data.path=assets://mine/**/a.jsonl", None),
        ("data.path=assets://mine/*.jsonl", "file_absent: error data.path: assets://mine/*.jsonl: no file matches"),
        ("data.path=assets://mine/train/*.parquet", "file_absent: error data.path: assets://mine/train/*.parquet: no"),
        ("data.path=assets://mine/train", "file_absent: error data.path: assets://mine/train: is a folder; name the"),
        ("data.tokenizer=assets://mine/tokeniser.json", "file_absent: error data.tokenizer: assets://mine/tokeniser.j"),
        ("model.weights=assets://mine/train", "file_absent: error model.weights: assets://mine/train: has neither"),
        ("model.weights=assets://mine/gemma", "file_absent: error model.weights: assets://mine/gemma: there is no"),
    ],
)
def test_a_name_must_match_a_file_of_its_asset(folder: Path, override: str, said: str | None) -> None:
    found = offline(*JSONL, "data.path=assets://mine/train/*.jsonl", asset(folder), override)
    assert found == [] if said is None else found[0].startswith(said), found


def test_names_of_downloads_are_known_before_they_are_there() -> None:
    found = offline("+experiment=lm_tinyshakespeare", "data.path=assets://text/shakespeare.txt", "data.packing=stream")
    assert found[0] == (
        "file_absent: error data.path: assets://text/shakespeare.txt: no file matches it; there are tinyshakespeare.txt"
    )
    assert offline("+experiment=lm_tinyshakespeare") == []
    assert offline("+experiment=gemma2b_gsm8k", "cloud.project=acme") == []  # the weights are made by a command


def test_emulated_workers_read_files_of_this_machine(folder: Path) -> None:
    local = [*JSONL, "cloud=local"]
    assert offline(*local, f"data.path={folder}/train/*.jsonl") == []
    [error] = offline(*local, f"data.path={folder}/train/c.jsonl")
    assert error.endswith(("there are a.jsonl, b.jsonl", "there are b.jsonl, a.jsonl"))
    assert offline(*JSONL, "data.path=/mnt/data/c.jsonl") == []  # only the workers know


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.path=gs://acme/train/*.jsonl", None),
        ("data.path=gs://acme/train/*.parquet", "object_absent: error data.path: gs://acme/train/*.parquet: no"),
        ("data.path=gs://acme/train/a.json", "object_absent: error data.path: gs://acme/train/a.json: no object"),
        ("data.path=gs://acme/trian/deep/*.jsonl", "object_absent: error data.path: gs://acme/trian/deep/*.jsonl: no"),
        ("data.path=gs://acme/train", "object_absent: error data.path: gs://acme/train: is a folder; name the files"),
        ("data.path=gs://ecma/a", "object_absent: error data.path: gs://ecma/a: there is no bucket ecma"),
        ("data.path=gs://theirs/a", "object_absent: warning data.path: gs://theirs/a was not checked: you may not"),
        ("model.weights=gs://acme/gemma", None),
        ("model.weights=gs://acme/gema", "object_absent: error model.weights: gs://acme/gema: no folder matches it;"),
        ("model.weights=gs://acme/train", "object_absent: error model.weights: gs://acme/train: has neither"),
    ],
)
def test_a_name_must_match_an_object_of_its_bucket(override: str, said: str | None) -> None:
    objects = {"train/a.jsonl": 9, "train/b.jsonl": 9, "gemma/config.json": 9, "gemma/model.safetensors": 9}
    google = Buckets(acme=objects, theirs={})
    google.refused = {"theirs"}
    found = live(google, *JSONL, "data.path=gs://acme/train/a.jsonl", override)
    assert found == [] if said is None else found[0].startswith(said), found


def test_a_part_is_left_for_validation(folder: Path) -> None:
    text = (*TEXT, asset(folder), "data.path=assets://mine/train/*.jsonl", "data.packing=windows")
    assert offline(*text) == []
    [short] = offline(*text, "data.eval_fraction=0.05")
    assert short == (
        "validation: error data.eval_fraction: 0.05 of 18000 bytes are at most 900 tokens for validation, and "
        "loop.seq_len + 1 = 1025 are required; raise it, or set data.eval_path"
    )
    documents = (*text, "data.packing=documents", "data.separator=null")
    assert offline(*documents)[0].startswith("validation: warning data.eval_fraction: 0.1 of 2 documents, one per file")
    [single] = offline(*documents, "data.path=assets://mine/train/a.jsonl")
    assert single.startswith("validation: error data.eval_fraction: a single document cannot be divided; set data.sep")
    [same] = offline(*text, "data.eval_path=${data.path}", "data.eval_fraction=0")
    assert same.startswith("validation: warning data.eval_path: names the training data, so evaluations measure memory")


def test_a_part_of_a_bucket_is_left_for_validation() -> None:
    google = Buckets(acme={"a.txt": 9000})
    text = (*TEXT, "data.path=gs://acme/*.txt", "data.packing=windows")
    assert live(google, *text, "data.eval_fraction=0.5") == []
    assert live(google, *text)[0].startswith("validation_objects: error data.eval_fraction: 0.1 of 9000 bytes are at m")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.validation_path=gs://b/test.jsonl"], []),
        (
            ["data.validation_path=gs://b/test.jsonl", "checkpoint.best={metric: eval_accuracy, mode: max}"],
            [
                "validation: warning data.validation_path: names the test's questions, by which checkpoint.best would "
                "choose; use null, or other questions"
            ],
        ),
        (["checkpoint.best={metric: eval_accuracy, mode: max}"], []),
        (
            ["data.validation_path=gs://b/train.jsonl"],
            [
                "validation: warning data.validation_path: names the training data, so evaluations measure memory; use "
                "null"
            ],
        ),
    ],
)
def test_the_best_checkpoint_is_not_chosen_by_the_tests_questions(overrides: list[str], said: list[str]) -> None:
    grpo = ("cloud.project=acme", "model=tiny", "loop=grpo", "optimizer=adamw", "data=gsm8k")
    paths = ("data.path=gs://b/train.jsonl", "data.eval_path=gs://b/test.jsonl")
    assert offline(*grpo, *paths, *overrides) == said
