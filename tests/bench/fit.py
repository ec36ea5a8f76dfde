"""The table of what fits, for docs/performance.md: `python -m tests.bench.fit [NAME ...]`. Needs libtpu, no TPU.

Each row is one program of one experiment, compiled by the TPU compiler for the slice that it names.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

LM = ["program=trainer", "data=text", "data.path=corpus.txt", "loop=lm", "optimizer=adamw"]
CASES = {
    "Gemma-2 2B, GRPO, 128 x 2048": ["+experiment=gemma2b_gsm8k"],
    "Gemma-2 2B, GRPO, 128 x 2048, auto": ["+experiment=gemma2b_gsm8k", "model.remat=auto"],
    "Gemma-2 2B, GRPO, 128 x 8192": ["+experiment=gemma2b_gsm8k", "loop.max_new_tokens=7168"],
    "Gemma-2 2B, fine-tuning, 32 x 1024": ["+experiment=sft_gsm8k"],
    "nanochat d16, 64 x 1024": [
        *LM, "tpu=v5litepod_8", "model=nanochat_d16", "model.sliding_window=513",
        "loop.total_batch_tokens=65536", "loop.seq_len=1024",
    ],
    "nanochat d16, 32 x 2048": [
        *LM, "tpu=v6e_4", "model=nanochat_d16", "loop.total_batch_tokens=65536", "loop.seq_len=2048",
    ],
    "3B (Llama-like), 32 x 4096, mesh 2x2x2": ["+experiment=lm_3b_v6e8"],
    "Nash-MHC 3B, 32 x 4096, mesh 2x2x2": ["+experiment=nash_mhc_3b"],
    "Nash-MHC 3B, 32 x 4096, mesh 1x4x2": ["+experiment=nash_mhc_3b", "mesh=fsdp_heavy"],
    "Nash-MHC 3B, 32 x 4096, mesh 4x1x2": ["+experiment=nash_mhc_3b", "mesh=data_heavy"],
    "Gemma-2 9B, 64 x 2048": [
        *LM, "tpu.accelerator_type=v5litepod-64", "model=gemma2_9b",
        "loop.total_batch_tokens=131072", "loop.seq_len=2048", "mesh.data=1", "mesh.fsdp=-1",
    ],
    "Llama-3 8B, 32 x 4096": [
        *LM, "tpu.accelerator_type=v6e-16", "model=llama3_8b", "loop.total_batch_tokens=131072", "loop.seq_len=4096",
        "mesh.data=1", "mesh.fsdp=-1",
    ],
}  # fmt: skip


COLUMNS = ("what", "slice", "remat", "program", "fits", "peak GiB", "arguments", "temporaries", "beside", "FLOPs",
           "again", "compile s")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="part of the name of a case; none: all")
    options = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name, words in CASES.items():
        if options.names and not any(part in name for part in options.names):
            continue
        command = [sys.executable, "-m", "slipway", "fit", "--json", *words, "cloud=gcp", "cloud.project=a-project"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if not ended.stdout:
            print(f"{name}: {ended.stderr.strip()}", file=sys.stderr)
            continue
        found = json.loads(ended.stdout)
        for v in found["programs"]:
            print(row(name, found, v), flush=True)


def row(name: str, found: dict[str, Any], v: dict[str, Any]) -> str:
    """One program of one case."""
    again = v["recomputed_flops"] / (v["flops"] - v["recomputed_flops"]) if v["recomputed_flops"] else 0
    cells = [
        *(name, found["accelerator_type"], found["remat"], v["name"], "yes" if v["fits"] else "no"),
        f"{v['peak_gib']:.2f} of {v['hbm_gib']:.2f}",
        *(f"{v[key]:.2f}" for key in ("argument_gib", "temp_gib", "beside_gib")),
        f"{v['flops']:.2e}",
        f"{again:.1%}" if again else "",
        f"{v['compile_seconds']:.0f}" if v["compile_seconds"] >= 0.5 else "",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
