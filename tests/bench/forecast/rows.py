"""How far `slipway fit`'s forecast is from MaxText's published step times. Needs libtpu, no TPU.

    python -m tests.bench.forecast compile [NAME ...]   # into tests/trainer/fit/forecast_rows.json
    python -m tests.bench.forecast judge                # factors, errors and ranks, from that file

The rows are in `rows.yaml`. A row is compiled as the bundled trainer would run it, with the recipe's flags,
and with 5 periods of layers: the loop's trip count, and the
leading axis of what lies outside of it, stand for the others (`--whole` compiles all layers, to compare). The compiler
writes its schedule before it generates code; only that is read here, because code for a large program takes minutes.
`slipway fit` reads the same text afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from conf.schema.infra.topology import find_topology
from controller.run.estimate import token_flops
from tests.groups import load_yaml
from trainer.fit import schedule
from trainer.fit.forecast import find_price
from trainer.fit.step_time import Rates, StepTime, device_rates, step_time

ROWS = load_yaml(Path(__file__).with_name("rows.yaml"))
FIXTURE = Path(__file__).parents[2] / "trainer" / "fit" / "forecast_rows.json"
PERIODS = 5  # differs from the trip counts of loops over devices and chunks, which are powers of two
BASE = ["program=trainer", "data=text", "data.path=corpus.txt", "loop=lm", "optimizer=adamw", "cloud=gcp",
        "cloud.project=a-project", "mesh.data=1", "mesh.fsdp=-1"]  # fmt: skip
SECONDS_AT_MOST = 540


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compile", "judge", "child"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--whole", action="store_true", help="compile all layers, and print instead of recording")
    options = parser.parse_intermixed_args()
    if options.what == "child":
        compile_row(options.names[0], whole=options.whole)
    elif options.what == "judge":
        print("\n".join(judgement(json.loads(FIXTURE.read_text()))))
    else:
        for name in options.names or ROWS["rows"]:
            record(name, whole=options.whole)


def words_of(name: str, *, whole: bool) -> list[str]:
    """Return the overrides of a row."""
    row = ROWS["rows"][name]
    tokens = row["batch"] * find_topology(row["slice"]).devices * row["seq"]
    words = [
        *(BASE + ROWS["models"][row["model"]]),
        f"tpu.accelerator_type={row['slice']}",
        f"loop.total_batch_tokens={tokens}",
        f"loop.seq_len={row['seq']}",
        f"model.max_seq_len={max(8192, row['seq'])}",
        f"model.remat={row['remat']}",
        f"mesh.tensor={row.get('tensor', 1)}",
    ]
    return (
        words if whole else [*words, f"model.num_layers={PERIODS * len(experiment_of(words).model.attention_pattern)}"]
    )


def experiment_of(words: list[str]) -> Any:
    """Return the run of a row."""
    from conf.schema.training.run_yaml import RunFile
    from controller.config.compose import compose
    from controller.config.run_yaml import render

    config, problems = compose(words)
    if config is None:
        raise SystemExit("\n".join(str(problem) for problem in problems))
    anywhere = {name: name for name in re.findall(r"assets://([^/\"]+)", config.model_dump_json())}
    return RunFile.model_validate(yaml.safe_load(render(config, "forecast", "bucket", anywhere)))


def compile_row(name: str, *, whole: bool) -> None:
    """Compile the update of a row; the parent ends this process as soon as the schedule is written."""
    import jax

    from trainer.fit import topologies
    from trainer.fit.remat import programs, with_model_overrides
    from trainer.models import attention

    experiment = experiment_of(words_of(name, whole=whole))
    mesh = topologies.slice_mesh(experiment)
    experiment = with_model_overrides(experiment, attention=attention.choose_kernel(experiment.model, "tpu"))
    update = next(p for p in programs(experiment, mesh) if p.name == "update")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        update.function.lower(*update.arguments).compile()


def record(name: str, *, whole: bool) -> None:
    """Compile a row in another process, and record what its schedule takes."""
    began, row = time.perf_counter(), ROWS["rows"][name]
    text = schedule_text(name, whole=whole)
    if text is None:
        print(f"{name}: not compiled within {SECONDS_AT_MOST} s", flush=True)
        return
    rates = device_rates(find_topology(row["slice"]))
    model, module = experiment_of(words_of(name, whole=True)).model, schedule.parse(text)
    layers = len(model.attention_pattern), model.num_layers
    found = step_time(module, rates) if whole else stretched(module, rates, layers)
    print(f"{name}: {asdict(found)} total {found.total:.3f} in {time.perf_counter() - began:.0f} s", flush=True)
    if not whole:
        known = json.loads(FIXTURE.read_text()) if FIXTURE.exists() else {}
        known[name] = facts(name) | {"computed": asdict(found)}
        FIXTURE.write_text(json.dumps({n: known[n] for n in ROWS["rows"] if n in known}, indent=1) + "\n")


def stretched(module: schedule.Module, rates: Rates, layers: tuple[int, int]) -> StepTime:
    """Return the time with all layers, from a module with PERIODS periods; `layers` of one period and of all."""
    period, whole = layers
    factor = whole / (period * PERIODS)
    for name, body in module.computations.items():
        if schedule.trip_count(module, name) == PERIODS:  # a loop's condition
            limits = {n: i for n, i in body.items() if i.opcode == "constant" and i.rest.startswith(f"{PERIODS})")}
            body |= {n: replace(i, rest=f"{whole / period:g})") for n, i in limits.items()}
    total, entry = step_time(module, rates), module.computations[module.entry]
    outside = {
        n: i for n, i in entry.items() if i.opcode != "while" and _leading(i.shape) in (PERIODS, PERIODS * period)
    }
    shapes = {n: replace(i, opcode="parameter") for n, i in entry.items() if n not in outside}
    stacked = schedule.Module("stacked", module.computations | {"stacked": shapes | outside})
    return total + step_time(stacked, rates).times(factor - 1)


def _leading(shape: str) -> int:
    return next((dimensions[0] for _, dimensions, _ in schedule.shapes(shape) if dimensions), 0)


def schedule_text(name: str, *, whole: bool) -> str | None:
    """Return the compiler's schedule of a row; None if it was not written in time."""
    with tempfile.TemporaryDirectory() as folder:
        flags = " ".join(ROWS["flags"][flag] for flag in ROWS["rows"][name]["flags"])
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_hlo_text=true"
        command = [sys.executable, "-m", "tests.bench.forecast", "child", name, *(["--whole"] if whole else [])]
        child = subprocess.Popen(command, env=os.environ | {"LIBTPU_INIT_ARGS": f"{dump} {flags}"})
        written, size = list[Path](), -1
        try:
            for _ in range(SECONDS_AT_MOST // 2):
                time.sleep(2)
                written = [file for file in Path(folder).glob("*-TLP-hlo.txt") if file.stat().st_size > 100_000]
                if written and written[-1].stat().st_size == size:
                    return written[-1].read_text()
                if child.poll() is not None:
                    return None
                size = written[-1].stat().st_size if written else -1
            return None
        finally:
            child.kill()
            child.wait()


def facts(name: str) -> dict[str, float]:
    """Return a row's published seconds per step, and its model's operations per token in an update.

    Where only TFLOP/s are published, they are MaxText's: with attention to all tokens of a row, masked or not.
    """
    row = ROWS["rows"][name]
    each, slice_ = token_flops(experiment_of(words_of(name, whole=True)).model, row["seq"]), find_topology(row["slice"])
    if "seconds" in row:
        return {"published": row["seconds"], "flops_per_token": each}
    tokens = row["batch"] * slice_.devices * row["seq"]
    return {"published": each * tokens / (row["tflops"] * 1e12 * slice_.chips), "flops_per_token": each}


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


def judgement(rows: dict[str, Any]) -> list[str]:
    """Return the table for docs/performance.md, and the figures that the bars are about."""
    lines = ["| row | role | published s | forecast s | error |", "|---|---|---|---|---|"]
    for role in ("calibrate", "judge"):
        for name, ratio in ratios(rows, role).items():
            published = rows[name]["published"]
            lines.append(f"| {name} | {role} | {published:.2f} | {published / ratio:.2f} | {1 / ratio - 1:+.0%} |")
    judged = ratios(rows, "judge").values()
    errors = [abs(1 / ratio - 1) for ratio in judged]
    (right, pairs), (right_flop, pairs_flop) = ordered_pairs(rows), ordered_pairs(rows, per_flop=True)
    return [
        *lines,
        f"factors {factors(rows)}, interval {min(judged):.2f} to {max(judged):.2f}",
        f"{len(errors)} judged rows: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}; "
        f"order of $ per token right in {right} of {pairs} pairs, of $ per operation in {right_flop} of {pairs_flop}",
        f"not compiled: {', '.join(name for name in ROWS['rows'] if name not in rows) or 'none'}",
    ]
