"""A rehearsal fetches what the experiment fetches, from a Hub with small stand-ins."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from tokenizers import Tokenizer

from conf.hugging_face.config_json import model_from_config
from conf.schema.config import Config
from conf.schema.infra.assets import parse_source
from conf.schema.training.model import Model
from controller.inputs.hub import HubAccess, fetch_file, list_source
from controller.rehearsal.hub import emulated_hub, with_recipe
from tests.composed import config_of
from tests.conftest import deep

RECIPES = {
    # what the trainer reads of the Hub: data, held-out data, tokenizer, weights
    "nanochat_cpp": ("text/*.parquet", "validation/*.parquet", "tokenizer/tokenizer.json", None),
    "nanochat_d16": ("text/*.parquet", "validation/*.parquet", "tokenizer/tokenizer.json", None),
    "lm_3b_v6e8": ("text/*.parquet", None, "tokenizer/tokenizer.json", None),
    "sft_gsm8k": ("gsm8k/train.jsonl", "gsm8k/test.jsonl", "gemma-2-2b/tokenizer.json", "gemma-2-2b"),
    "nanochat_d16_jax_v6e4": ("text/*.parquet", "validation/*.parquet", "tokenizer/tokenizer.json", None),
    "gemma2b_gsm8k": ("gsm8k/train.jsonl", "gsm8k/test.jsonl", "gemma-2-2b/tokenizer.json", "gemma-2-2b"),
}


def recipe(name: str, *words: str) -> Config:
    full, tiny = (config_of(f"+experiment={name}", "cloud=local", *words, *scale) for scale in ((), ("scale=tiny",)))
    return with_recipe(tiny, full, {word.partition("=")[0] for word in words})


@pytest.mark.deep
@pytest.mark.parametrize("name", [*list(RECIPES)[:4], *deep(*list(RECIPES)[4:])])
def test_each_source_of_a_recipe_can_be_fetched(name: str, tmp_path: Path) -> None:
    config = recipe(name)
    data: Any = config.data
    model: Any = config.model
    names = (data.path, data.eval_path, data.tokenizer, model.weights)
    assert names == tuple(found and f"assets://{found}" for found in RECIPES[name])
    before = os.environ.get("HF_ENDPOINT")
    special = {token for token in (data.bos, data.eos) if token}
    with emulated_hub(config, tmp_path):
        access = HubAccess(os.environ["HF_ENDPOINT"], "hf_any")
        for _, _, asset in config.assets.iter_assets():
            if asset.source is None:
                continue
            address = parse_source(asset.source)
            commit, files = list_source(address, access)
            for file in files:
                target = tmp_path / "fetched" / file.name
                fetch_file(address, commit, file, target, access, lambda size: None, lambda seconds: None)
                if address.kind == "dataset" and target.suffix == ".parquet":
                    assert pyarrow.parquet.read_schema(target).names == [data.text_column]
                    assert pyarrow.parquet.ParquetFile(target).num_row_groups == 3
    assert os.environ.get("HF_ENDPOINT") == before
    if (tokenizer := tmp_path / "fetched/tokenizer.json").is_file():
        known = Tokenizer.from_file(str(tokenizer))
        assert known.decode(known.encode("2 + 2 = é").ids) == "2 + 2 = é"
        assert all(known.token_to_id(token) is not None for token in special)
        assert known.get_vocab_size() <= model.vocab_size
    if model.weights:
        described = model_from_config(json.loads((tmp_path / "fetched/config.json").read_text()))
        same = Model.model_fields.keys() - {"weights", "config_json", "remat", "scan_layers", "logit_chunk"}
        same -= {"activation_dtype", "implementation"}
        assert {key: getattr(described, key) for key in same} == {key: getattr(model, key) for key in same}


def test_what_the_user_sets_and_what_has_no_source_stays() -> None:
    assert getattr(recipe("lm_3b_v6e8", "data.tokenizer=bytes").data, "tokenizer") == "bytes"  # noqa: B009
    config = recipe("lm_tinyshakespeare")
    assert not [asset for _, _, asset in config.assets.iter_assets() if asset.source]


def test_puzzles_are_generated_and_need_no_hub(tmp_path: Path) -> None:
    config = recipe("trm_sudoku")
    build = config.assets.datasets["sudoku"].build
    assert build is not None
    assert build[build.index("--source") + 1] == "generated"
    before = os.environ.get("HF_ENDPOINT")
    with emulated_hub(config, tmp_path):
        assert os.environ.get("HF_ENDPOINT") == before
