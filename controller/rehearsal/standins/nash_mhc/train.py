"""Stands in for Nash-MHC (https://github.com/dutch-casa/manifold-nash-equilibrium, src/nash_mhc/train.py)."""

import argparse
import os

import standin

parser = argparse.ArgumentParser(allow_abbrev=False)
for flag in ("dataset", "dataset-name", "split", "tokenizer", "wandb-project", "wandb-entity", "resume-from"):
    parser.add_argument(f"--{flag}")
for flag in ("batch-size", "total-steps", "warmup-steps", "seed", "log-interval", "checkpoint-interval"):
    parser.add_argument(f"--{flag}", type=int)
for flag in ("mesh-data", "mesh-fsdp", "mesh-tp", "num-workers", "worker-buffer-size"):
    parser.add_argument(f"--{flag}", type=int, default=1)
parser.add_argument("--learning-rate", type=float)
parser.add_argument("--use-small-model", action="store_true")
parser.add_argument("--checkpoint-dir", default="./checkpoints")
flags = parser.parse_args()
mesh = (flags.mesh_data, flags.mesh_fsdp, flags.mesh_tp)
devices = int(os.environ["JAX_NUM_CPU_DEVICES"]) * len(os.environ["TPU_WORKER_HOSTNAMES"].split(","))
if mesh[0] * mesh[1] * mesh[2] != devices:
    standin.fail(f"the mesh {mesh} does not make the {devices} devices", 3)
standin.variables("WANDB_MODE")
standin.train(flags.checkpoint_dir, vars(flags))
