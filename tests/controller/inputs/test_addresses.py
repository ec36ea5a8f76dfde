"""Addresses of data, tokenizers and weights: what the workers cannot read, and what was meant."""

from pathlib import Path

import pytest

from controller.inputs.addresses import address_problem, how_to_ship

KEYS = {"data": "data.path", "tokenizer": "data.tokenizer", "weights": "model.weights"}
SOURCE = "assets.datasets.mine.source=hf://datasets"
TOKENIZER = "assets.tokenizers.t.source=hf://"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tok").mkdir()
    (tmp_path / "own" / "data").mkdir(parents=True)
    (tmp_path / "train.jsonl").touch()


@pytest.mark.parametrize(
    ("what", "value", "said"),
    [
        ("data", "gs://b/a.jsonl", ""),
        ("data", "assets://mine/*.jsonl", ""),
        ("data", "own/data", "own/data is a folder; name the files in it, e.g. own/data/*"),
        ("data", "odd:name.jsonl", ""),
        ("data", "https://example.com/a.jsonl", "'assets.datasets.mine.files={a.jsonl: {url: https://example.com/a.jso"),
        ("data", "s3://b/a.jsonl", "s3:// is not read; use gs://…, or an asset: assets.datasets.mine.source=hf://data"),
        ("data", "hf://datasets/a/b", f"{SOURCE}/a/b data.path=assets://mine/FILE"),
        ("data", "https://huggingface.co/datasets/a/b/resolve/main/x/t.jsonl", f"{SOURCE}/a/b/x/t.jsonl data.path=ass"),
        ("data", "https://storage.googleapis.com/b/t.jsonl", "https:// is not read; write gs://b/t.jsonl"),
        ("data", "openai/gsm8k", f"if it is on the Hub: {SOURCE}/openai/gsm8k data.path=assets://mine/FILE"),
        ("data", "gs:/b/a.jsonl", "write gs://b/a.jsonl"),
        ("data", "GS://b/a.jsonl", "write gs://b/a.jsonl"),
        ("data", "asset://mine/a.jsonl", "write assets://mine/a.jsonl"),
        ("data", "gs:///a.jsonl", "names no bucket"),
        ("data", "gs://b/", "is a whole bucket"),
        ("data", "file:///d/a.jsonl", "write the path alone: /d/a.jsonl"),
        ("data", r"C:\data\a.jsonl", "is a path of Windows"),
        ("data", " a.jsonl", "has blanks around it"),
        ("data", "a.jsonl,b.jsonl", "is one path; * and ** match several files"),
        ("data", "gs://b/a.csv", "data.kind=jsonl does not read this format"),
        ("data", "gs://b/a.parquet", "is Parquet by its name; set data=parquet"),
        ("tokenizer", "gs://b/tokenizer.json", ""),
        ("tokenizer", "gpt2", f"characters or a tokenizer.json; if it is on the Hub: {TOKENIZER}OWNER/g"),
        ("tokenizer", "byte", "byte does not exist here; did you mean bytes?"),
        ("tokenizer", "Bytes", "did you mean bytes?"),
        ("tokenizer", "char", "did you mean characters?"),
        ("tokenizer", "charcters", "did you mean characters?"),
        ("tokenizer", "byt5", f"if it is on the Hub: {TOKENIZER}OWNER/byt5"),
        ("tokenizer", "Qwen/Qwen3-0.6B", f"{TOKENIZER}Qwen/Qwen3-0.6B/tokenizer.json data.tokenizer=assets://t/tokeni"),
        ("tokenizer", "hf://Qwen/Qwen3-0.6B", f"{TOKENIZER}Qwen/Qwen3-0.6B/tokenizer.json data.tokenizer=assets://t/"),
        ("tokenizer", "t.model", "is none of bytes, characters or a tokenizer.json"),
        ("tokenizer", "gs://b/vocab.txt", "is none of bytes, characters or a tokenizer.json"),
        ("tokenizer", "assets://t/tokenizer_config.json", "is not the tokenizer; name the tokenizer.json beside it"),
        ("tokenizer", "tok", "is a folder; name the file in it: tok/tokenizer.json"),
        ("tokenizer", "assets://t", "if it is a folder, name assets://t/tokenizer.json"),
        ("weights", "run:abc", ""),
        ("weights", "google/gemma-2-2b", "if it is on the Hub: model.weights=hf://google/gemma-2-2b"),
        ("weights", "https://huggingface.co/google/gemma-2-2b", "model.weights=hf://google/gemma-2-2b"),
        ("weights", "https://huggingface.co/google/gemma-2-2b/", "model.weights=hf://google/gemma-2-2b"),
        ("weights", "hf:/google/gemma-2-2b@main", "model.weights=hf://google/gemma-2-2b"),
        ("weights", "gs://b/m/model.safetensors", "is a file, and weights are a folder: gs://b/m"),
        ("weights", "s3://b/m", "s3:// is not read"),
    ],
)  # fmt: skip
def test_what_the_workers_cannot_read_is_named_with_what_to_write(what: str, value: str, said: str) -> None:
    found = address_problem(value, KEYS[what], what, "jsonl")  # pyright: ignore[reportArgumentType]
    assert (found is not None) == bool(said), found
    assert found is None or said in found.message


def test_a_file_is_shipped_if_it_is_here() -> None:
    assert how_to_ship("train.jsonl", "data.path", "data").endswith(
        "make it an asset: assets.datasets.mine.path=train.jsonl data.path=assets://mine/train.jsonl"
    )
    said = how_to_ship("trian.jsonl", "data.path", "data")
    assert said.startswith("trian.jsonl does not exist on the workers, nor here; . has train.jsonl; ")
    assert said.endswith("make one an asset: assets.datasets.mine.path=train.jsonl data.path=assets://mine/train.jsonl")
    assert "assets.datasets.mine.path=own/data data.path=assets://mine/data" in how_to_ship(
        "own/dta", "data.path", "data"
    )
    said = how_to_ship("quickstart-f9ce2387", "model.weights", "weights")
    assert said.endswith("the weights of a run are model.weights=run:quickstart-f9ce2387")
    said = how_to_ship("hf", "model.weights", "weights")
    assert said.endswith("; if it is on the Hub: model.weights=hf://OWNER/NAME")
    said = how_to_ship("gemma-2-2b", "loop.teacher.weights", "weights")
    assert said.endswith(
        "on the Hub: assets.models.mine.source=hf://OWNER/gemma-2-2b loop.teacher.weights=assets://mine"
    )
    assert how_to_ship("ownn", "model.weights", "weights").endswith(
        "assets.models.mine.path=own model.weights=assets://mine"
    )
    assert how_to_ship("none/x", "data.path", "data").endswith("mine.path=FILE data.path=assets://mine/FILE")
    assert how_to_ship("own", "loop.teacher.weights", "weights").endswith("loop.teacher.weights=assets://mine")
