"""Two workers that share what worker 0 compiles; it is killed while it compiles. The argument is a folder."""

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

import jax
from jax._src import compiler

from tests.trainer.distributed.test_agreement import pod
from trainer.distributed.runtime import join_processes
from trainer.step.compile_cache import CompileCache


def die(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("not reached")


if __name__ == "__main__":
    facts = pod(workers=2, devices=4)
    join_processes(facts, 300)
    folder = Path(sys.argv[1]) / str(jax.process_index())
    if jax.process_index() == 0:
        compiler._compile_and_write_cache = die
    CompileCache(folder, str(Path(sys.argv[1]) / "bucket"), facts, writes=False)
    jax.jit(lambda x: x + 1)(1.0)
