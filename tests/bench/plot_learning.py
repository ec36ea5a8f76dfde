"""Draws what tests/bench/learning.py has measured: docs/learning.svg. Needs matplotlib, of the `dev` packages.

python -m tests.bench.plot_learning FOLDER/curves.json docs/learning.svg
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

TARGET = 0.95


def main() -> None:
    source, target = (Path(word) for word in sys.argv[1:])
    draw(json.loads(source.read_text()), target)


def draw(curves: dict[str, list[dict[str, Any]]], target: Path) -> None:
    """A panel with the seeds of the first variant and, where there are more variants, one with the medians of all."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "slipway"  # the same curves make the same file
    from matplotlib import pyplot

    count, first = min(len(curves), 2), next(iter(curves))
    figure, [panels] = pyplot.subplots(1, count, figsize=(1.5 + 4 * count, 3.4), sharey=True, squeeze=False)
    for seed, run in enumerate(curves[first]):
        panels[0].plot(*zip(*run["points"], strict=True), linewidth=1, label=f"seed {seed}")
    panels[0].set_title(f"{first}, {len(curves[first])} seeds")
    if count == 2:
        for name, runs in curves.items():
            steps = [step for step, _ in runs[0]["points"]]
            medians = [statistics.median(run["points"][i][1] for run in runs) for i in range(len(steps))]
            panels[1].plot(steps, medians, linewidth=1.2, label=name)
        panels[1].set_title("median of the seeds")
    for panel in panels:
        panel.axhline(TARGET, color="0.7", linewidth=0.8, linestyle="--")
        panel.set_xlabel("updates of GRPO")
        panel.set_ylim(0, 1)
        panel.legend(fontsize=7, loc="lower right")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("held-out accuracy, greedy")
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
