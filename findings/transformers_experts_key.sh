#!/bin/sh
# transformers 5 writes Qwen3-MoE's number of experts under a key that transformers 4 does not read.
#
# transformers 5.24.0 and 4.57.3, Python 3.11; 2026-11-30. Published files, such as Qwen/Qwen3-30B-A3B's, say `num_experts`.
#
# One would guess that `save_pretrained` writes the key that the class takes and the published files have, and that a
# file with both keys is an error, or `num_experts` of the class's own signature wins. Version 5 writes `num_local_experts`
# alone; version 4 then silently takes its default of 128 experts, and of both keys version 5 takes `num_local_experts`,
# in either order.
#
# Seen:
#   5.24.0 writes: {'num_local_experts': 8}
#   4.57.3 reads that: 128
#   5.24.0 reads both (num_experts 16, num_local_experts 8): 8
#   5.24.0 reads both in the other order: 8
#
# Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 5.24.0 4.57.3; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet "transformers==$version"
done
cat >"$folder/write.py" <<'PYTHON'
import json
import sys

from transformers import Qwen3MoeConfig

folder = sys.argv[1]
Qwen3MoeConfig(num_experts=8).save_pretrained(folder)
written = json.load(open(f"{folder}/config.json"))
found = {key: value for key, value in written.items() if key in ("num_experts", "num_local_experts")}
print(f"5.24.0 writes: {found}")
PYTHON
cat >"$folder/read.py" <<'PYTHON'
import json
import sys

from transformers import Qwen3MoeConfig

folder, words = sys.argv[1], sys.argv[2]
keys = json.loads(sys.argv[3]) if len(sys.argv) > 3 else None
if keys:
    json.dump({"model_type": "qwen3_moe", **keys}, open(f"{folder}/config.json", "w"))
print(f"{words}: {Qwen3MoeConfig.from_pretrained(folder).num_experts}")
PYTHON
mkdir "$folder/model"
{
  "$folder/5.24.0/bin/python" "$folder/write.py" "$folder/model"
  "$folder/4.57.3/bin/python" "$folder/read.py" "$folder/model" "4.57.3 reads that"
  "$folder/5.24.0/bin/python" "$folder/read.py" "$folder/model" "5.24.0 reads both (num_experts 16, num_local_experts 8)" \
    '{"num_experts": 16, "num_local_experts": 8}'
  "$folder/5.24.0/bin/python" "$folder/read.py" "$folder/model" "5.24.0 reads both in the other order" \
    '{"num_local_experts": 8, "num_experts": 16}'
} 2>"$folder/errors" >"$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
sed -n 's/^#   //p' "$0" | diff - "$folder/seen"
