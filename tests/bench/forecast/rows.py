"""How far `slipway fit`'s forecast is from MaxText's published step times.

The rows are in `rows.yaml`, with their sources. `forecast_rows.json` has what libtpu's schedule of each
takes; commit 20fcd3c0 has the program that compiled them.
"""

import statistics
from pathlib import Path
from typing import Any

from conf.schema.topology import find_topology
from tests.groups import load_yaml
from trainer.fit.slices import find_price
from trainer.fit.step_time import StepTime

ROWS = load_yaml(Path(__file__).with_name("rows.yaml"))
FIXTURE = Path(__file__).parents[2] / "trainer" / "fit" / "forecast_rows.json"


def factors(rows: dict[str, Any]) -> dict[str, float]:
    """Return published over computed time of each generation's rows with the role `calibrate`."""
    ratios: dict[str, list[float]] = {}
    for name, row in rows.items():
        spec = ROWS["rows"][name]
        if spec["role"] == "calibrate":
            computed = StepTime(**row["computed"]).total
            ratios.setdefault(find_topology(spec["slice"]).generation, []).append(row["published"] / computed)
    return {generation: round(statistics.geometric_mean(values), 3) for generation, values in ratios.items()}


def ratios(rows: dict[str, Any], role: str) -> dict[str, float]:
    """Return published over forecast time by row."""
    known = factors(rows)
    found: dict[str, float] = {}
    for name, row in rows.items():
        spec = ROWS["rows"][name]
        generation = find_topology(spec["slice"]).generation
        if spec["role"] == role and generation in known:
            found[name] = row["published"] / (known[generation] * StepTime(**row["computed"]).total)
    return found


def ordered_pairs(rows: dict[str, Any], *, per_flop: bool = False) -> tuple[int, int]:
    """Return how many pairs of judged rows have the right order of dollars, and how many pairs there are.

    Dollars per token, or per operation of the model, which compares the slices of different models too. Prices are on
    demand, the lowest of any zone. Slices without a list price do not count, nor do pairs within 5%.
    """
    cost: list[tuple[float, float]] = []
    for name, ratio in ratios(rows, "judge").items():
        spec = ROWS["rows"][name]
        slice_ = find_topology(spec["slice"])
        _, price = find_price(slice_, None, spot=False)
        if price is not None:
            tokens = spec["batch"] * slice_.devices * spec["seq"]
            amount = tokens * rows[name]["flops_per_token"] if per_flop else tokens
            actual = price * rows[name]["published"] / amount
            cost.append((actual, actual / ratio))
    pairs = [(a, b) for n, a in enumerate(cost) for b in cost[:n] if abs(a[0] / b[0] - 1) > 0.05]
    return sum((a[0] > b[0]) == (a[1] > b[1]) for a, b in pairs), len(pairs)
