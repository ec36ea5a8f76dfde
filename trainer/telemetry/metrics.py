"""Metrics and texts of a run: metrics.jsonl, transcripts.jsonl, TensorBoard event files, summary.json.

Everything is written to a local folder, and what is new of it is uploaded: event files written to gs:// lose data.
"""

# pyright: reportAttributeAccessIssue=false
# TensorBoard's protocol buffers are generated at import; no type checker sees their names.

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from etils import epath

from conf.schema.training.settings import ProfileSettings
from conf.strict_json import dumps
from trainer.checkpoint.storage import RunStorage
from trainer.telemetry.throughput import PhaseTimes
from trainer.telemetry.uploads import Uploads, finished

if TYPE_CHECKING:
    from PIL import Image
    from tensorboard.compat.proto.event_pb2 import Event

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
TRANSCRIPTS_FILE = "transcripts.jsonl"


class MetricsLogger:
    """Logger that writes on process 0; on other processes every method is a no-op.

    Attributes:
        local: the folder that the program writes to.
        phases: where the time of the run goes, on every process.
        storage: where the run's folder is.
    """

    def __init__(self, local: Path, remote: str, writes: bool) -> None:
        """Open the files. remote: the run's folder, local or gs://."""
        self._writes = writes
        self.storage = RunStorage(remote)
        self.phases = PhaseTimes()
        self.local, self._remote = local, epath.Path(remote)
        self._recorded: dict[tuple[int, str], dict[str, float]] = {}
        if not writes:
            return
        # saves the other processes half a second of imports
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._uploads = Uploads(local, self.storage)
        local.mkdir(parents=True, exist_ok=True)
        self._metrics_file = (local / METRICS_FILE).open("a")
        self._transcripts_file = (local / TRANSCRIPTS_FILE).open("a")
        self._events = EventFileWriter(str(local / "tb"), filename_suffix=f".{time.time_ns()}")

    def resume(self, step: int) -> None:
        """Continue after `step`, dropping later lines, which come from an interrupted attempt.

        That step's evaluation is dropped too: it follows the checkpoint and is repeated. Evaluations of
        `loop.evaluations` are not, see `recorded`. A new run resumes at step 0.
        The lines come from the local folder, or else from the run's. Of TensorBoard's readers, those in Python then
        forget all points from this step on, and the others those that a new point repeats or precedes; so the points of
        this step that stay are drawn again.
        """
        if not self._writes:
            return
        self._uploads.forget()
        self._metrics_file.close()
        self._transcripts_file.close()
        repeated: list[dict[str, Any]] = []
        for name in (METRICS_FILE, TRANSCRIPTS_FILE):
            local, remote, draft = self.local / name, self._remote / name, self.local / f".{name}"
            if not local.stat().st_size and remote.exists():
                local.write_bytes(remote.read_bytes())
            with local.open("rb") as lines, draft.open("wb") as kept:
                for line in lines:
                    if (values := _line_before(line, step)) is None:
                        continue
                    kept.write(line)
                    if name == METRICS_FILE and "evaluation" in values:
                        self._recorded.update([_evaluation(values)])
                    if name == METRICS_FILE and values["step"] == step:
                        repeated.append(values)
            draft.replace(local)
        self._metrics_file = (self.local / METRICS_FILE).open("a")
        self._transcripts_file = (self.local / TRANSCRIPTS_FILE).open("a")
        self._events.add_event(_session_start_event(step))
        for values in repeated:
            self._events.add_event(_line_event(values))

    def recorded(self, step: int, evaluation: str) -> dict[str, float] | None:
        """Return the values of an evaluation of `loop.evaluations` that an interrupted attempt has logged, or None."""
        return self._recorded.get((step, evaluation))

    def log(self, step: int, phase: str, **values: float) -> None:
        """Log a line and a point of each curve at this number of updates. Non-finite values become null."""
        self._log({"step": step, "phase": phase}, values)

    def log_evaluation(self, step: int, phase: str, evaluation: str, values: dict[str, float]) -> None:
        """Log a line and points of an evaluation of `loop.evaluations`."""
        self._log({"step": step, "phase": phase, "evaluation": evaluation}, values)

    def _log(self, line: dict[str, Any], values: dict[str, float]) -> None:
        if not self._writes:
            return
        finite = {name: float(value) if math.isfinite(value) else None for name, value in values.items()}
        self._write(line | {"time": round(time.time(), 3)} | finite)

    def _write(self, line: dict[str, Any]) -> None:
        self._metrics_file.write(dumps(line) + "\n")
        self._metrics_file.flush()
        self._events.add_event(_line_event(line))

    def log_alert(self, step: int, name: str, message: str) -> None:
        """Tell the controller that an alert is raised or, without a message, over."""
        if self._writes:
            line = {"step": step, "phase": "alert", "time": round(time.time(), 3), "alert": name}
            self._write(line | ({"message": message} if message else {"over": True}))

    def log_text(self, step: int, name: str, text: str) -> None:
        if self._writes:
            self._events.add_event(_text_event(step, time.time(), name, text))

    def log_picture(self, step: int, name: str, picture: Image.Image) -> None:
        """Log a picture for TensorBoard."""
        if self._writes:
            self._events.add_event(_picture_event(step, time.time(), name, picture))

    def log_transcripts(self, step: int, phase: str, rows: Sequence[Transcript]) -> None:
        """Log prompts and responses: a JSON line each, and a table for TensorBoard."""
        if not self._writes or not rows:
            return
        for row in rows:
            self._transcripts_file.write(dumps({"step": step, "phase": phase} | row.to_json()) + "\n")
        self._transcripts_file.flush()
        self.log_text(step, f"transcripts/{phase}", markdown_table(rows))

    def profiler(self, settings: ProfileSettings | None) -> Profiler:
        """Return a profiler that writes its traces beside the event files."""
        return Profiler(settings, self.local / "tb", self._writes)

    def summarize(self, **values: float | str) -> None:
        """Write the results of the run, as flat scalars."""
        if self._writes:
            partial = self.local / f"{SUMMARY_FILE}.partial"
            partial.write_text(dumps(values, indent=1) + "\n")
            partial.replace(self.local / SUMMARY_FILE)

    def upload(self) -> Future[None]:
        """Begin to copy what is new to the run's folder, in a thread; a checkpoint waits for it before it counts.

        While the bucket does not answer, nothing is copied: the next call makes up for it.
        """
        if not self._writes:
            return finished()
        self._events.flush()
        files = [self.local / name for name in (METRICS_FILE, SUMMARY_FILE, TRANSCRIPTS_FILE)]
        return self._uploads.start([*files, *sorted((self.local / "tb").rglob("*"))])  # as TensorBoard reads them

    def close(self) -> None:
        if self._writes:
            self.upload().result()
            self._uploads.close()
            self._events.close()
            self._metrics_file.close()
            self._transcripts_file.close()


def run_folder(run_file: Path, run_id: str) -> Path:
    """Return the local output folder: $SLIPWAY_RUN_DIR, set by the controller's agent, or the run file's folder."""
    given = os.environ.get("SLIPWAY_RUN_DIR")
    return Path(given) if given else run_file.resolve().parent / run_id


def _line_before(line: bytes, step: int) -> dict[str, Any] | None:
    """Return a line that precedes this step's checkpoint, or None. Step 0 has none; truncated lines do not count."""
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        return None
    repeated = values["phase"] in ("eval", "test") and "evaluation" not in values
    return values if values["step"] < step or (0 < values["step"] == step and not repeated) else None


def _evaluation(line: dict[str, Any]) -> tuple[tuple[int, str], dict[str, float]]:
    return (line["step"], line["evaluation"]), _values(line)


def _values(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in ("step", "phase", "time", "evaluation")}


def _line_event(line: dict[str, Any]) -> Event:
    """Return a line of metrics.jsonl as TensorBoard has it: points, NaN for null, or the text of an alert."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    if line["phase"] == "alert":
        return _text_event(line["step"], line["time"], f"alerts/{line['alert']}", line.get("message", "over"))
    points = [
        Summary.Value(tag=curve_tag(name), simple_value=math.nan if value is None else value)
        for name, value in _values(line).items()
    ]
    return Event(wall_time=line["time"], step=line["step"], summary=Summary(value=points))


def _text_event(step: int, now: float, name: str, text: str) -> Event:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DataType

    kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(dtype=DataType.DT_STRING, string_val=[text.encode()])
    value = Summary.Value(tag=name, metadata=kind, tensor=tensor)
    return Event(wall_time=now, step=step, summary=Summary(value=[value]))


def _picture_event(step: int, now: float, name: str, picture: Image.Image) -> Event:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    png = io.BytesIO()
    picture.save(png, "PNG")
    image = Summary.Image(height=picture.height, width=picture.width, colorspace=3, encoded_image_string=png.getvalue())
    return Event(wall_time=now, step=step, summary=Summary(value=[Summary.Value(tag=name, image=image)]))


def _session_start_event(step: int) -> Event:
    """Return the event that tells TensorBoard's readers in Python to forget all points from this step on."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    return Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.SessionStatus.START))


class Profiler:
    """Traces a few updates for TensorBoard if `logging.profile` is set, on the process that writes the metrics.

    Updates are counted from the start of the process, so a resumed run can be traced with another `logging.profile`.
    """

    def __init__(self, settings: ProfileSettings | None, folder: Path, writes: bool) -> None:
        self._settings = settings if writes else None
        self._folder, self._num_updates, self._tracing = folder, 0, False

    def before_update(self, arrays: Any) -> None:
        """Start or stop the trace when due. arrays: the last update's outputs, which it waits for."""
        if self._settings is None:
            return
        if self._num_updates == self._settings.after:
            jax.block_until_ready(arrays)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # it would record each call of every thread, which makes updates slower
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
            self._tracing = True
        elif self._num_updates == self._settings.after + self._settings.updates:
            jax.block_until_ready(arrays)
            self.close()
        self._num_updates += 1

    def close(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False


MAX_CELL_CHARS = 2000
"""Maximum characters of a table cell; the JSON lines hold everything."""


@dataclass(frozen=True)
class Transcript:
    """One response. answer: the correct one; extracted: the one in the response, or None; board: of a puzzle.

    turns: (who, text) of an episode.
    """

    prompt: str
    answer: str
    response: str
    extracted: str | None
    reward: float
    board: dict[str, Any] | None = None
    turns: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        found = {"prompt": self.prompt, "answer": self.answer, "response": self.response}
        found |= {"extracted": self.extracted, "reward": self.reward}
        turns = [{"role": who, "text": text} for who, text in self.turns]
        return found | ({"board": self.board} if self.board else {}) | ({"turns": turns} if turns else {})


def markdown_table(transcripts: Sequence[Transcript]) -> str:
    rows = [["prompt", "response", "extracted", "right", "reward"], ["---"] * 5]
    for t in transcripts:
        response = "\n".join(f"[{who}] {text}" for who, text in t.turns) or t.response
        texts = (t.prompt, response, t.extracted or "(none)", t.answer, f"{t.reward:g}")
        rows.append([_escape_cell(text) for text in texts])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _escape_cell(text: str) -> str:
    """Escape a text so that it cannot end its cell or become HTML."""
    if len(text) > MAX_CELL_CHARS:
        text = text[:MAX_CELL_CHARS] + " …"
    for mark, written in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("\r", ""), ("\n", "<br>")):
        text = text.replace(mark, written)
    return text


ROLLOUT = (
    "accuracy", "checks_", "filtered_", "pass_at_k", "response_length", "reward", "rollout_", "sampler_trainer_",
    "samples_drawn", "truncated", "unused", "zero_variance_groups",
)  # fmt: skip
"""Beginnings of the metrics of what the policy wrote and how it was scored."""
TIME = ("_time", "tokens_per_second", "examples_per_second", "mfu", "_gib")
"""Ends of the metrics of speed and memory."""


def curve_tag(name: str) -> str:
    """Return a metric's tag in TensorBoard, which draws a section per prefix; a name that has one already keeps it."""
    if "/" in name:
        return name
    for phase in ("eval", "test"):
        if name.startswith(f"{phase}_") and name != f"{phase}_time":
            return f"{phase}/{name.removeprefix(f'{phase}_')}"
    if name.endswith(TIME):
        return f"time/{name}"
    return f"rollout/{name}" if name.startswith(ROLLOUT) else f"train/{name}"
