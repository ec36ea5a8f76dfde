"""Rollouts that samplers on other workers draw, or that a journal has.

All processes of the trainer call every method.
"""

import json
import logging
import os
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec

from conf.formats import RunFileError
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.run_yaml import RunFile
from trainer.checkpoint.local_saves import Outputs
from trainer.checkpoint.outage import ReplacedError
from trainer.checkpoint.storage import first_line
from trainer.distributed import agreement
from trainer.distributed.preemption import PREEMPTED_EXIT_CODE, PreemptedError
from trainer.distributed.runtime import connect, gather_texts
from trainer.models.weights import Params
from trainer.rl.remote import journal, wire
from trainer.rl.remote.identity import own_token, sampler_names
from trainer.rl.remote.journal import DrawnSample, Journal, JournalError
from trainer.rl.remote.leases import Leases, SamplersLostError, TaskLostError
from trainer.rl.remote.server import RolloutServer
from trainer.rl.rollouts import Rollout, RolloutGenerator
from trainer.sampler import Sampler
from trainer.telemetry.throughput import Stopwatch

WAIT_SECONDS = 0.5
"""Interval at which all processes look for a preemption notice while a rollout is missing."""
BROADCAST_SECONDS = 600.0
JOURNAL_FOLDER = "local_journal"
"""Folder on the disk of worker 0 for rollouts that are not in the bucket yet."""
SHARED_ERRORS = {kind.__name__: kind for kind in (ReplacedError, RunFileError, SamplersLostError, TaskLostError)}
"""Errors that process 0 finds and all processes raise."""


class RemoteRollouts:
    """The source of rollouts with `loop.sampler.workers`, `loop.sampler.pods` or `loop.replay`."""

    def __init__(
        self,
        experiment: RunFile,
        loop: GrpoLoop,
        generator: RolloutGenerator,
        sampler: Sampler,
        outputs: Outputs,
        watch: Stopwatch,
    ) -> None:
        """Listen for samplers on process 0.

        Args:
            experiment: the run.
            loop: its loop.
            generator: assembles rollouts.
            sampler: that of evaluations, which knows how weights are copied.
            outputs: the run's folder and that of this worker.
            watch: measures the waiting.
        """
        self._loop, self._generator, self._sampler, self._stopwatch = loop, generator, sampler, watch
        self._first, self._server = jax.process_index() == 0, None
        if loop.replay is not None:
            self._journal = Journal(loop.replay)
        else:
            self._journal = Journal(experiment.dir)
            if self._first:
                self._journal = Journal(experiment.dir, outputs.storage, outputs.local / JOURNAL_FOLDER)
                # samplers of the trainer's pod follow the workers that train
                names = sampler_names(experiment, first=experiment.pod.workers)
                leases = Leases[journal.DrawnSample](loop.group_size, wire.SILENCE_SECONDS)
                self._server = RolloutServer(leases, agreement.sampling_facts(experiment), own_token(), names)
                host = os.environ.get("SLIPWAY_COORDINATOR", "127.0.0.1").rpartition(":")[0] or "127.0.0.1"
                self._server.announce(outputs.storage, host)
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
            samples = self._decode(number, self._wait(number, between))
        return self._generator.assemble(number, samples, params, reference)

    def _open(self, number: int, version: int) -> None:
        """Offer a rollout and those that follow to the samplers, as far as the journal has none of them."""
        loop = self._loop
        if self._server is not None:
            prompts = loop.prompts_per_step * loop.updates_per_rollout
            last = loop.steps // loop.updates_per_rollout
            for ahead in range(number, min(number + 1 + loop.async_depth, last)):
                if self._journal.read(ahead) is None:
                    self._server.open(ahead, prompts, loop.prompts_per_task, version)

    def __enter__(self) -> "RemoteRollouts":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Upload the rest of the journal, and tell the samplers to exit.

        Whatever `error` ends this process, samplers exit as after a success, so that they hide no cause: this process
        tells it. The exception is a preemption, which all report.
        """
        if self._server is None:
            return
        try:
            if left := self._journal.upload():
                print(f"journal: {left} rollouts are only on this disk; the next attempt uploads them", flush=True)
        except Exception as other:
            if error is None:
                raise
            logging.warning("the rest of the journal was not uploaded: %s", first_line(other))
        finally:
            print(f"samplers: {self._server.summary()}", flush=True)
            self._server.close(PREEMPTED_EXIT_CODE if isinstance(error, PreemptedError) else 0)

    def _publish(self, params: Params, version: int) -> None:
        """Gather the weights, one by one, and offer them to the samplers. Keeps one copy of them on this host."""
        if self._server is not None:
            self._server.withdraw()
        arrays: wire.Arrays = {}
        left = jax.tree.leaves(self._sampler.load_params(params))
        for i in range(len(left)):
            whole = self._everywhere(left.pop(0))
            if self._server is not None:
                arrays[str(i)] = jax.device_get(whole.addressable_data(0)).reshape(-1).view("uint8")
        if self._server is not None:
            self._server.publish(version, arrays)

    def _wait(self, number: int, between: Callable[[], None]) -> bytes:
        """Return the content of a rollout's file, equal on all processes, once it is complete and written."""
        if self._server is not None:
            self._server.begin_wait()
        while True:
            content, problem = self._look_for(number) if self._first else (None, None)
            is_here, problem = json.loads(gather_texts(json.dumps([content is not None, problem]))[0])
            if problem is not None:
                raise SHARED_ERRORS[problem[0]](problem[1])
            if is_here:
                return _broadcast(number, content)
            between()

    def _look_for(self, number: int) -> tuple[bytes | None, tuple[str, str] | None]:
        """Return a rollout's file, None if it is not complete yet, and an error for all processes."""
        if (known := self._journal.read(number)) is not None:
            return known, None
        try:
            if self._server is None:
                raise RunFileError(f"loop.replay: {self._loop.replay} has no rollout {number} in its journal")
            samples = self._server.wait(number, WAIT_SECONDS)
            if samples is None:
                self._server.report_silence()
                return None, None
            return self._journal.write(number, journal.encode(number, samples)), None
        except tuple(SHARED_ERRORS.values()) as error:
            return None, (type(error).__name__, str(error))

    def _decode(self, number: int, content: bytes) -> list[DrawnSample]:
        """Return the samples of a rollout's file. Raises RunFileError if they are not of this config."""
        loop = self._loop
        key = "loop.replay" if loop.replay is not None else "the run's journal"
        try:
            samples = journal.decode(content, number)
        except JournalError as error:
            raise RunFileError(f"{key}: rollout {number}: {error}") from error
        wanted = loop.prompts_per_step * loop.updates_per_rollout * loop.group_size
        if len(samples) != wanted:
            raise RunFileError(
                f"{key}: rollout {number} has {len(samples)} samples, not the {wanted} of loop.prompts_per_step, "
                "updates_per_rollout and group_size; use those of the run that wrote it"
            )
        if loop.replay_routes and any(sample.routes is None for sample in samples):
            raise RunFileError(f"loop.replay_routes: rollout {number} of {key} has no routes; use false")
        return samples if loop.replay_routes else [sample._replace(routes=None) for sample in samples]


def _broadcast(number: int, content: bytes | None) -> bytes:
    """Return the content that process 0 has."""
    if jax.process_count() == 1:
        assert content is not None
        return content
    shared = connect()
    if content is not None:
        shared.put(f"rollout/{number - 1}", b"")  # all have read it, or they would not be here
        shared.put(f"rollout/{number}", content)
        return content
    found = shared.get(f"rollout/{number}", BROADCAST_SECONDS)
    if not found:
        raise ConnectionError(f"worker 0 has not sent rollout {number}")
    return found
