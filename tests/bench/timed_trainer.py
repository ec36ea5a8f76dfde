"""The trainer, which also leaves the CPU seconds of its process at each line of metrics of an update.

python -m tests.bench.timed_trainer run.yaml CPU.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from trainer import main
from trainer.telemetry.metrics import MetricsLogger


def run() -> None:
    result, lines = Path(sys.argv.pop()), list[dict[str, Any]]()
    log = MetricsLogger.log

    def log_and_note(self: MetricsLogger, step: int, phase: str, **values: Any) -> None:
        if phase == "train":
            lines.append({"step": step, "cpu": time.process_time()})
            result.write_text(json.dumps(lines))
        log(self, step, phase, **values)

    MetricsLogger.log = log_and_note
    main.main()


if __name__ == "__main__":
    run()
