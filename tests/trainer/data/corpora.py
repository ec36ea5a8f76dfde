"""Small data sets of every kind, for tests, and what a stream made of them holds."""

import json
import random
from pathlib import Path
from typing import Any

from conf.schema.training.data import JsonlData, ParquetData, TextData
from conf.schema.training.loop import LmLoop
from tests.groups import load_group


def make_documents(count: int) -> list[str]:
    """Documents of different lengths, no two alike; some are empty, one is longer than any context here."""
    draw = random.Random(0)
    texts = [f"{i}:" + "".join(draw.choices("abcdefgh é", k=draw.randrange(40))) for i in range(count)]
    return [*texts, f"{count}:" + "long" * 60]


def write_jsonl(path: Path, texts: list[str], **keys: Any) -> JsonlData:
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return JsonlData(**load_group("data/jsonl") | {"path": str(path)} | keys)


def write_parquet(path: Path, texts: list[str], rows_per_group: int, **keys: Any) -> ParquetData:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"id": list(range(len(texts))), "text": texts})
    parquet.write_table(table, path, row_group_size=rows_per_group)
    return ParquetData(**load_group("data/parquet") | {"path": str(path)} | keys)


def write_text(path: Path, texts: list[str], **keys: Any) -> TextData:
    path.write_text("\n\n".join(texts))
    return TextData(**load_group("data/text") | {"path": str(path), "separator": "\n\n"} | keys)


def lm_loop(rows: int, sequence: int, eval_batches: int = 1) -> LmLoop:
    sizes = {"total_batch_tokens": rows * sequence, "seq_len": sequence, "eval_batches": eval_batches}
    return LmLoop(**load_group("loop/lm") | sizes)
