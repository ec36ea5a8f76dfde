"""Start-up report, which reveals mistakes in a run's first five minutes, before they cost hours.

In order: bucket access; device memory by phase; compilation progress; the policy's accuracy; two full responses; ratio
and KL of the first update; agreement of sampler and trainer; the fraction of samples without signal; where the time
goes, and the estimated end.
"""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh

from conf.formats import LocalRunFileError
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.run_yaml import PodFacts
from trainer.checkpoint.storage import array_handler
from trainer.distributed.runtime import shard_batch
from trainer.rewards.extract import extract_answer
from trainer.step.program import Program

GIB = 2**30
NUM_COMPILERS = 4
"""Programs that compile at the same time; each needs several cores and gigabytes at times."""
RATIO_TOLERANCE = 0.02
"""Allowed distance of the largest ratio from 1 at the first update: bfloat16 rounds differently between programs."""
KL_TOLERANCE = 1e-3


def log_on_main(*lines: str) -> None:
    """Print lines to the log of process 0."""
    if jax.process_index() == 0:
        for line in lines:
            print(line, flush=True)


def probe_bucket(folder: str, mesh: Mesh) -> None:
    """Write an array as checkpoints do, read it back, and remove it.

    Raises LocalRunFileError on failure.
    """
    began, path = time.perf_counter(), epath.Path(folder) / "probe"
    if not folder.startswith("gs://"):
        path = path.resolve()
    wanted = shard_batch({"probe": np.arange(mesh.size, dtype=np.float32)}, mesh)
    try:
        with ocp.Checkpointer(array_handler()) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(wanted), force=True)
            how = ocp.checkpoint_utils.construct_restore_args(wanted)
            found = checkpointer.restore(path, args=ocp.args.PyTreeRestore(wanted, restore_args=how))
    except Exception as error:  # any error of the storage client
        raise LocalRunFileError(f"dir: cannot write and read {folder}: {type(error).__name__}: {error}") from error
    pairs = zip(wanted["probe"].addressable_shards, found["probe"].addressable_shards, strict=True)
    if any((np.asarray(a.data) != np.asarray(b.data)).any() for a, b in pairs):
        raise LocalRunFileError(f"dir: {folder} returns different data than was written to it")
    if jax.process_index() == 0:
        path.rmtree()
    log_on_main(f"bucket: written to and restored from {folder} in {time.perf_counter() - began:.1f} s")


def log_memory(programs: Sequence[Program], pod: PodFacts) -> None:
    """Log the bytes on a device in each phase, excluding temporaries."""
    limit = pod.hbm_bytes_per_chip
    if (stats := jax.local_devices()[0].memory_stats()) and "bytes_limit" in stats:
        limit = stats["bytes_limit"]
    phases = ", ".join(f"{p.name} {(p.argument_bytes + p.resident_bytes) / GIB:.3g}" for p in programs)
    log_on_main(f"memory per device, GiB{f' of {limit / GIB:.2f}' if limit else ''}, without temporaries: {phases}")


class Compilation:
    """Programs that compile in the background, while data, weights or a checkpoint are read."""

    def __init__(self, programs: Iterable[Program]) -> None:
        """Trace the programs here, since the mesh in context belongs to a thread, and compile them in others."""
        self._began = time.perf_counter()
        pool = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="compile")
        self._programs = [
            (program, pool.submit(_compile, program.function.lower(*program.arguments)))
            for program in programs
            if program.function
        ]
        pool.shutdown(wait=False)

    def wait(self, costs: dict[str, float]) -> dict[str, Any]:
        """Return the compiled programs by name. costs: receives compile_time, in seconds until all are ready."""
        ready, ended = dict[str, Any](), self._began
        for left, (program, future) in zip(range(len(self._programs) - 1, -1, -1), self._programs, strict=True):
            ready[program.name], seconds, at = future.result()
            ended = max(ended, at)
            peak = (ready[program.name].memory_analysis().peak_memory_in_bytes + program.resident_bytes) / GIB
            log_on_main(f"compiled {program.name} in {seconds:.1f} s, {peak:.3g} GiB per device; {left} to go")
        log_on_main("compiled all programs; running the first step")
        costs["compile_time"] = ended - self._began
        return ready


def _compile(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, float, float]:
    """Return the program, the seconds it took, and when it was ready."""
    began = time.perf_counter()
    compiled = lowered.compile()
    return compiled, time.perf_counter() - began, time.perf_counter()


def format_transcripts(examples: Iterable[tuple[Any, float]]) -> list[str]:
    """Format full prompts and responses with their extracted answers and rewards."""
    lines = []
    for sample, reward in examples:
        found, right = extract_answer(sample.text), sample.question.answer
        lines += [
            f"--- prompt\n{sample.question.prompt}",
            f"--- response\n{sample.text}",
            f"--- its answer: {found!r}; right: {right!r}; reward {reward:g}",
        ]
    return lines


def check_first_update(values: dict[str, float], loop: GrpoLoop) -> list[str]:
    """Return a warning with its meaning for each metric of update 1 that is off."""
    kl = values.get("kl", 0.0)  # unknown without `loop.kl_coef`
    lines = [
        f"update 1: {f'KL {kl:.2g}, ' if loop.kl_coef else ''}"
        f"ratio {values['ratio_min']:.6g} to {values['ratio_max']:.6g}; "
        f"sampler and trainer differ by {values['sampler_trainer_logp_diff']:.2g} nats per token, at most "
        f"{values['sampler_trainer_logp_diff_max']:.2g}",
        f"truncated {values['truncated']:.1%}, groups of equal rewards {values['zero_variance_groups']:.1%}",
    ]
    if not abs(kl) <= KL_TOLERANCE:  # nor may any of these be NaN
        lines.append(
            f"WARNING: the KL to the reference is {kl:.2g}, not 0: policy and reference start from different weights, "
            "or are computed differently"
        )
    off = max(abs(values["ratio_min"] - 1), abs(values["ratio_max"] - 1))
    if not off <= RATIO_TOLERANCE and loop.old_logprobs == "trainer":
        lines.append(
            f"WARNING: ratios deviate from 1 by up to {off:.2g} before the first update: the update computes different "
            "log-probabilities than the program that scored the samples"
        )
    elif not off <= RATIO_TOLERANCE:
        lines.append(
            f"WARNING: ratios deviate from 1 by up to {off:.2g} before the first update: sampler and trainer compute "
            "different log-probabilities; set loop.old_logprobs=trainer, or loop.rollout_correction"
        )
    if values["truncated"] > 0.5:
        lines.append("WARNING: most responses were cut off: raise loop.max_new_tokens, or set loop.sampler.stop")
    return lines


def time_report(values: dict[str, float], updates_to_go: int) -> str:
    """Return where an update's time goes, and the run's estimated end, excluding evaluations."""
    parts = ", ".join(
        f"{name} {values[f'{name}_time'] / values['step_time']:.0%}"
        for name in ("rollout", "reward", "score", "update", "other")
    )
    hours, rest = divmod(int(updates_to_go * values["step_time"]), 3600)
    return (
        f"time per update: {values['step_time']:.3g} s ({parts}); {values.get('rollout_tokens_per_second', 0):,.0f} "
        f"tokens/s sampled, {values.get('train_tokens_per_second', 0):,.0f} tokens/s trained on; {updates_to_go} "
        f"updates to go: {hours}:{rest // 60:02}:{rest % 60:02}"
    )
