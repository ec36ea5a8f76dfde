"""Compile a run for TPU on a machine without one: whether it fits the chips, and what it costs.

    python -m trainer.fit run.yaml [--json] [--only update,decode] [--out verdict.json] [--slices v5litepod-8,v6e-8]

libtpu compiles each program of the run for its slice. The report shows, per chip, arguments, temporaries and the peak
with everything else in memory, beside the memory that a chip has. If a program does not fit, the report names the first
override that helps. --slices compares several slices.
Exit codes: 0 everything fits (with --slices: on one of them), 2 it does not, or cannot be compiled.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from conf.formats import FORMAT
from conf.schema.infra.topology import UnknownTypeError, find_topology
from conf.schema.training.model import Model
from conf.schema.training.run_yaml import RunFile, RunFileError, load
from trainer.fit import slices, suggestions, topologies
from trainer.fit.memory import GIB, MemoryReport, measure_all
from trainer.fit.remat import USABLE_HBM_FRACTION, remat_candidates, with_model_overrides
from trainer.models import attention


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="run.yaml", help="the run to compile")
    parser.add_argument("--json", action="store_true", help="print one JSON document to stdout")
    parser.add_argument(
        "--only", default="", metavar="NAMES", help="comma-separated names of programs; skips the search for a fix"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON document to this file")
    parser.add_argument("--slices", default="", metavar="TYPES", help="comma-separated accelerator types to compare")
    parser.add_argument("--sort", default="usd", choices=slices.SORT_KEYS, help="order of --slices")
    parser.add_argument("--zone", help="zone of the price; without a price there, the cheapest zone")
    parser.add_argument("--spot", action="store_true", help="spot prices")
    options = parser.parse_args(arguments)
    only = set(filter(None, options.only.split(",")))
    try:
        experiment = load(options.run)
        if experiment.sampler_workers or experiment.sampler_pods:
            raise RunFileError("loop.sampler.workers, pods: the compiler knows whole slices only; measure with 0")
        if options.slices:
            return _compare(experiment, options)
        chosen, verdicts = measure_run(experiment, topologies.slice_mesh(experiment), only)
        short = [v for v in verdicts if not v.fits]
        fix = None if only or not short else suggestions.find_fix(chosen, verdicts, _measure)
    except UnknownTypeError as error:
        print(f"--slices: {error}", file=sys.stderr)
        return 2
    except (RunFileError, topologies.CompilerError) as error:
        print(error, file=sys.stderr)
        return 2
    row = slices.report(chosen, find_topology(chosen.pod.accelerator_type), verdicts, options.zone, spot=options.spot)
    found = report_json(experiment, chosen, verdicts, fix) | {"forecast": row.forecast and row.forecast.to_json()}
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    lines = report_lines(chosen, verdicts)
    if not only and not short:
        lines += ["", *(slices.table([row]) if row.forecast else [row.why])]
    print(json.dumps(found, indent=1) if options.json else "\n".join(lines))
    if short and not options.json:
        print("\n".join(["", *failure_lines(chosen, short, fix, looked=not only)]))
    return 2 if short else 0


def _compare(experiment: RunFile, options: argparse.Namespace) -> int:
    """Print the run's time and price on several slices."""

    def measure(candidate: RunFile) -> tuple[RunFile, list[MemoryReport]]:
        found = measure_run(candidate, topologies.slice_mesh(candidate), set())
        _print_progress(candidate.pod.accelerator_type, found[1])
        return found

    topologies.require_compiler()
    names = list(dict.fromkeys(filter(None, options.slices.split(","))))
    rows = slices.compare(experiment, names, measure, options.zone, spot=options.spot)
    rows.sort(key=slices.sort_key(options.sort))
    found = {"format": FORMAT, "slices": [row.to_json() for row in rows]}
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1) if options.json else "\n".join(slices.table(rows)))
    return 0 if any(row.fits for row in rows) else 2


def measure_run(experiment: RunFile, mesh: Mesh, only: set[str]) -> tuple[RunFile, list[MemoryReport]]:
    """Compile every program, or those with the given names.

    With `model.remat: auto`, all use the policy with which the update fits at the least recomputation.
    """
    chosen, known = experiment, list[MemoryReport]()
    if isinstance(experiment.model, Model):
        chosen = with_model_overrides(experiment, attention=attention.choose_kernel(experiment.model, "tpu"))
    if experiment.model.remat == "auto":
        for candidate in remat_candidates(chosen):
            chosen, known = candidate, measure_all(candidate, mesh, {"update"})
            _print_progress(f"model.remat={candidate.model.remat}", known)
            if known[0].fits:
                break
    return chosen, measure_all(chosen, mesh, only, known)


def report_json(
    experiment: RunFile,
    chosen: RunFile,
    verdicts: list[MemoryReport],
    fix: tuple[suggestions.Overrides, list[MemoryReport]] | None,
) -> dict[str, Any]:
    """Return the verdicts for programs; `fix` is null if everything fits, or if nothing helped."""
    return {
        "format": FORMAT,
        "accelerator_type": experiment.pod.accelerator_type,
        "remat": chosen.model.remat,
        "usable_gib": round(USABLE_HBM_FRACTION * (experiment.pod.hbm_bytes_per_chip or 0) / GIB, 3),
        "programs": [v.to_json() for v in verdicts],
        "fix": fix and {"overrides": suggestions.format_overrides(fix[0]), "programs": [v.to_json() for v in fix[1]]},
    }


def report_lines(chosen: RunFile, verdicts: list[MemoryReport]) -> list[str]:
    title = f"{chosen.pod.accelerator_type}, remat {chosen.model.remat}; GiB per chip, FLOPs of all chips"
    head = f"{'program':<12}{'fits':<6}{'peak':>8}{'of':>8}{'arguments':>11}{'temps':>8}{'beside':>8}"
    rows = [
        f"{v.name:<12}{'yes' if v.fits else 'NO':<6}{v.peak_gib:>8.2f}{v.hbm_gib:>8.2f}{v.argument_gib:>11.2f}"
        f"{v.temp_gib:>8.2f}{v.beside_gib:>8.2f}{v.flops:>11.2e}{v.recomputed_flops:>12.2e}{v.compile_seconds:>7.0f} s"
        for v in verdicts
    ]
    return [title, f"{head}{'FLOPs':>11}{'recomputed':>12}{'compile':>9}", *rows]


def failure_lines(
    chosen: RunFile,
    short: list[MemoryReport],
    fix: tuple[suggestions.Overrides, list[MemoryReport]] | None,
    *,
    looked: bool,
) -> list[str]:
    """Return by how much it does not fit, and what helps, with the resulting figures."""
    said = [
        f"{v.name}: {v.short_gib:.2f} GiB over the limit of {v.hbm_gib * USABLE_HBM_FRACTION:.2f} GiB" for v in short
    ]
    if fix:
        overrides, verdicts = fix
        return [
            *said,
            f"it fits with {' '.join(suggestions.format_overrides(overrides))}:",
            *report_lines(chosen, verdicts),
        ]
    if looked:
        said.append(
            "no other model.remat, model.logit_chunk, loop.micro_batch_size or mesh.fsdp makes it fit; reduce the"
        )
        said.append("batch, the sequences or the model, or choose a larger slice")
    return said


def _measure(experiment: RunFile, overrides: suggestions.Overrides, names: set[str]) -> list[MemoryReport]:
    verdicts = measure_all(experiment, topologies.slice_mesh(experiment), names)
    _print_progress(" ".join(suggestions.format_overrides(overrides)), verdicts)
    return verdicts


def _print_progress(what: str, verdicts: list[MemoryReport]) -> None:
    """Print progress, since each program of a large model takes a minute."""
    said = ", ".join(f"{v.name} {v.peak_gib:.2f} GiB{'' if v.fits else ', too large'}" for v in verdicts)
    print(f"tried {what}: {said}", file=sys.stderr, flush=True)
