"""How fast Parquet becomes batches, and in how much memory.

    python -m tests.bench.data [--gigabytes 3] [--group-mb 5] [--tokenizer bytes|FILE] [--packing stream]

Writes Parquet of random words, in files of 256 MB with row groups of the size that web corpora have, reads one whole
epoch of it in a process of its own, and prints tokens/s and that process's largest resident memory.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from conf.schema.training.data import ParquetData
from conf.schema.training.loop import LmLoop
from tests.groups import load_group
from trainer.data import batches

FILE_BYTES = 256 * 2**20
DOCUMENT_BYTES = 4800
ROWS, SEQUENCE = 64, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3)
    parser.add_argument("--group-mb", type=float, default=5, help="text of a row group")
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--packing", default="stream")
    parser.add_argument("--seconds", type=float, default=600, help="after which the reading ends, an epoch or not")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        read(options.read, options.tokenizer, options.packing, options.seconds)
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", WRITE, folder, str(options.gigabytes), str(options.group_mb)], check=True)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        print(f"{size / 2**30:.2f} GiB of Parquet, row groups of {options.group_mb:g} MB")
        subprocess.run([sys.executable, "-m", "tests.bench.data", "--read", folder, *sys.argv[1:]], check=True)


WRITE = "import sys; from tests.bench.data import write; write(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))"


def write(folder: str, gigabytes: float, group_mb: float) -> None:
    """Documents of words from a vocabulary of 50,000, each as frequent as its rank says."""
    import pyarrow as pa
    from pyarrow import parquet

    draw = np.random.default_rng(0)
    letters = np.frombuffer(b"etaoinshrdlucmfw", np.uint8)
    words = np.array([letters[draw.integers(0, 16, n)].tobytes().decode() for n in draw.integers(2, 11, 50_000)])
    per_group = max(1, round(group_mb * 1e6 / DOCUMENT_BYTES))
    for number in range(max(1, round(gigabytes * 2**30 / FILE_BYTES))):
        path, schema = f"{folder}/{number:04}.parquet", pa.schema({"text": pa.string()})
        with parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False) as file:
            for _ in range(max(1, round(FILE_BYTES / 1e6 / group_mb))):
                ranks = (draw.pareto(1.0, per_group * DOCUMENT_BYTES // 7).astype(int)) % len(words)
                text = " ".join(words[ranks])
                documents = [text[at : at + DOCUMENT_BYTES] for at in range(0, len(text), DOCUMENT_BYTES)][:per_group]
                file.write_table(pa.table({"text": documents}), row_group_size=per_group)


def read(folder: str, tokenizer: str, packing: str, seconds: float) -> None:
    """One epoch, or as much of it as there is time for."""
    keys = {"path": f"{folder}/*.parquet", "tokenizer": tokenizer, "packing": packing}
    bos = {"bos": "<bos>" if tokenizer == "bytes" else "<|bos|>"}
    data = ParquetData(**load_group("data/parquet") | keys | bos)
    loop = LmLoop(**load_group("loop/lm") | {"total_batch_tokens": ROWS * SEQUENCE, "seq_len": SEQUENCE})
    before = peak_gib()
    stream, began, tokens = batches.Dataset(data).train_batches(loop, 0, range(ROWS)), time.perf_counter(), 0.0
    while time.perf_counter() - began < seconds and "'epoch': 1" not in str(stream.position()):
        tokens += next(stream)["weights"].sum()
    spent = time.perf_counter() - began
    stream.close()
    speed = f"{tokens / 1e6:.0f} M tokens in {spent:.1f} s, {tokens / spent / 1e6:.2f} M/s"
    print(
        f"{tokenizer}, packing {packing}: {speed}; "
        f"largest resident memory {peak_gib():.2f} GiB ({before:.2f} before the first batch)"
    )


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30


if __name__ == "__main__":
    main()
