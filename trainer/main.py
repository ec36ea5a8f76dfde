"""Start-up: read run.yaml, join the other workers, check, train. Every worker runs this same program.

Exit codes: 0 done; 2 bad run.yaml; 3 wrong devices; 4 workers disagree; 5 hardware has changed
bits on a worker; 6 no sampler is heard from; 7 a pod of samplers finds no trainer; 75 preempted, state saved; 1
anything else, with a traceback.
"""

import argparse
import faulthandler
import logging
import os
import signal
import sys
import traceback
from pathlib import Path

import jax

from conf.formats import LocalRunFileError, RunFileError
from conf.schema.training.run_yaml import RunFile, load
from trainer.checkpoint.outage import OutageError, ReplacedError, wait_for_storage
from trainer.checkpoint.storage import RunStorage, find_credentials
from trainer.corpus import files
from trainer.distributed import agreement, runtime
from trainer.distributed import mesh as meshes
from trainer.distributed.checksums import CorruptionError, DisagreementError
from trainer.distributed.preemption import PREEMPTED_EXIT_CODE, PreemptedError
from trainer.extension import add_modules
from trainer.fit import remat
from trainer.loops import load_loop
from trainer.policy.run_files import write_run_files
from trainer.rl.remote.identity import CHILD_VARIABLE, is_sampler, supervise
from trainer.rl.remote.leases import SamplersLostError, TaskLostError
from trainer.sampler import LogitsError
from trainer.step.compile_cache import CompileCache
from trainer.step.nan_diagnosis import DivergedError
from trainer.telemetry import startup_report
from trainer.telemetry.metrics import MetricsLogger, run_folder

JOIN_TIMEOUT_SECONDS = 300
"""Seconds a worker waits for the others, whose VMs may become ready minutes apart."""


def main() -> None:
    """Run the experiment that the first argument names, and end the process with an exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Train as run.yaml specifies.")
    parser.add_argument("run_file", type=Path, metavar="run.yaml", help="what to train, as `slipway up` wrote it")
    path = parser.parse_args().run_file
    faulthandler.register(signal.SIGQUIT)  # SIGQUIT prints every thread's stack and does nothing else
    # force: Orbax logs while it is imported, and so installs a handler without the time
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True)
    add_modules()
    try:
        experiment = load(path)
    except RunFileError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    try:
        sampler = is_sampler(experiment)
        experiment = experiment.on_workers(1 if sampler else experiment.pod.workers - experiment.sampler_workers)
        if sampler and CHILD_VARIABLE not in os.environ:
            runtime.exit_now(supervise(path))
        files.use_buckets(experiment.checkpoint.max_outage_hours)
        runtime.check_xla_flags()
        runtime.set_cpu_threads(experiment.pod)
        runtime.keep_freed_memory(experiment.pod)
        runtime.join_processes(experiment.pod, JOIN_TIMEOUT_SECONDS)
        find_credentials(experiment.dir)
        wait_for_storage(RunStorage(experiment.dir), experiment.checkpoint.max_outage_hours)
        agreement.check_devices(experiment.pod)
        if sampler:
            from trainer.rl.remote import worker  # most runs have no samplers

            runtime.exit_now(worker.run(experiment))
        agreement.check_agreement(path, experiment)
        train(experiment, run_folder(path, experiment.id))
        code = 0
    except LocalRunFileError as error:
        runtime.exit_now(2, error)
    except (RunFileError, agreement.WrongDevicesError, DisagreementError, CorruptionError) as error:
        runtime.print_error(error)
        code = {agreement.WrongDevicesError: 3, DisagreementError: 4, CorruptionError: 5}.get(type(error), 2)
    except PreemptedError:
        code = PREEMPTED_EXIT_CODE
    except (DivergedError, LogitsError, OutageError, ReplacedError, TaskLostError, SamplersLostError) as error:
        runtime.print_error(error)
        code = 6 if isinstance(error, SamplersLostError) else 1
    except BaseException:  # whatever the error, the others must not wait for this worker
        runtime.exit_now(1, traceback.format_exc())
    runtime.exit_together(code)


def train(experiment: RunFile, folder: Path) -> None:
    """Run the experiment's loop after the processes have joined; files of this worker go to `folder`.

    Raises RunFileError before the first step if the experiment cannot run on these devices.
    """
    mesh = meshes.build_mesh(experiment.mesh)
    first = jax.process_index() == 0
    if first:
        write_run_files(experiment)
    cache = CompileCache(folder, experiment.dir, experiment.pod, writes=first) if experiment.compile_cache else None
    log = MetricsLogger(folder, experiment.dir, writes=first)
    log.phases.listen()
    log.phases.enter("prepare")
    try:
        with jax.set_mesh(mesh):
            load_loop(experiment.loop).run(remat.resolve_remat(experiment, mesh), mesh, log)
    except PreemptedError:
        _report_end(log, cache)  # what this attempt compiled is what the next one, on other VMs, would compile
        raise
    finally:
        log.close()
    _report_end(log, cache)


def _report_end(log: MetricsLogger, cache: CompileCache | None) -> None:
    """Keep what was compiled, and print where the time went; all processes must call it."""
    lines = [cache.close()] if cache else []
    startup_report.log_on_main(*lines, *log.phases.close())
