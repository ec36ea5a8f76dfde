"""The trainer, whose bucket stops answering at a known point of a save.

OUTAGE: the method of `CheckpointManager` at whose call the outage begins, and the step of that save: `save 4`.
"""

import json
import os
import urllib.request
from typing import Any

import jax

from trainer import main
from trainer.checkpoint.manager import CheckpointManager

OUTAGE = {"key": "outage", "faults": [{"kind": "bucket_outage", "seconds": 86400}]}


def begin_outage() -> None:
    address = os.environ["EMULATED_CLOUD"] + "/emulator/faults"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(OUTAGE).encode(), headers, method="POST")
    urllib.request.urlopen(request).close()


def begin_outage_in(name: str, step: int) -> None:
    """Let the outage begin when worker 0 calls this method for this step; earlier checkpoints are complete."""
    method = getattr(CheckpointManager, name)

    def disturbed(self: Any, at: int, *arguments: Any) -> Any:
        if at == step and jax.process_index() == 0:
            self._manager.wait_until_finished()
            begin_outage()
        return method(self, at, *arguments)

    setattr(CheckpointManager, name, disturbed)


if __name__ == "__main__":
    method, step = os.environ["OUTAGE"].split()
    begin_outage_in(method, int(step))
    main.main()
