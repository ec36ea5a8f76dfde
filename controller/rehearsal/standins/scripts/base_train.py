"""Stands in for nanochat's pretraining on XLA (https://github.com/apstenku123/nanochat, scripts/base_train.py)."""

import argparse

import standin

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--depth", type=int, required=True)
for flag in ("num_iterations", "device_batch_size", "max_seq_len", "save_every", "sample_every"):
    parser.add_argument(f"--{flag}", type=int, required=True)
parser.add_argument("--core_metric_every", type=int, required=True)
parser.add_argument("--resume_from_step", type=int, required=True)
parser.add_argument("--kernel", choices=["current", "liger", "cce", "triton"], required=True)
parser.add_argument("--no_compile", action="store_true", required=True)
parser.add_argument("--run", required=True)
flags = parser.parse_args()
device, base, bucket = standin.variables("PJRT_DEVICE", "NANOCHAT_BASE_DIR", "NANOCHAT_GCS_CHECKPOINT_BUCKET")
if device != "TPU":
    standin.fail("PJRT_DEVICE is not TPU: torch_xla would run on the CPU")
standin.expect(f"{base}/base_data", "shard_00000.parquet")
standin.expect(f"{base}/tokenizer", "tokenizer.pkl", "token_bytes.pt")
standin.train(f"{bucket}/base_checkpoints/d{flags.depth}", vars(flags))
