"""Worker process for checks: `python -m trainer.rewards.worker SECONDS`; reads and writes JSON lines.

A check that exceeds its limit kills the process; `pool` starts another one.
"""

import json
import math
import os
import signal
import sys
from typing import Any

from trainer.rewards.functions import arguments, resolve
from trainer.rewards.process import cpu_time_limit, install_limits, uncounted_cpu_time


def main() -> None:
    """Answer requests until the pipe closes. Output of rewards goes to stderr."""
    seconds = float(sys.argv[1])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to all of the run: a notice, which the trainer answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    install_limits()
    for line in sys.stdin:
        name, response, answer, prompt, row = json.loads(line)
        found = _check(name, response, answer, prompt, row, seconds)
        print(json.dumps(found), file=answers, flush=True)


def _check(name: str, response: str, answer: str, prompt: str, row: dict[str, Any], seconds: float) -> float | str:
    try:
        with uncounted_cpu_time():
            reward, more = resolve(name), arguments(name, prompt, row)
        with cpu_time_limit(seconds):
            score = float(reward(response, answer, **more))
    except (Exception, SystemExit) as error:
        return repr(error)[:500]
    return score if math.isfinite(score) else f"a score of {score}"


if __name__ == "__main__":
    main()
