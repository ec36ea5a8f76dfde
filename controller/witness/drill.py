"""What a first contact runs, a tiny training run whose first attempt waits at a checkpoint; and what ends it early."""

import getpass
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from controller.config.run_yaml import bucket_name
from controller.connect import project_of, require_pods, require_project
from controller.context import Context
from controller.core.errors import ConfigError, SlipwayError
from controller.core.events import Event
from controller.core.this_process import Clock, InterruptedSleepError
from controller.gcp.answers import OperationFailedError
from controller.gcp.google_errors import NotFoundError, ServiceDisabledError
from controller.gcp.prices import hourly_price
from controller.plan.build import Plan
from controller.resources.pod.planes import PLANES, planes_with_pod
from controller.run.options import RunOptions
from controller.run.session import Session
from controller.witness.recording import Recording
from controller.witness.stand_ins import StandIns

NAME = "slipway-witness"
"""Name of network and account: `down --all` then touches nothing that other runs use."""
STEPS, CHECKPOINT = 20, 10
TEXT = "".join(f"{a} and {b} make {a + b}.\n" for a in range(40) for b in range(40))
"""Data of the run, so that the upload of a data set is part of the first contact."""
SMALLEST = {"tpu_api": "tpu=v5litepod_1", "compute_engine": "tpu=v6e_1"}
"""The smallest pod of each plane."""
MAX_BUCKET_NAME = 63
JOIN_SECONDS = 180.0
"""How long the clean-up waits for the preemption by hand."""


@dataclass(frozen=True)
class Limits:
    """Where a first contact ends: dollars at the list price for all planes, and minutes on each before `down`."""

    usd: float = 5.0
    minutes: float = 60.0


def drill_options(options: RunOptions, limits: Limits, plane: str = "both") -> dict[str, RunOptions]:
    """Return the options of each run by its plane: the user's cloud and TPU, our program, names and limits.

    Without a TPU of the user's each plane has its smallest; one that does not have the user's is left out. Raises
    ConfigError if the overrides are unusable, no project is set, or neither plane has the TPU.
    """
    given = options.overrides
    if not any(word.startswith(("tpu=", "tpu.accelerator_type=")) for word in given):
        names = PLANES if plane == "both" else (plane,)
        return {name: _with_drill(options, (*given, SMALLEST[name]), limits, name) for name in names}
    having = planes_with_pod(options.cloud_config())
    names = [name for name, value in PLANES.items() if value in having and plane in (name, "both")]
    if not names:
        raise ConfigError(f"--plane {plane}: has no {options.cloud_config().tpu.accelerator_type}")
    return {name: _with_drill(options, given, limits, name) for name in names}


def _with_drill(options: RunOptions, given: tuple[str, ...], limits: Limits, plane: str) -> RunOptions:
    """Add our program, names and limits. Writes its data."""
    given = (*given, f"tpu.plane={plane}")
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
    ours = (
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
        self._interrupt = interrupt
        self._lock, self._closed = threading.Lock(), False
        reached = f"the limit of {seconds / 60:g} minutes is reached"
        self._timer = threading.Timer(seconds, self.stop, (reached,))
        self._timer.daemon = True

    def stop(self, reason: str) -> None:
        """Interrupt the block, once."""
        with self._lock:
            if self._closed or self.reason:
                return
            self.reason = reason
            self._interrupt()

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
        self._timer.cancel()


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


class FirstRun:
    """Follows the events of the drill: deletes the pod once a checkpoint is in the bucket."""

    def __init__(
        self, plan: Plan, context: Context, recording: Recording, begin: Callable[[str], None], limit: TimeLimit
    ) -> None:
        self._plan, self._context, self._recording = plan, context, recording
        self._begin, self._limit = begin, limit
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._told: set[tuple[Any, Any]] = set()
        self._resumed_at: int | None = None
        self.preempted = False
        """Whether the node was deleted by hand."""

    def on_event(self, event: Event) -> None:
        """Move on to the next stage; keep what the user is told."""
        attempt = event.data.get("attempt")
        if event.kind == "note" and isinstance(attempt, int) and "verdict" not in event.data:
            self._begin("checkpoint" if attempt == 1 else "recover")
            if attempt == 1:
                self._thread = threading.Thread(target=self._preempt, daemon=True, name="witness-preempt")
                self._thread.start()
        elif event.kind == "metrics" and event.data["metrics"].get("phase") == "train":
            self._note_step(event.data["metrics"])
        if event.kind == "note":
            self._recording.note(event.message)

    def _note_step(self, metrics: dict[str, Any]) -> None:
        """Remember the first step that is new in the last attempt, which repeats the lines of the one before it."""
        line = metrics.get("step"), metrics.get("time")
        stage = self._recording.stage
        if stage is None or not stage.name.endswith(": recover"):
            self._told.add(line)
        elif line not in self._told and self._resumed_at is None:
            self._resumed_at = metrics.get("step")

    def problem(self) -> str:
        """Return what the finished run failed to show, empty if nothing."""
        if not self.preempted:
            return "the pod was not preempted by hand"
        if self._resumed_at != CHECKPOINT + 1:
            return f"the second attempt began at step {self._resumed_at}, not {CHECKPOINT + 1}"
        return ""

    def close(self) -> None:
        """Wait until no request is under way."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _preempt(self) -> None:
        try:
            while not self._has_checkpoint():
                if self._closed.wait(self._context.poll_seconds):
                    return
            node = self._plan.node.find(self._context)
            if node is None or self._closed.is_set():
                return
            self._begin("preempt")
            self.preempted = True
            node.plane.delete_by_hand(self._context, node.name, node.place.zone)
        except InterruptedSleepError:
            return
        except OperationFailedError as error:  # the controller may have replaced the node already
            self._recording.note(f"the deletion by hand: {error}")
        except SlipwayError as error:  # the program would wait for ever
            self._limit.stop(f"the node could not be preempted by hand: {error}")

    def _has_checkpoint(self) -> bool:
        prefix = f"runs/{self._plan.run_id}/checkpoints/{CHECKPOINT}/commit_success"
        return bool(self._context.google.objects(self._plan.bucket, prefix))


def refuse_if_in_use(session: Session) -> None:
    """Refuse to start where the clean-up would delete something that is in use. Raises ConfigError."""
    plan, context = session.plan, session.context
    with suppress(ServiceDisabledError):
        if plan.node.find(context) is not None:
            raise ConfigError(f"{plan.node.title} exists already; delete it with `slipway down`, or wait for its user")
    with suppress(NotFoundError, ServiceDisabledError):
        if context.google.call("storage", "objects.list", bucket=plan.bucket, maxResults=1).get("items"):
            raise ConfigError(
                f"gs://{plan.bucket} of an earlier witness holds objects, which this one would delete; delete it with "
                "`gcloud storage rm --recursive`, or set another cloud.bucket"
            )


def learn_known(made: StandIns, session: Session) -> None:
    """Learn what is known to identify the user before the first request."""
    plan, context = session.plan, session.context
    made.add("project", plan.project)
    made.add("bucket", plan.bucket)
    made.add("account", str(plan.config.cloud.service_account).partition("@")[0])
    _, _, key = context.ssh_login.key_line().partition(":")
    made.learn(key)
    for name in (getpass.getuser(), Path.home().name):
        made.add("user", name)
    made.add("user", socket.gethostname())
    if context.google.has_credentials:
        made.add("token", context.google.token())
        made.add("account", (context.google.service_account or "").partition("@")[0])
