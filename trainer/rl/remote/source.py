"""Rollouts that samplers on other workers draw, or that a journal has.

All processes of the trainer call every method.
"""

import os
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.run_yaml import RunFile, RunFileError
from trainer.checkpoint.storage import RunStorage
from trainer.distributed import agreement, exchange
from trainer.distributed.preemption import PREEMPTED_EXIT_CODE, PreemptedError
from trainer.distributed.runtime import gather_texts
from trainer.models.weights import Params
from trainer.rl.remote import journal, wire
from trainer.rl.remote.journal import Journal
from trainer.rl.remote.leases import Leases
from trainer.rl.remote.server import RolloutServer, own_token
from trainer.rl.rollouts import Rollout, RolloutGenerator
from trainer.sampler import Sampler
from trainer.telemetry.throughput import Stopwatch

WAIT_SECONDS = 0.5
"""Interval at which all processes look for a preemption notice while a rollout is missing."""
BROADCAST_SECONDS = 600.0
MISSING = "missing"


class RemoteRollouts:
    """The source of rollouts with `loop.sampler.workers` or `loop.replay`."""

    def __init__(
        self,
        experiment: RunFile,
        loop: GrpoLoop,
        generator: RolloutGenerator,
        sampler: Sampler,
        storage: RunStorage,
        watch: Stopwatch,
    ) -> None:
        """Listen for samplers on process 0. sampler: that of evaluations, which knows how weights are copied."""
        self._loop, self._generator, self._sampler, self._stopwatch = loop, generator, sampler, watch
        self._first, self._server = jax.process_index() == 0, None
        if loop.replay is not None:
            self._journal = Journal(loop.replay)
        else:
            self._journal = Journal(experiment.dir, storage)
            if self._first:
                leases = Leases[journal.DrawnSample](loop.group_size, wire.SILENCE_SECONDS)
                self._server = RolloutServer(leases, agreement.sampling_facts(experiment), own_token())
                host = os.environ.get("SLIPWAY_COORDINATOR", "127.0.0.1").rpartition(":")[0] or "127.0.0.1"
                self._server.announce(experiment.dir, host)
        self._everywhere = jax.jit(lambda x: x, out_shardings=NamedSharding(sampler.programs.mesh, PartitionSpec()))

    def fetch(
        self, params: Params, reference: Params, number: int, between: Callable[[], None], version: int
    ) -> Rollout:
        """Return rollout `number`, scored under the policy after `version` updates and the reference.

        Samplers get the policy, and go on with the `loop.async_depth` rollouts that follow. between: called while the
        rollout is missing; an exception from it ends the wait. Raises RunFileError if a journal lacks the rollout.
        """
        with self._stopwatch.measure("rollout_time"):
            if self._loop.replay is None:
                self._publish(params, version)
            self._open(number, version)
            content = self._wait(number, between)
        return self._generator.assemble(number, journal.decode(content), params, reference)

    def _open(self, number: int, version: int) -> None:
        """Offer a rollout and those that follow to the samplers, as far as the journal has none of them."""
        loop = self._loop
        if self._server is not None:
            prompts = loop.prompts_per_step * loop.updates_per_rollout
            last = loop.steps // loop.updates_per_rollout
            for ahead in range(number, min(number + 1 + loop.async_depth, last)):
                if self._journal.read(ahead) is None:
                    self._server.open(ahead, prompts, loop.prompts_per_task, version)

    def close(self, error: BaseException | None) -> None:
        """Tell the samplers to exit as this process does after `error`."""
        if self._server is not None:
            print(f"samplers: {self._server.summary()}", flush=True)
            self._server.close(0 if error is None else PREEMPTED_EXIT_CODE if isinstance(error, PreemptedError) else 1)

    def _publish(self, params: Params, version: int) -> None:
        """Gather the weights, one by one, and offer them to the samplers."""
        arrays: wire.Arrays = {}
        for i, leaf in enumerate(jax.tree.leaves(self._sampler.load_params(params))):
            whole = self._everywhere(leaf)
            if self._server is not None:
                arrays[str(i)] = jax.device_get(whole.addressable_data(0)).reshape(-1).view("uint8")
        if self._server is not None:
            self._server.publish(version, arrays)

    def _wait(self, number: int, between: Callable[[], None]) -> bytes:
        """Return the content of a rollout's file, equal on all processes, once it is complete and written."""
        while True:
            content = self._look_for(number) if self._first else None
            told = gather_texts("" if content is None else MISSING if not content else "here")[0]
            if told == MISSING:
                raise RunFileError(f"loop.replay: {self._loop.replay} has no rollout {number} in its journal")
            if told:
                return _broadcast(number, content)
            between()

    def _look_for(self, number: int) -> bytes | None:
        """Return a rollout's file, b"" if there will be none, None if it is not complete yet."""
        if (known := self._journal.read(number)) is not None:
            return known
        if self._server is None:
            return b""
        samples = self._server.wait(number, WAIT_SECONDS)
        if samples is None:
            return None
        content = journal.encode(number, samples)
        self._journal.write(number, content)
        return content


def _broadcast(number: int, content: bytes | None) -> bytes:
    """Return the content that process 0 has."""
    if jax.process_count() == 1:
        assert content is not None
        return content
    shared = exchange.connect()
    if content is not None:
        shared.put(f"rollout/{number - 1}", b"")  # all have read it, or they would not be here
        shared.put(f"rollout/{number}", content)
        return content
    found = shared.get(f"rollout/{number}", BROADCAST_SECONDS)
    if not found:
        raise ConnectionError(f"worker 0 has not sent rollout {number}")
    return found
