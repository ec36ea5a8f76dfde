#!/bin/sh
# A rotary key of Gemma 4 that transformers calls unrecognized divides the frequencies all the same.
#
# transformers 5.24.0, torch 2.15.0, Python 3.11; 2026-11-30. `factor` beside `rope_type: proportional`, of which the
# general description of rotary keys says that it goes with all kinds but `default`.
#
# One would guess that a key that is reported as unrecognized changes nothing, so that the warning can be followed by
# removing it. The warning comes, and the frequencies are those without the key divided by it: a file without it is
# another model.
#
# Seen (the first three frequencies of the global layers):
#   without factor: [1.0, 0.9475, 0.8977], warned: False
#   with factor 8.0: [0.125, 0.1184, 0.1122], warned: True
#
# Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet uv
"$folder/venv/bin/uv" pip install --quiet --python "$folder/venv" transformers==5.24.0 torch==2.15.0
cat >"$folder/read.py" <<'PYTHON'
import logging

from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.utils import logging as theirs

warned = []
handler = logging.Handler()
handler.emit = lambda record: warned.append(record.getMessage())
theirs.get_logger("transformers").addHandler(handler)
for words, more in (("without factor", {}), ("with factor 8.0", {"factor": 8.0})):
    warned.clear()
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25, **more}
    rotation = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    made = Gemma4TextRotaryEmbedding(Gemma4TextConfig(rope_parameters=rotation, num_hidden_layers=6))
    frequencies = [round(value, 4) for value in made.full_attention_inv_freq[:3].tolist()]
    print(f"{words}: {frequencies}, warned: {any('factor' in line for line in warned)}")
PYTHON
"$folder/venv/bin/python" "$folder/read.py" 2>"$folder/errors" >"$folder/seen" || { cat "$folder/errors" >&2; exit 1; }
cat "$folder/seen"
sed -n 's/^#   //p' "$0" | diff - "$folder/seen"
