"""Texts and bytes that the workers exchange through JAX's coordination service, on the hosts: nothing is compiled."""

import time
from functools import cache
from typing import Any

import jax

POLL_SECONDS = 2.0
"""How long one request for a value waits on the server."""
GATHER_TIMEOUT_SECONDS = 24 * 3600
"""Only a bound: JAX ends the others within seconds after a worker dies."""


class Exchange:
    """This process's access to the coordination service, which runs on worker 0 and ends with it."""

    def __init__(self, client: Any, process: int, processes: int) -> None:
        self._client, self._processes = client, processes
        self.process = process
        self._num_gathered = 0

    def gather(self, text: str) -> list[str]:
        """Return every process's text, in process order; all must call it, in the same order."""
        number, self._num_gathered = self._num_gathered, self._num_gathered + 1
        folder = f"slipway/gather/{number}/"
        self._client.key_value_set_bytes(f"{folder}{self.process:06}", text.encode())
        self._client.wait_at_barrier(f"slipway/gather/{number}", GATHER_TIMEOUT_SECONDS * 1000)
        rows = sorted(self._client.key_value_dir_get_bytes(folder))
        if self.process == 0 and number:  # all have read the previous texts, or they would not be here
            self._client.key_value_delete(f"slipway/gather/{number - 1}/")
        assert len(rows) == self._processes, f"{len(rows)} of {self._processes} texts"
        return [value.decode() for _, value in rows]

    def put(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(f"slipway/{key}", value, allow_overwrite=True)

    def get(self, key: str, timeout_seconds: float) -> bytes | None:
        """Return the value, or None if no process has put it within the timeout."""
        given_up = time.monotonic() + timeout_seconds
        while True:
            left = min(POLL_SECONDS, max(0.001, given_up - time.monotonic()))
            try:
                return self._client.blocking_key_value_get_bytes(f"slipway/{key}", int(left * 1000) or 1)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if time.monotonic() >= given_up:
                return None


@cache
def connect() -> Exchange:
    """Return the exchange of this process. Call it after the processes have joined."""
    from jax._src import distributed  # JAX has no public name for the client

    state = distributed.global_state
    return Exchange(state.client, state.process_id, jax.process_count())
