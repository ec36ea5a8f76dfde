"""What a first contact runs, a tiny training run whose first attempt waits at a checkpoint; and what ends it early."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from controller.config.run_yaml import bucket_name
from controller.connect import project_of, require_pods, require_project
from controller.core.this_process import Clock
from controller.gcp.prices import hourly_price
from controller.run.options import RunOptions

NAME = "slipway-witness"
"""Name of network and account: `down --all` then touches nothing that other runs use."""
STEPS, CHECKPOINT = 20, 10
TEXT = "".join(f"{a} and {b} make {a + b}.\n" for a in range(40) for b in range(40))
"""Data of the run, so that the upload of a data set is part of the first contact."""
DEFAULT_TYPE = "tpu.accelerator_type=v5litepod-4"
MAX_BUCKET_NAME = 63


@dataclass(frozen=True)
class Limits:
    """Where a first contact ends: dollars at the list price, and minutes before the clean-up begins."""

    usd: float = 5.0
    minutes: float = 60.0


def drill_options(options: RunOptions, limits: Limits) -> RunOptions:
    """Return the options of the run: the user's cloud and TPU, our program, names and limits. Writes its data.

    Raises:
        ConfigError: the overrides are unusable, or no project is set.
    """
    given = options.overrides
    if not any(word.startswith(("tpu=", "tpu.accelerator_type=")) for word in given):
        given = (*given, DEFAULT_TYPE)
    config = replace(options, overrides=given).cloud_config()
    require_pods(config)
    project = require_project(project_of(config))
    is_local = config.cloud.kind == "local"
    text = Path(config.run.state_dir).expanduser() / "witness" / "text.txt"
    text.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text.write_text(TEXT)
    bucket = bucket_name(config, project)
    bucket = bucket if bucket.endswith("-witness") else f"{bucket[: MAX_BUCKET_NAME - 8]}-witness"
    price = hourly_price(config, Clock().now()).total
    ours: Sequence[str] = (
        "run.name=witness", "program=trainer", "data=text", "model=tiny", "model.num_layers=1",
        "model.attention_pattern=G", "loop=lm", "optimizer=adamw",
        f"+assets.datasets.witness.path={text}", f"data.path=assets://witness/{text.name}",
        f"loop.steps={STEPS}", "loop.seq_len=64", "loop.total_batch_tokens=1024", f"loop.eval_interval={STEPS}",
        "loop.eval_batches=1", f"checkpoint.save_interval={CHECKPOINT}", f"checkpoint.verify_interval={CHECKPOINT}",
        "logging.log_interval=1", f'+env.vars.TRAINER_HOLD_AT_STEP="{CHECKPOINT}"',
        "env.secrets={HF_TOKEN: null, WANDB_API_KEY: null, NETRC: null}",
        f"env.packages={'image' if is_local else 'lock'}", "env.requirements=null",
        f"network.name={NAME}", f"cloud.service_account={NAME}", f"cloud.bucket={bucket}", "tpu.adopt=false",
        "recovery.driver=laptop", "recovery.policy.preempted=replace_node",
        "cleanup.on_success=delete", "cleanup.on_failure=delete", "cleanup.idle_minutes=15",
        f"budget.max_hours={limits.minutes / 60:.4f}", f"budget.max_usd={'null' if price is None else limits.usd}",
    )  # fmt: skip
    return replace(options, overrides=(*given, *ours), yes=True)


def interrupt_main_thread() -> None:
    """Do what Ctrl-C does: whatever the main thread is doing ends in order."""
    os.kill(os.getpid(), signal.SIGINT)


class TimeLimit:
    """Interrupts the work inside its block after some seconds, or when `stop` is called from another thread."""

    def __init__(self, seconds: float, interrupt: Callable[[], object] = interrupt_main_thread) -> None:
        self.reason = ""
        """Why the work was interrupted, empty if it was not."""
        self._seconds, self._interrupt = seconds, interrupt
        self._lock, self._closed = threading.Lock(), False
        self._timer: threading.Timer | None = None

    def stop(self, reason: str) -> None:
        """Interrupt the block, once."""
        with self._lock:
            if self._closed or self.reason:
                return
            self.reason = reason
            self._interrupt()

    def __enter__(self) -> Self:
        minutes = f"{self._seconds / 60:g} minutes"
        self._start_timer(lambda: self.stop(f"the limit of {minutes} is reached"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _start_timer(self, reach: Callable[[], None]) -> None:
        self._timer = threading.Timer(self._seconds, reach)
        self._timer.daemon = True
        self._timer.start()


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Treat a closed terminal and a request to end like Ctrl-C, so that the clean-up still happens."""

    def hang_up(*_: object) -> None:
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - the terminal is closed
        interrupt_main_thread()

    handlers = {signal.SIGTERM: lambda *_: interrupt_main_thread(), signal.SIGHUP: hang_up}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def shielded(say: Callable[[str], object]) -> Iterator[None]:
    """Answer the first Ctrl-C inside the block with what is going on; the second one interrupts."""
    pressed: list[int] = []

    def answer(number: int, frame: object) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt
        say("cleaning up; Ctrl-C again stops that and leaves what is billed")

    before = signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
