"""The curves of a run that was lost and went on, by each of TensorBoard's readers."""

import math
import subprocess
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.data.server_ingester import ExistingServerDataIngester
from tensorboard.util.grpc_util import ChannelCredsType
from tensorboard.util.tensor_util import make_ndarray

from tests.trainer.lives import lines_of
from tests.trainer.telemetry.test_metrics import events_of, folders
from trainer.telemetry.metrics import MetricsLogger, curve_tag

__all__ = ["folders"]


def attempt(local, bucket, number: int, first: int, last: int) -> None:
    """Train from a checkpoint to where the VM is lost, as the loops log it: an evaluation follows its checkpoint."""
    log = MetricsLogger(local, str(bucket), writes=True)
    log.resume(first)

    def evaluate(step: int) -> None:
        if step % 2 == 0:
            log.log(step, "eval", eval_loss=100 * number + step, eval_worst=math.nan)
        if step % 2 == 0 and log.recorded(step, "core") is None:
            log.log_evaluation(step, "eval", "core", {"eval_core_metric": 100 * number + step})

    evaluate(first)
    for step in range(first + 1, last + 1):
        log.log(step, "train", loss=100 * number + step)
        if step in (2, 4):
            log.log_alert(step, "entropy", f"low in {number}")
        evaluate(step)
    log.close()


def accumulated(folder):
    return of_accumulator(events_of(folder))


def of_accumulator(events):
    return {tag: [(p.step, p.value) for p in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def python_server(folder):
    runs = EventMultiplexer()
    runs.AddRunsFromDirectory(str(folder / "tb"))
    runs.Reload()
    [run] = found = runs.PluginRunToTagToContent("scalars")
    return runs, run, found[run]


def of_python_server(folder):
    runs, run, tags = python_server(folder)
    return {tag: [(p.step, float(make_ndarray(p.tensor_proto))) for p in runs.Tensors(run, tag)] for tag in tags}


def of_data_server(folder):
    binary = pytest.importorskip("tensorboard_data_server").server_binary()
    port = folder / "port"
    argv = [
        binary,
        f"--logdir={folder / 'tb'}",
        "--reload=once",
        "--port=0",
        f"--port-file={port}",
        "--die-after-stdin",
    ]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as server:
        try:
            while not (port.is_file() and port.read_text().endswith("\n")):
                assert server.poll() is None
                time.sleep(0.01)
            address = f"localhost:{int(port.read_text())}"
            ingester = ExistingServerDataIngester(address, channel_creds_type=ChannelCredsType.LOCAL)
            ingester.start()
            where = {"experiment_id": "", "plugin_name": "scalars", "downsample": 1000}
            while not (found := ingester.data_provider.read_scalars(RequestContext(), **where)):
                time.sleep(0.01)  # a run appears with all its points
        finally:
            server.kill()
    [tags] = found.values()
    return {tag: [(p.step, p.value) for p in points] for tag, points in tags.items()}


@pytest.mark.parametrize("same_machine", [True, False])
@pytest.mark.parametrize(
    "attempts",
    [
        [(0, 3), (0, 6)],  # lost before the first checkpoint
        [(0, 5), (4, 8)],
        [(0, 5), (3, 6)],  # with a checkpoint between two evaluations
        [(0, 4), (4, 6)],
        [(0, 5), (2, 5), (4, 8)],
        [(0, 5), (0, 1), (0, 6)],
        [(0, 6), (4, 4), (4, 7)],
    ],
)
def test_a_resumed_curve_is_one_line_in_every_reader(folders, attempts, same_machine) -> None:
    """That of metrics.jsonl: no point repeats, none is lost, and none is before an earlier one."""
    local, bucket = folders
    live = None
    for number, (first, last) in enumerate(attempts):
        attempt(local if same_machine else local / str(number), bucket, number, first, last)
        live = live or EventAccumulator(str(bucket / "tb"))
        live.Reload()
    expected: dict[str, list[tuple[int, float]]] = {}
    for line in lines_of(bucket):
        for name, value in line.items():
            if line["phase"] != "alert" and name not in ("step", "phase", "time", "evaluation"):
                expected.setdefault(curve_tag(name), []).append((line["step"], value))
    assert [step for step, _ in expected["eval/loss"]] == list(range(0, attempts[-1][1] + 1, 2))
    assert expected.keys() == {"train/loss", "eval/loss", "eval/worst", "eval/core_metric"}
    for read in (accumulated, of_python_server, of_data_server, lambda _: of_accumulator(live)):
        found = read(bucket)
        for tag, points in expected.items():
            assert [(step, None if math.isnan(value) else value) for step, value in found[tag]] == points, tag
    alerts = [(line["step"], line["message"]) for line in lines_of(bucket) if line["phase"] == "alert"]
    runs, run, _ = python_server(bucket)  # an EventAccumulator keeps all texts
    texts = runs.Tensors(run, "alerts/entropy")
    assert [(text.step, text.tensor_proto.string_val[0].decode()) for text in texts] == alerts
