"""What programs take according to the TPU compiler, beside MaxText's and Tunix's. Needs libtpu, no TPU.

    python -m tests.bench.tpu_compiler ours [CASE ...]
    python -m tests.bench.tpu_compiler maxtext PYTHON CHECKOUT     # Llama-3.1 8B on v6e-8, as in its recipe
    python -m tests.bench.tpu_compiler tunix PYTHON CHECKOUT       # GRPO of Gemma-2 2B on v5litepod-16

PYTHON has the peer's requirements, the JAX of this project and the same libtpu; CHECKOUT is a clone of its repository.
Figures are per device: operations and bytes of the compiler's schedule with the trip counts of loops, HBM that it
assigned, and seconds at the chip's rates (`trainer.fit.step_time`), which are not calibrated.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from conf.schema.infra.topology import find_topology
from tests.bench.forecast.rows import BASE, ROWS
from tests.bench.tpu_compiler.dump import Dump, compiled
from tests.bench.tpu_compiler.figures import figures
from tests.paths import ROOT
from trainer.fit.step_time import device_rates

SECONDS_AT_MOST = 1200
RECIPE = ("vmem", "layout", "replicas", "async_gather", "plain_products")
"""Flags of MaxText's recipe for v6e-8, by their names in forecast/rows.yaml."""
OFFLOAD = (
    "--xla_tpu_enable_all_experimental_scheduler_features=true "
    "--xla_tpu_enable_scheduler_memory_pressure_tracking=true "
    "--xla_tpu_host_transfer_overlap_limit=24 --xla_tpu_aggressive_opt_barrier_removal=ENABLED "
    "--xla_lhs_prioritize_async_depth_over_stall=ENABLED --xla_tpu_enable_ag_backward_pipelining=true "
    "--xla_should_allow_loop_variant_parameter_in_chain=ENABLED --xla_should_add_loop_invariant_op_in_chain=ENABLED "
    "--xla_max_concurrent_host_send_recv=100 --xla_tpu_scheduler_percent_shared_memory_limit=100 "
    "--xla_latency_hiding_scheduler_rerun=2"
)
"""The recipe's flags for what is offloaded to the host."""

LLAMA = [*BASE, "model=llama3_1_8b", "tpu.accelerator_type=v6e-8", "loop.total_batch_tokens=131072",
         "loop.seq_len=8192", "model.max_seq_len=8192"]  # fmt: skip
GPT2 = [*BASE, "model=gpt2", "tpu.accelerator_type=v6e-8", "loop.total_batch_tokens=524288", "loop.seq_len=1024"]
GEMMA = [
    "+experiment=gemma2b_gsm8k",
    "cloud.project=a-project",
    "loop.max_prompt_length=1024",
    "loop.max_new_tokens=1024",
]
CASES = {
    "Llama-3.1 8B, v6e-8, remat full": ("v6e-8", "update", [*LLAMA, "model.remat=full"], RECIPE),
    "Llama-3.1 8B, v6e-8, remat chunks": ("v6e-8", "update", [*LLAMA, "model.remat=chunks"], RECIPE),
    "Llama-3.1 8B, v6e-8, remat offload": ("v6e-8", "update", [*LLAMA, "model.remat=offload"], RECIPE),
    "GPT-2, v6e-8, 50,257 tokens": ("v6e-8", "update", GPT2, ()),
    "GPT-2, v6e-8, 50,304 tokens": ("v6e-8", "update", [*GPT2, "model.vocab_size=50304"], ()),
    "Gemma-2 2B GRPO, v5litepod-16, update": ("v5litepod-16", "update", GEMMA, ()),
    "Gemma-2 2B GRPO, v5litepod-16, prefill": ("v5litepod-16", "prefill", GEMMA, ()),
    "Gemma-2 2B GRPO, v5litepod-16, decode": ("v5litepod-16", "decode", GEMMA, ()),
    **{
        f"Gemma-2 2B GRPO, v5litepod-16, decode in a cache of {length}": (
            "v5litepod-16",
            "decode",
            [*GEMMA[:2], f"loop.max_prompt_length={length // 2}", f"loop.max_new_tokens={length // 2}"],
            (),
        )
        for length in (512, 1024)
    },
    "Gemma-2 2B GRPO, v5litepod-16, a cache of 1024 becomes one of 2048": (
        "v5litepod-16",
        "resize_1024_to_2048",
        GEMMA,
        (),
    ),
}
"""Slice, program, overrides, and flags by name."""

MAXTEXT = (
    "src/maxtext/configs/base.yml model_name=llama3.1-8b compile_topology=v6e-8 compile_topology_num_slices=1 "
    "per_device_batch_size=2 ici_fsdp_parallelism=-1 remat_policy=custom decoder_layer_input=offload "
    "out_proj=offload query_proj=offload key_proj=offload value_proj=offload max_target_length=8192 "
    "attention=flash use_iota_embed=True dataset_type=synthetic enable_checkpointing=False sa_block_q=2048 "
    "sa_block_kv=2048 sa_block_kv_compute=2048 sa_block_q_dkv=2048 sa_block_kv_dkv=2048 "
    "sa_block_kv_dkv_compute=2048 sa_block_q_dq=2048 sa_block_kv_dq=2048 sa_use_fused_bwd_kernel=True "
    "run_name=compile base_output_directory=/tmp tokenizer_type=tiktoken skip_jax_distributed_system=True"
)
"""`llama3_1_8b_8192_no_collective_matmul` of its benchmarks/maxtext_trillium_model_configs.py, with 2 of 3 rows."""
TUNIX = ("update", "prefill", "decode")

HEAD = "| program | HBM GiB | TFLOP | HBM GB moved | GB sent | seconds | products | attention | other | waiting |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ours", "maxtext", "tunix"))
    parser.add_argument("given", nargs="*")
    options = parser.parse_args()
    print(f"{HEAD}\n|{'---|' * HEAD.count(' | ')}---|", flush=True)
    if options.what == "ours":
        for name, (slice_, program, words, flags) in CASES.items():
            if not options.given or any(part in name for part in options.given):
                command = [sys.executable, "-m", "tests.bench.tpu_compiler.ours", program, *words]
                show(name, slice_, compiled(command, named_flags(flags), SECONDS_AT_MOST, ROOT))
        return
    python, checkout = options.given
    if options.what == "maxtext":
        command = [python, "-m", "maxtext.trainers.pre_train.train_compile", *MAXTEXT.split()]
        flags = f"{named_flags(RECIPE)} {OFFLOAD}"
        show("MaxText", "v6e-8", compiled(command, flags, SECONDS_AT_MOST, Path(checkout), {"PYTHONPATH": "src"}))
        return
    for program in TUNIX:
        command = [python, str(Path(__file__).with_name("tunix_programs.py")), program]
        found = compiled(command, "", SECONDS_AT_MOST, Path(checkout), {"PYTHONPATH": checkout})
        show(f"Tunix, {program}", "v5litepod-16", found)


def named_flags(names: tuple[str, ...]) -> str:
    return " ".join(ROWS["flags"][name] for name in names)


def show(name: str, slice_: str, dump: Dump | None) -> None:
    """Print a row."""
    if dump is None:
        print(f"| {name} | not compiled |", flush=True)
        return
    found = figures(dump.text, device_rates(find_topology(slice_)))
    cells = [
        f"{dump.hbm_bytes / 2**30:.2f}", f"{found.flops / 1e12:,.3g}", f"{found.hbm_bytes / 1e9:,.4g}",
        f"{found.ici_bytes / 1e9:.3g}", f"{found.time.total:.4g}", f"{found.time.products:.3g}",
        f"{found.time.kernels:.3g}", f"{found.time.other:.3g}", f"{found.time.waiting:.3g}",
    ]  # fmt: skip
    print(f"| {' | '.join([name, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
