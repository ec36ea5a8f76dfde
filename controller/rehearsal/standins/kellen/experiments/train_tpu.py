"""Stands in for the TRM study's second trainer (https://github.com/kaileh57/TinyRecursiveModels, same path)."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import standin

KEYS = ("data_paths", "checkpoint_path", "global_batch_size", "epochs", "run_name", "project_name", "seed")

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--config-name", required=True)
parser.add_argument("overrides", nargs="*")
flags = parser.parse_args()
config = dict(word.split("=", 1) for word in flags.overrides)
if unknown := set(config) - set(KEYS):
    standin.fail(f"no such key: {', '.join(sorted(unknown))}")
for split in ("train", "test"):
    standin.expect(config["data_paths"].strip("[]"), f"{split}/dataset.json", f"{split}/all__inputs.npy")
if standin.variables("PJRT_DEVICE") != ["TPU"]:
    standin.fail("PJRT_DEVICE is not TPU: torch_xla would run on the CPU")
standin.train(config["checkpoint_path"], config)
