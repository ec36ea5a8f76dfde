#!/bin/sh
# A checkpoint with a score of NaN is Orbax's best one, and the best one is deleted for it.
#
# orbax-checkpoint 0.12.8, jax 0.10.2, Python 3.11; 2026-11-28. `CheckpointManagerOptions(max_to_keep=1, best_mode="max",
# best_fn=...)`, and one checkpoint saved per score, at steps 0, 1, 2, ...
#
# A NaN is the mean over no question, or the loss of a run that diverged. One would guess that it is refused or is never
# better than a number. Orbax sorts the scores: each comparison with a NaN is False, so the order around it stays as it
# was. The NaN, or what follows it whatever it scored, is "best", and the checkpoint of the highest score is deleted.
#
# Seen (scores, steps that are kept, best_step()):
#   0.3 0.1 0.2: [0], best 0
#   0.3 0.1 nan: [2], best 2
#   0.3 nan 0.1 0.2: [3], best 3
#
# Exits 0 while that is what happens, and 1 once it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2
cat >"$folder/save.py" <<'PYTHON'
import tempfile

import numpy as np
import orbax.checkpoint as ocp

for scores in ("0.3 0.1 0.2", "0.3 0.1 nan", "0.3 nan 0.1 0.2"):
    options = ocp.CheckpointManagerOptions(max_to_keep=1, best_mode="max", best_fn=lambda metrics: metrics["score"])
    with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder, options=options) as manager:
        for step, score in enumerate(scores.split()):
            manager.save(step, args=ocp.args.StandardSave({"w": np.zeros(3)}), metrics={"score": float(score)})
        manager.wait_until_finished()
        print(f"{scores}: {list(manager.all_steps())}, best {manager.best_step()}")
PYTHON
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/save.py" 2>"$folder/log" | tee "$folder/seen"
cat >"$folder/expected" <<'SEEN'
0.3 0.1 0.2: [0], best 0
0.3 0.1 nan: [2], best 2
0.3 nan 0.1 0.2: [3], best 3
SEEN
cmp "$folder/seen" "$folder/expected"
