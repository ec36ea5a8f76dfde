"""Stands in for the training of nanochat's tokenizer: `python -m scripts.tok_train`."""

import argparse

import standin

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--max_chars", type=int)
parser.add_argument("--vocab_size", type=int)
parser.parse_args()
(base,) = standin.variables("NANOCHAT_BASE_DIR")
standin.expect(f"{base}/base_data", "shard_00000.parquet")
for name in ("tokenizer.pkl", "token_bytes.pt"):
    standin.write(f"{base}/tokenizer/{name}", b"generated")
print("tokenizer", flush=True)
