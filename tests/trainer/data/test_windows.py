"""Random windows of a text: a function of (seed, step), with targets one ahead."""

import itertools
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import TypeAdapter

from conf.formats import RunFileError
from conf.schema.training.data import Data, TextData
from conf.schema.training.loop import LmLoop
from tests.groups import CONF, load_group
from tests.paths import ROOT
from trainer.data import batches
from trainer.tokenizer.loading import ByteTokenizer


def text_data(path, fraction=0.25, **keys) -> TextData:
    return TextData(**load_group("data/text") | {"path": str(path), "eval_fraction": fraction} | keys)


@pytest.fixture
def corpus(tmp_path) -> batches.TextSplits:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)))
    return batches.load_text(text_data(path), ByteTokenizer())


def test_the_end_is_kept_for_validation_which_may_have_files_of_its_own(corpus, tmp_path):
    assert (len(corpus.train), len(corpus.validation)) == (75, 25)
    assert corpus.validation[0] == 75
    for name, size in {"a.txt": 20, "b.txt": 30, "other": 40}.items():
        (tmp_path / name).write_bytes(b"x" * size)
    data = text_data(tmp_path / "*.txt", fraction=0, eval_path=str(tmp_path / "other"))
    loaded = batches.load_text(data, ByteTokenizer())
    assert (len(loaded.train), len(loaded.validation)) == (50, 40)


def test_a_batch_is_a_function_of_seed_and_step(corpus):
    first, again, later, other = (
        batches.train_batch(corpus, *at, 4, 10, range(4))["tokens"] for at in [(1, 2), (1, 2), (1, 3), (2, 2)]
    )
    np.testing.assert_array_equal(first, again)
    assert (first != later).any()
    assert (first != other).any()


def test_targets_are_the_next_tokens_and_every_window_occurs(corpus):
    batch = batches.train_batch(corpus, 0, 0, 1000, 10, range(1000))
    assert batch["tokens"].shape == batch["targets"].shape == (1000, 10)
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    assert (batch["tokens"].min(), batch["targets"].max()) == (0, 74)


def test_every_validation_token_is_a_target_once(corpus):
    found = [batches.validation_batch(corpus, i, 2, 10, range(2)) for i in range(3)]
    counted = [int(t) for b in found for t, w in zip(b["targets"].flat, b["weights"].flat, strict=True) if w]
    assert counted == list(range(76, 100))
    assert found[2]["weights"].sum() == 0  # past the end


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        (b"x" * 12, r"10 tokens for train; loop.seq_len \+ 1"),
        (b"x" * 20, "4 tokens for validation"),
        (b"x" * 20 + b"\xff" + b"x" * 20, r"is not UTF-8 \(invalid start byte at byte 20\)"),
    ],
)
def test_bad_files(tmp_path, content, words):
    path = tmp_path / "text"
    if content:
        path.write_bytes(content)
    with pytest.raises(RunFileError, match=rf"data\.path: .*{words}"):
        batches.load_text(text_data(path, fraction=0.2), ByteTokenizer()).check_length(10)


STAND_INS = ROOT / "controller" / "rehearsal" / "standins" / "assets"


def tiny(name: str) -> Any:
    """The data of a group under scale=tiny, with the generated files where they lie."""
    keys = load_group(f"data/{name}") | yaml.safe_load((CONF / f"scale/data/tiny_{name}.yaml").read_text())["data"]
    local = {k: v.replace("assets://", f"{STAND_INS}/") for k, v in keys.items() if isinstance(v, str)}
    return TypeAdapter(Data).validate_python(keys | local)


@pytest.mark.parametrize(
    ("name", "packing"),
    [("text", "windows"), *itertools.product(["text", "jsonl", "parquet", "sft_gsm8k"], ["stream", "documents"])],
)
def test_every_kind_trains_and_evaluates(name, packing):
    data = tiny(name).model_copy(update={"packing": packing})
    loop = LmLoop(**load_group("loop/lm") | {"total_batch_tokens": 1024, "seq_len": 32, "eval_batches": 1})
    stream = batches.Dataset(data).train_batches(loop, 0, range(loop.rows))
    for _ in range(4):
        assert next(stream)["weights"].any()
    stream.close()
    assert batches.Dataset(data).validation_batches(loop, range(loop.rows))[0]["weights"].any()
    batches.Dataset(data).check_vocab_size(512)


def test_rows_do_not_depend_on_who_holds_them_and_a_position_restores_the_next(tmp_path):
    loop = LmLoop(**load_group("loop/lm") | {"total_batch_tokens": 80, "seq_len": 10, "eval_batches": 2})
    (tmp_path / "text").write_bytes(bytes(range(100)) * 2)
    found = batches.Dataset(text_data(tmp_path / "text", fraction=0.5))
    stream, again = (found.train_batches(loop, 1, range(8)) for _ in range(2))
    whole, position, after = next(stream), stream.position(), next(stream)
    parts = [next(found.train_batches(loop, 1, rows)) for rows in (range(4), range(4, 8))]
    assert whole.keys() == found.batch_dtypes.keys()
    for name, dtype in found.batch_dtypes.items():
        assert whole[name].dtype == dtype
        np.testing.assert_array_equal(whole[name], np.concatenate([half[name] for half in parts]))
    again.restore(position)
    np.testing.assert_array_equal(next(again)["tokens"], after["tokens"])
