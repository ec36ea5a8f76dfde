"""Stands in for the setup of the TRM programs: the data on this worker's disk, and one whole config file."""

import json
import os

import standin

(source,) = standin.variables("TRM_DATASET")
for path in standin.names(source):
    standin.write(f"sudoku/{path.removeprefix(source).lstrip('/')}", standin.read(path) or b"")
run = standin.variables("TRM_RUN_DIR")[0].removeprefix("gs://")
bucket, _, folder = run.partition("/")
config = {
    "data": {"local_cache_dir": "sudoku"},
    "checkpoint": {"bucket": f"gs://{bucket}", "save_dir": f"{folder}/checkpoints"},
}
if os.environ.get("TRM_CONFIG"):
    standin.write("config.yaml", json.dumps(config).encode())  # JSON is YAML too
print("sudoku on this worker", flush=True)
