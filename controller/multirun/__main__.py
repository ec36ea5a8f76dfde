"""`python -m controller.multirun REQUEST ANSWERS LIFELINE`: a program that Hydra's launcher starts.

It is a process of its own, because the app's process has modules, signals and a Hydra of its own. LIFELINE is the
number of a pipe that the launcher holds open: when it closes, because of Ctrl-C or a kill, this process detaches from
the jobs.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

from controller.core.errors import ConfigError, SlipwayError
from controller.core.formats import dump
from controller.core.printable import sanitized_output
from controller.multirun.jobs import Request, release_pods, run_jobs


def main(request_file: str, answers_file: str, lifeline: str) -> int:
    """Run the jobs of the request and write the answers; return the exit code of `slipway`."""
    os.umask(0o077)
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to both; the launcher decides
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    threading.Thread(target=_watch, args=(int(lifeline),), daemon=True, name="lifeline").start()
    try:
        request = Request.from_json(json.loads(Path(request_file).read_text()), request_file)
        os.chdir(request.folder)
        if not request.jobs:
            release_pods(request)
            return 0
        answers = [answer.to_json() for answer in run_jobs(request)]
        Path(answers_file).write_text(dump({"jobs": answers}))
    except SlipwayError as error:
        for line in error.problems if isinstance(error, ConfigError) else [str(error)]:
            print(f"error: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _watch(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns at the end of the file
    os.kill(os.getpid(), signal.SIGUSR1)


if __name__ == "__main__":
    with sanitized_output():
        sys.exit(main(*sys.argv[1:]))
