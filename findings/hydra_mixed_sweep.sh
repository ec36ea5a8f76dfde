#!/bin/sh
# Hydra's grammar takes a range beside another value as a sweep, and OmegaConf then refuses Hydra's own class.
#
# hydra-core 1.3.8, omegaconf 2.3.1, Python 3.11; 2026-11-28. A user's sweep over seeds, `python app.py -m "a=range(1,3),5"`.
#
# One would guess the three jobs 1, 2 and 5, as `a=[1,2],3` is two jobs; or Hydra's usual line, "Error parsing override",
# as it says for `a=choice(range(2),7)`. The parser makes a ChoiceSweep that holds a RangeSweep, a dataclass of Hydra's; the
# sweeper gives it to OmegaConf as a value, which does not take the annotation of its field `tags`. The user gets a
# traceback, exit 1, in which no word of the override appears.
#
# Seen (exit code, last line but the key and the type):
#   a=[1,2],3: 0
#   a=range(1,3),5: 1 ValidationError: Unexpected type annotation: Set[str] (RangeSweep)
#   a=choice(1,2),5: 1 ValidationError: Unexpected type annotation: Set[str] (ChoiceSweep)
#   a=interval(0,1),5: 1 ValidationError: Unexpected type annotation: Set[str] (IntervalSweep)
#   a=choice(range(2),7): 1 Error parsing override
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
    pass


ConfigStore.instance().store("config", {"a": 0, "hydra": {"output_subdir": None}})
main()
PYTHON
cd "$folder"
for override in 'a=[1,2],3' 'a=range(1,3),5' 'a=choice(1,2),5' 'a=interval(0,1),5' 'a=choice(range(2),7)'; do
    code=0
    venv/bin/python app.py -m "$override" hydra.sweep.dir="$folder/jobs" hydra/job_logging=none \
        hydra/hydra_logging=none >said 2>&1 || code=$?
    error=$(sed -n 's/^omegaconf.errors.\(ValidationError: .*\)/ \1/p; s/^\(Error parsing override\).*/ \1/p' said)
    kind=$(sed -n 's/^ *object_type=\(.*\)/ (\1)/p' said)
    echo "$override: $code$error$kind"
done | tee seen
cat >expected <<'SEEN'
a=[1,2],3: 0
a=range(1,3),5: 1 ValidationError: Unexpected type annotation: Set[str] (RangeSweep)
a=choice(1,2),5: 1 ValidationError: Unexpected type annotation: Set[str] (ChoiceSweep)
a=interval(0,1),5: 1 ValidationError: Unexpected type annotation: Set[str] (IntervalSweep)
a=choice(range(2),7): 1 Error parsing override
SEEN
cmp seen expected
