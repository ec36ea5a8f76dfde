"""What files of inputs hold, before a pod is billed for them: rows, and each file that an index of weights names."""

from pathlib import Path

import pytest

from controller.checks.input_files import files_exist_here
from controller.checks.input_first_row import first_rows_have_the_columns
from tests.composed import config_of

LINES = (
    "cloud.project=acme",
    "model=tiny",
    "loop=lm",
    "optimizer=adamw",
    "data=jsonl",
    "data.path=assets://mine/a.jsonl",
)


def issues(rows: Path, *overrides: str) -> list[str]:
    made = config_of(*LINES, *overrides, f"+assets.datasets.mine.path={rows}")
    return [str(issue) for issue in first_rows_have_the_columns(made)]


def test_data_without_rows_are_an_error(tmp_path: Path) -> None:
    for text in ("", "\n \n"):
        (tmp_path / "a.jsonl").write_text(text)
        assert issues(tmp_path) == ["data.path: assets://mine/a.jsonl has no rows"]
        assert issues(tmp_path, "data=text") == ["data.path: assets://mine/a.jsonl is empty"]
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n')
    assert issues(tmp_path, "data.path=assets://mine/*.jsonl") == []
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "c.parquet")
    [none] = issues(tmp_path, "data=parquet", "data.path=assets://mine/c.parquet")
    assert none.endswith("c.parquet: has no rows")


def test_what_is_no_json_line_is_told_apart(tmp_path: Path) -> None:
    for text, said in {
        "[\n {}\n]": "character 2 of the line; the file is one JSON list: write one object a line",
        '{\n"text": 1}': "write each object in one line",
        "{'text': 'a'}": "JSON has double quotes",
        "text,label\na,b\n": "character 0 of the line; it looks like CSV: write one JSON object a line",
    }.items():
        (tmp_path / "a.jsonl").write_text(text)
        [found] = issues(tmp_path)
        assert said in found


@pytest.mark.parametrize(
    ("later", "said"),
    [
        ('{"text": ', "line 3 is not JSON"),
        ('["b"]', "line 3 is not an object with columns"),
        ('{"txt": "b"}', "line 3 has no column 'text', which the first row has"),
    ],
)
def test_a_later_line_that_is_no_row_is_told(tmp_path: Path, later: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n\n{later}\n{{"text": "c"}}\n')
    [found] = issues(tmp_path)
    assert said in found
    assert issues(tmp_path, "data.on_bad_line=skip") == []


EMPTY = b"\2\0\0\0\0\0\0\0{}"
"""A file of safetensors without a tensor."""
MODEL = ("cloud.project=acme", "model=tiny", "loop=lm", "optimizer=adamw", "data=text", "data.path=/none")


@pytest.mark.parametrize(
    ("index", "there", "said"),
    [
        ('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}', "1 2", None),
        ('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}', "1", "the shard 2.safetensors, which model.s"),
        ('{"weight_map": {"a": "1.safetensors"}}', "", "the shard 1.safetensors, which model.safetensors.index.json"),
        ('{"weight_map": {"a": "1.safetensors"}}', "model", None),  # of an earlier form, which is not read
        ('{"weight_map": {"a": "model.safetensors"}}', "model", None),
        ('{"weight_map": {"a": "1.safetensors"}}', "model 1", "has model.safetensors and 1.safetensors; remove what"),
        ('{"weight_map": ["1.safetensors"]}', "1", "model.safetensors.index.json is not an index of shards"),
        ('{"weight_map": {"a": 3}}', "1", "model.safetensors.index.json is not an index of shards"),
        ("not json", "1", "model.safetensors.index.json is not an index of shards"),
    ],
)
@pytest.mark.parametrize("place", ["asset", "machine"])
def test_every_shard_that_an_index_names_is_there(
    tmp_path: Path, place: str, index: str, there: str, said: str
) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    for name in ("config.json", *(f"{stem}.safetensors" for stem in there.split())):
        (weights / name).write_bytes(EMPTY)
    (weights / "model.safetensors.index.json").write_text(index)
    value = "assets://mine/weights/" if place == "asset" else str(weights)
    where = () if place == "asset" else ("cloud=local",)
    words = (*MODEL, *where, f"+assets.models.mine.path={tmp_path}", f"model.weights={value}")
    found = [str(issue) for issue in files_exist_here(config_of(*words)) if issue.key == "model.weights"]
    problem = [] if said is None else [f"model.weights: {value}: {said}"]
    assert [line[: len(begin)] for line, begin in zip(found, problem, strict=True)] == problem


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", EMPTY, None),
        ("model.yaml", b"", None),
        ("model.safetensors", b"x", "model.safetensors has 1 byte, and its head needs more; download it again"),
        ("model.safetensors", EMPTY[:-1], "model.safetensors has 9 bytes, and its head needs more; download it again"),
        ("model.safetensors", POINTER, "model.safetensors stands for a larger file, which was not fetched; run `git"),
        ("adapter_model.safetensors", POINTER, "adapter_model.safetensors stands for a larger file, which was not"),
        (
            "pytorch_model.bin",
            b"x",
            "has no safetensors; it has pytorch_model.bin; save it with save_pretr",
        ),
    ],
)
@pytest.mark.parametrize("place", ["asset", "machine"])
def test_weights_that_are_none_are_found(tmp_path: Path, place: str, name: str, content: bytes, said: str) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "config.json").write_bytes(b"{}")
    (tmp_path / "w" / name).write_bytes(content)
    value = "assets://mine/w" if place == "asset" else f"{tmp_path}/w"
    words = (*MODEL, "cloud=local", f"+assets.models.mine.path={tmp_path}", f"model.weights={value}")
    found = [str(issue) for issue in files_exist_here(config_of(*words)) if issue.key == "model.weights"]
    wanted = [f"model.weights: {value}: {said}"] if said else []
    assert [line[: len(begin)] for line, begin in zip(found, wanted, strict=True)] == wanted
