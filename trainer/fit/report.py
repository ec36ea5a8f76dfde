"""Compile a run for TPU on a machine without one: whether it fits the chips, and what it costs.

    python -m trainer.fit run.yaml [--json] [--only update,decode] [--out verdict.json] [--slices v5litepod-8,v6e-8]

libtpu compiles each program of the run for its slice. The report shows, per chip, arguments, temporaries and the peak
with everything else in memory, beside the memory that a chip has. If a program does not fit, the report names the first
override that helps. --slices compares several slices.
Exit codes: 0 everything fits (with --slices: on one of them), 2 it does not, or cannot be compiled.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from conf.formats import FORMAT, RunFileError
from conf.schema.topology import UnknownTypeError, find_topology
from conf.schema.training.loop import CustomLoop, PuzzleLoop
from conf.schema.training.model import Model
from conf.schema.training.run_yaml import RunFile, load
from conf.strict_json import dumps
from trainer.distributed import mesh as meshes
from trainer.fit import slices
from trainer.fit.memory import GIB, CompilerError, MemoryReport, measure_all, require_compiler, slice_mesh
from trainer.fit.remat import USABLE_HBM_FRACTION, remat_candidates, remat_policies, with_model_overrides
from trainer.models import attention

Overrides = dict[str, Any]
"""Dotted keys and their values, as on the command line."""

MeasureFn = Callable[[RunFile, Overrides, set[str]], list[MemoryReport]]
"""Measures the experiment with overrides: the programs with the given names, or all if there are none."""

MIN_LOGIT_CHUNK = 16


def find_fix(
    experiment: RunFile, verdicts: Iterable[MemoryReport], judge: MeasureFn
) -> tuple[Overrides, list[MemoryReport]] | None:
    """Return the first overrides with which all programs fit, and their verdicts; None if none help.

    Order: save less for the backward pass, smaller chunks of logits, gradient accumulation, weights sharded over more
    devices. None of them changes the results.

    experiment: with an explicit `model.remat` policy; verdicts: the programs that do not fit are measured again. Each
    kind of fix is tried at its strongest first; if that is not enough, it stays and the next kind is added.
    """
    failing = {v.name for v in verdicts if not v.fits}

    def verdicts_with(overrides: Overrides, names: set[str]) -> list[MemoryReport]:
        return judge(with_overrides(experiment, overrides), overrides, names)

    taken: Overrides = {}
    for kind in (stronger_remat_candidates, logit_chunk_candidates, micro_batch_candidates, fsdp_candidates):
        options = [taken | option for option in kind(with_overrides(experiment, taken))]
        if not options:
            continue
        taken = options[-1]
        if not _all_fit(verdicts_with(taken, failing)):
            continue
        for option in options:
            if option is taken or _all_fit(verdicts_with(option, failing)):
                found = verdicts_with(option, set())
                if _all_fit(found):
                    return option, found
    return None


def format_overrides(overrides: Overrides) -> list[str]:
    return [f"{key}={value}" for key, value in overrides.items()]


def with_overrides(experiment: RunFile, overrides: Overrides) -> RunFile:
    """Return the experiment with other values for some keys."""
    raw = experiment.model_dump()
    for key, value in overrides.items():
        *sections, name = key.split(".")
        at = raw
        for section in sections:
            at = at[section]
        at[name] = value
    return RunFile.model_validate(raw)


def stronger_remat_candidates(experiment: RunFile) -> Iterator[Overrides]:
    """Yield policies that save less than the experiment's."""
    policies = remat_policies(experiment.model)
    kept = "outputs" if experiment.model.remat == "offload" else experiment.model.remat
    for policy in policies[policies.index(kept) + 1 :]:
        yield {"model.remat": policy}


def logit_chunk_candidates(experiment: RunFile) -> Iterator[Overrides]:
    """Yield half, a quarter and an eighth of the chunk."""
    if not isinstance(experiment.model, Model):
        return
    for share in (2, 4, 8):
        if experiment.model.logit_chunk // share >= MIN_LOGIT_CHUNK:
            yield {"model.logit_chunk": experiment.model.logit_chunk // share}


def micro_batch_candidates(experiment: RunFile) -> Iterator[Overrides]:
    """Yield fewer rows per device at a time, down to one."""
    if isinstance(experiment.loop, CustomLoop | PuzzleLoop):
        return
    sizes = meshes.axis_sizes(experiment.mesh, find_topology(experiment.pod.accelerator_type).devices)
    rows = experiment.loop.rows // (sizes["data"] * sizes["fsdp"] * sizes["expert"])
    for size in range((experiment.loop.micro_batch_size or rows) - 1, 0, -1):
        if rows % size == 0:
            yield {"loop.micro_batch_size": size}


def fsdp_candidates(experiment: RunFile) -> Iterator[Overrides]:
    """Yield weights sharded over all devices that split the batch."""
    sizes = meshes.axis_sizes(experiment.mesh, find_topology(experiment.pod.accelerator_type).devices)
    if sizes["data"] > 1:
        yield {"mesh.data": 1, "mesh.fsdp": sizes["data"] * sizes["fsdp"]}


def _all_fit(verdicts: Iterable[MemoryReport]) -> bool:
    return all(v.fits for v in verdicts)


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
        chosen, verdicts = measure_run(experiment, slice_mesh(experiment), only)
        short = [v for v in verdicts if not v.fits]
        fix = None if only or not short else find_fix(chosen, verdicts, _measure)
    except UnknownTypeError as error:
        print(f"--slices: {error}", file=sys.stderr)
        return 2
    except (RunFileError, CompilerError) as error:
        print(error, file=sys.stderr)
        return 2
    row = slices.report(chosen, find_topology(chosen.pod.accelerator_type), verdicts, options.zone, spot=options.spot)
    found = report_json(experiment, chosen, verdicts, fix) | {"forecast": row.forecast and row.forecast.to_json()}
    if options.out:
        options.out.write_text(dumps(found, indent=1))
    lines = report_lines(chosen, verdicts)
    if not only and not short:
        lines += ["", *(slices.table([row]) if row.forecast else [row.why])]
    print(dumps(found, indent=1) if options.json else "\n".join(lines))
    if short and not options.json:
        print("\n".join(["", *failure_lines(chosen, short, fix, looked=not only)]))
    return 2 if short else 0


def _compare(experiment: RunFile, options: argparse.Namespace) -> int:
    """Print the run's time and price on several slices."""

    def measure(candidate: RunFile) -> tuple[RunFile, list[MemoryReport]]:
        found = measure_run(candidate, slice_mesh(candidate), set())
        _print_progress(candidate.pod.accelerator_type, found[1])
        return found

    require_compiler()
    names = list(dict.fromkeys(filter(None, options.slices.split(","))))
    rows = slices.compare(experiment, names, measure, options.zone, spot=options.spot)
    rows.sort(key=slices.sort_key(options.sort))
    found = {"format": FORMAT, "slices": [row.to_json() for row in rows]}
    if options.out:
        options.out.write_text(dumps(found, indent=1))
    print(dumps(found, indent=1) if options.json else "\n".join(slices.table(rows)))
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
    fix: tuple[Overrides, list[MemoryReport]] | None,
) -> dict[str, Any]:
    """Return the verdicts for programs; `fix` is null if everything fits, or if nothing helped."""
    return {
        "format": FORMAT,
        "accelerator_type": experiment.pod.accelerator_type,
        "remat": chosen.model.remat,
        "usable_gib": round(USABLE_HBM_FRACTION * (experiment.pod.hbm_bytes_per_chip or 0) / GIB, 3),
        "programs": [v.to_json() for v in verdicts],
        "fix": fix and {"overrides": format_overrides(fix[0]), "programs": [v.to_json() for v in fix[1]]},
    }


def report_lines(chosen: RunFile, verdicts: list[MemoryReport]) -> list[str]:
    title = f"{chosen.pod.accelerator_type}, remat {chosen.model.remat}; GiB per chip, FLOPs of all chips"
    wide = max([12, *(len(v.name) + 2 for v in verdicts)])
    head = f"{'program':<{wide}}{'fits':<6}{'peak':>8}{'of':>8}{'arguments':>11}{'temps':>8}{'beside':>8}"
    rows = [
        f"{v.name:<{wide}}{'yes' if v.fits else 'NO':<6}{v.peak_gib:>8.2f}{v.hbm_gib:>8.2f}{v.argument_gib:>11.2f}"
        f"{v.temp_gib:>8.2f}{v.beside_gib:>8.2f}{v.flops:>11.2e}{v.recomputed_flops:>12.2e}{v.compile_seconds:>7.0f} s"
        for v in verdicts
    ]
    return [title, f"{head}{'FLOPs':>11}{'recomputed':>12}{'compile':>9}", *rows]


def failure_lines(
    chosen: RunFile,
    short: list[MemoryReport],
    fix: tuple[Overrides, list[MemoryReport]] | None,
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
            f"it fits with {' '.join(format_overrides(overrides))}:",
            *report_lines(chosen, verdicts),
        ]
    if looked:
        said.append(
            "no other model.remat, model.logit_chunk, loop.micro_batch_size or mesh.fsdp makes it fit; reduce the"
        )
        said.append("batch, the sequences or the model, or choose a larger slice")
    return said


def _measure(experiment: RunFile, overrides: Overrides, names: set[str]) -> list[MemoryReport]:
    verdicts = measure_all(experiment, slice_mesh(experiment), names)
    _print_progress(" ".join(format_overrides(overrides)), verdicts)
    return verdicts


def _print_progress(what: str, verdicts: list[MemoryReport]) -> None:
    """Print what came of one choice, before the next one is tried."""
    said = ", ".join(f"{v.name} {v.peak_gib:.2f} GiB{'' if v.fits else ', too large'}" for v in verdicts)
    print(f"tried {what}: {said}", file=sys.stderr, flush=True)
