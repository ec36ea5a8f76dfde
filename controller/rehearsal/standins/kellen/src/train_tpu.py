"""Stands in for the TRM study's first trainer (https://github.com/kaileh57/TinyRecursiveModels, same path)."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import standin

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--config", required=True)
parser.add_argument("--run_name")
parser.add_argument("--max_steps", type=int)
flags = parser.parse_args()
config = json.loads(Path(flags.config).read_text())  # setup has made one whole file of the two that it is made of
data, bucket = config["data"]["local_cache_dir"], config["checkpoint"]["bucket"]
for split in ("train", "test"):
    arrays = [f"{split}/all__{name}.npy" for name in ("inputs", "labels", "puzzle_identifiers")]
    standin.expect(data, f"{split}/dataset.json", *arrays)
if standin.variables("PJRT_DEVICE") != ["TPU"]:
    standin.fail("PJRT_DEVICE is not TPU: torch_xla would run on the CPU")
standin.train(f"{bucket}/{config['checkpoint']['save_dir']}", {**vars(flags), "config": config})
