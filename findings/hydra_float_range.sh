#!/bin/sh
# A range of floats in a Hydra sweep may hold its own end, which is one job more.
#
# hydra-core 1.3.8, omegaconf 2.3.1, Python 3.11; 2026-11-28. A user's sweep, `python app.py -m "a=range(START,STOP,STEP)"`.
#
# Hydra documents that stop is excluded, as in Python, so one would guess three jobs for each of the first three ranges: 0,
# 0.3 and 0.6; 0, 0.2 and 0.4; 1, 1.1 and 1.2. Hydra adds in decimals of 28 digits, made from the binary value of the step:
# neither what was written nor floats (numpy.arange has 0.9 / 0.3 = 3 values). The sum falls short of stop, or does not.
#
# Seen (the values of the jobs):
#   range(0,0.9,0.3): 0.0 0.3 0.6 0.8999999999999999
#   range(0,0.6,0.2): 0.0 0.2 0.4
#   range(1,1.3,0.1): 1.0 1.1 1.2 1.3
#   range(0,0.8,0.1): 0.0 0.1 0.2 0.3 0.4 0.5 0.6 0.7000000000000001 0.8
#
# Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet hydra-core==1.3.8 omegaconf==2.3.1
cat >"$folder/app.py" <<'PYTHON'
import hydra
from hydra.core.config_store import ConfigStore


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(config):
    print("value", config.a)


ConfigStore.instance().store("config", {"a": 0, "hydra": {"sweep": {"dir": "/dev/null"}, "output_subdir": None}})
main()
PYTHON
cd "$folder"
for range in 0,0.9,0.3 0,0.6,0.2 1,1.3,0.1 0,0.8,0.1; do
    values=$(venv/bin/python app.py -m "a=range($range)" hydra.sweep.dir="$folder/jobs" hydra/job_logging=none \
        hydra/hydra_logging=none | sed -n 's/^value //p' | paste -sd' ' -)
    echo "range($range): $values"
done | tee seen
cat >expected <<'SEEN'
range(0,0.9,0.3): 0.0 0.3 0.6 0.8999999999999999
range(0,0.6,0.2): 0.0 0.2 0.4
range(1,1.3,0.1): 1.0 1.1 1.2 1.3
range(0,0.8,0.1): 0.0 0.1 0.2 0.3 0.4 0.5 0.6 0.7000000000000001 0.8
SEEN
cmp seen expected
