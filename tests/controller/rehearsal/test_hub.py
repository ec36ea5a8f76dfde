"""A rehearsal fetches what the experiment fetches, from a Hub with small stand-ins."""

import os
from pathlib import Path
from typing import Any

from conf.schema.config import Config
from controller.rehearsal.hub import emulated_hub, with_recipe
from tests.composed import config_of

GSM8K = ("gsm8k/train.jsonl", "gsm8k/test.jsonl", "gemma-2-2b/tokenizer.json", "gemma-2-2b")
RECIPES = {
    # what the trainer reads of the Hub: data, held-out data, tokenizer, weights
    "nanochat_cpp": ("text/*.parquet", "validation/*.parquet", "tokenizer/tokenizer.json", None),
    "lm_3b_v6e8": ("text/*.parquet", None, "tokenizer/tokenizer.json", None),
    "sft_gsm8k": GSM8K,
    "gemma2b_gsm8k": GSM8K,
}


def recipe(name: str, *words: str) -> Config:
    full, tiny = (config_of(f"+experiment={name}", "cloud=local", *words, *scale) for scale in ((), ("scale=tiny",)))
    return with_recipe(tiny, full, {word.partition("=")[0] for word in words})


def test_a_recipe_reads_of_the_hub_what_the_experiment_reads() -> None:
    """test_rehearsal.py trains on it."""
    for name, sources in RECIPES.items():
        config: Any = recipe(name)
        names = (config.data.path, config.data.eval_path, config.data.tokenizer, config.model.weights)
        assert names == tuple(source and f"assets://{source}" for source in sources), name


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
