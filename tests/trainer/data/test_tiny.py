"""Every kind of data can be rehearsed: what `scale=tiny` makes of it is there, and can be trained on."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from conf.schema.training.data import Data
from conf.schema.training.loop import LmLoop
from tests.groups import CONF, load_group
from tests.paths import ROOT
from trainer.data import batches

STAND_INS = ROOT / "controller" / "rehearsal" / "standins" / "assets"


def tiny(name: str) -> Any:
    """The data of a group under scale=tiny, with the generated files where they lie."""
    keys = load_group(f"data/{name}") | yaml.safe_load((CONF / f"scale/data/tiny_{name}.yaml").read_text())["data"]
    local = {k: v.replace("assets://", f"{STAND_INS}/") for k, v in keys.items() if isinstance(v, str)}
    return TypeAdapter(Data).validate_python(keys | local)


@pytest.mark.parametrize("packing", ["windows", "stream", "documents"])
@pytest.mark.parametrize("name", ["text", "jsonl", "parquet", "sft_gsm8k"])
def test_every_kind_trains_and_evaluates(name, packing):
    if packing == "windows" and name != "text":
        return
    data = tiny(name).model_copy(update={"packing": packing})
    loop = LmLoop(**load_group("loop/lm") | {"total_batch_tokens": 1024, "seq_len": 32, "eval_batches": 1})
    stream = batches.Dataset(data).train_batches(loop, 0, range(loop.rows))
    for _ in range(4):
        assert next(stream)["weights"].any()
    stream.close()
    assert batches.Dataset(data).validation_batches(loop, range(loop.rows))[0]["weights"].any()
    batches.Dataset(data).check_vocab_size(512)
