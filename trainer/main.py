"""Start-up: read run.yaml, join the other workers, check, train. Every worker runs this same program.

Exit codes: 0 done; 2 bad run.yaml; 3 wrong devices; 4 workers disagree; 75 told that the VM goes away, and saved;
1 anything else, with a traceback.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import signal
import sys
import traceback
from pathlib import Path

import jax

from conf.runfile import OwnError, RunFile, RunFileError, load
from trainer import distributed, loops, remat, startup, storage, wandb_run
from trainer import mesh as meshes
from trainer.checksums import DisagreementError
from trainer.compilation import CompileCache
from trainer.diverged import DivergedError
from trainer.metrics import Metrics, run_folder
from trainer.notice import SAVED, NoticedError

JOIN_SECONDS = 300
"""How long a worker waits for the others: their VMs may have become ready minutes apart."""


def main() -> None:
    """Run the experiment that the first argument names, and end the process with an exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Train what run.yaml says.")
    parser.add_argument("run_file", type=Path, metavar="run.yaml")
    path = parser.parse_args().run_file
    faulthandler.register(signal.SIGQUIT)  # who sends it wants to know where every thread is, and nothing else
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        experiment = load(path)
    except RunFileError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    try:
        distributed.spare_threads(experiment.pod)
        distributed.join(experiment.pod, JOIN_SECONDS)
        storage.be_patient()
        startup.check_devices(experiment.pod)
        startup.check_agreement(path, experiment)
        train(experiment, run_folder(path, experiment.id))
        code = 0
    except OwnError as error:
        print(error, file=sys.stderr)
        distributed.abandon(2)
    except (RunFileError, startup.WrongDevicesError, DisagreementError) as error:
        print(error, file=sys.stderr)
        code = {startup.WrongDevicesError: 3, DisagreementError: 4}.get(type(error), 2)
    except NoticedError:
        code = SAVED
    except DivergedError as error:
        print(error, file=sys.stderr)
        code = 1
    except BaseException:  # whatever ended this worker, the others must not wait for it
        traceback.print_exc()
        distributed.abandon(1)
    distributed.leave(code)


def train(experiment: RunFile, folder: Path) -> None:
    """Run the experiment's loop, on processes that have joined; files of this worker go to `folder`.

    Raises RunFileError before the first step where the experiment cannot be run on these devices.
    """
    mesh = meshes.build(experiment.mesh)
    first = jax.process_index() == 0
    cache = CompileCache(folder, experiment.dir, experiment.pod, writes=first) if experiment.compile_cache else None
    log = Metrics(folder, experiment.dir, writes=first, there=wandb_run.start(experiment, folder) if first else None)
    try:
        with jax.set_mesh(mesh):
            loops.module(experiment.loop.kind).run(remat.resolved(experiment, mesh), mesh, log)
    finally:
        log.close()
    if cache:
        cache.close()
