"""Draws what sweep=nash_residuals has measured, and prints its table. Needs matplotlib, of the `dev` packages.

python -m tests.bench.plots.residuals ~/.slipway docs/nash-mhc.svg
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path

from controller.records import index

FORMS = ("plain", "mhc", "mhc_lite", "nash_hc")
Curves = dict[str, list[dict[int, float]]]
"""By form, each seed's loss on the validation part by update."""


def main() -> None:
    state, target = Path(sys.argv[1]).expanduser(), Path(sys.argv[2])
    curves = read(state)
    print(table(curves))
    draw(curves, target)


def read(state: Path) -> Curves:
    """Return the finished runs of the sweep; of two with the same form and seed, the later one."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for row in index.load_rows(state):
        words = str(row.get("overrides"))
        form = re.search(r"model\.residual=(\w+)", words)
        if row.get("state") == "finished" and form is not None and "sweep=nash_residuals" in words:
            lines = (state / "runs" / row["run"] / "metrics.jsonl").read_text().splitlines()
            evaluated = [line for line in map(json.loads, lines) if line["phase"] == "eval"]
            found[form[1], row["seed"]] = {line["step"]: line["eval_loss"] for line in evaluated}
    return {form: [found[key] for key in sorted(found) if key[0] == form] for form in FORMS}


def table(curves: Curves) -> str:
    """Mean, lowest and highest over the seeds, as Markdown."""
    steps = sorted(curves["plain"][0])
    heads = ["`model.residual`", *(f"{step} updates" for step in steps)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for form, runs in curves.items():
        cells = []
        for step in steps:
            values = [run[step] for run in runs]
            cells.append(f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        lines.append(f"| `{form}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(curves: Curves, target: Path) -> None:
    """The mean of the seeds, in a band from the lowest to the highest."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "slipway"  # the same curves make the same file
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(5.5, 3.4))
    for form, runs in curves.items():
        steps = sorted(runs[0])
        values = [[run[step] for run in runs] for step in steps]
        [line] = panel.plot(steps, [statistics.mean(v) for v in values], linewidth=1.2, marker=".", label=form)
        low, high = [min(v) for v in values], [max(v) for v in values]
        panel.fill_between(steps, low, high, color=line.get_color(), alpha=0.15)
    panel.set_xticks(sorted(curves["plain"][0]))
    panel.set_xlabel("updates")
    panel.set_ylabel("loss on the validation part")
    panel.legend(fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
