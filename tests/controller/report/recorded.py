"""A sweep as it would be on record: settings times seeds, learning curves from a formula, a preemption in one run."""

import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from controller.cli.main import parse
from controller.records import index

SWEEP = "quickstart-00c0ffee"
CASES = (("optimizer.lr=0.0001", "loop.kl_coef=0"), ("optimizer.lr=0.0001", "loop.kl_coef=0.001"),
         ("optimizer.lr=0.0007", "loop.kl_coef=0"), ("optimizer.lr=0.0007", "loop.kl_coef=0.001"))  # fmt: skip
ACCURACY_GAIN = {"optimizer.lr=0.0001": 0.36, "optimizer.lr=0.0007": 0.52}
ACCURACY_GAIN |= {"loop.kl_coef=0": 0.0, "loop.kl_coef=0.001": -0.03}
START_TIME = 1_790_000_000.0
PREEMPTION_NOTE = "preempted: the node is preempted; replacing the pod and resuming from the last checkpoint"


def write_sweep(state: Path, seeds: Sequence[int] = (0, 1, 2), steps: int = 150, every: int = 5) -> list[str]:
    """Write it to a state folder; returns the ids, setting by setting."""
    return [
        write_run(state, case, seed, START_TIME + 100 * (seed + 3 * i), metric_lines(case, seed, steps, every))
        for i, case in enumerate(CASES)
        for seed in seeds
    ]


def metric_lines(case: Iterable[str], seed: int, steps: int, every: int) -> list[dict[str, Any]]:
    """metrics.jsonl without times: a loss of each update, an accuracy at every sixth."""
    draw = random.Random(f"{case} {seed}")
    gain = sum(ACCURACY_GAIN[word] for word in case) + draw.gauss(0, 0.03)
    lines: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        rise = 1 - math.exp(-3 * step / steps)
        reward = 0.42 + gain * rise + draw.gauss(0, 0.02)
        values = {"loss": 0.3 * math.exp(-2 * step / steps) + abs(draw.gauss(0, 0.01)), "reward_mean": reward}
        lines.append({"step": step, "phase": "grpo", **values, "entropy": 2 - rise, "step_time": 0.3})
        if step % (6 * every) == 0:
            lines.append({"step": step, "phase": "eval", "eval_accuracy": 0.42 + gain * rise})
    return lines


def write_run(
    home: Path, words: Sequence[str], seed: int, began: float, lines: Sequence[dict[str, Any]], **row: Any
) -> str:
    """Write one run, whose first attempt was preempted where the seed is 1; returns its id."""
    overrides = ["+experiment=quickstart", *words, f"run.seed={seed}"]
    run = f"quickstart-{random.Random(str(overrides)).getrandbits(32):08x}"
    folder = home / "runs" / run
    folder.mkdir(parents=True)
    document = {"run": run, "config": _composed_config(overrides), "code_sha256": "c0de" * 16, "assets": []}
    (folder / "record.json").write_text(json.dumps({"format": 1, **document}))
    at, half = began + 12.0, len(lines) // 2
    events = [_note(run, at, "launched attempt 1 on 4 workers", attempt=1)]
    timed = []
    for i, line in enumerate(lines):
        if seed == 1 and i == half:
            lost = at + 9.0
            events.append(_note(run, lost, PREEMPTION_NOTE, attempt=1, verdict="preempted"))
            at = lost + 15.0
            events.append(_note(run, at, "launched attempt 2 on 4 workers", attempt=2))
        at += (6.0 if i in (0, half) else 0.0) + (1.5 if "step_time" in line else 0.4)
        timed.append({**line, "time": round(at, 3)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timed))
    (folder / "transcripts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in _transcripts(seed, lines)))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    ended, hours = at + 2.0, (at + 2.0 - began) / 3600
    summary = {"accuracy_after": next((x["eval_accuracy"] for x in reversed(lines) if "eval_accuracy" in x), None)}
    known = {
        "run": run, "created": began + 12.0, "sweep": SWEEP, "name": "quickstart", "seed": seed, "overrides": overrides,
        "state": "finished", "ended": ended, "seconds": round(ended - began - 12.0, 1), "attempts": 1 + (seed == 1),
        "metrics": summary, "pod_hours": round(hours, 4), "usd": round(hours * 19.2, 4), "code": "c0de" * 16,
        "commit": "767b56a32d5f06ec26e4a4d2652dd6b668212b32", "pods": [{"began": began, "ended": ended}],
    }  # fmt: skip
    index.append_rows(home, [known | row])
    return run


@contextmanager
def edited_record(home: Path, run: str) -> Iterator[dict[str, Any]]:
    """Yield the record of a run, and write what became of it."""
    file = home / "runs" / run / "record.json"
    yield (document := json.loads(file.read_text()))
    file.write_text(json.dumps(document))


@cache
def _base_config() -> str:
    return json.dumps(parse(["plan", "+experiment=quickstart"]).options.cloud_config().model_dump(mode="json"))


def _composed_config(words: Sequence[str]) -> dict[str, Any]:
    """The config that the words mean, composed once for all."""
    config = json.loads(_base_config())
    for key, _, value in (word.partition("=") for word in words if "." in word.partition("=")[0]):
        section, _, name = key.partition(".")
        config[section][name] = yaml.safe_load(value)
    return config


def _note(run: str, time: float, words: str, **data: Any) -> dict[str, Any]:
    when = datetime.fromtimestamp(time, UTC).isoformat()
    return {"format": 1, "time": when, "kind": "note", "subject": run, "message": words, **data}


def _transcripts(seed: int, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Four questions, answered badly at first and better at last."""
    draw = random.Random(seed)
    asked = [(f"Lea has nuts: {a}, gets {b}. How many?", str(a + b)) for a, b in ((4, 1), (8, 1), (3, 6), (2, 5))]
    found = []
    for step, right in ((0, 0.0), (lines[-1]["step"] if lines else 0, 0.8)):
        for question, answer in asked:
            is_right = draw.random() < right
            given = answer if is_right else str(draw.randrange(10, 99))
            words = f"First I count what is there, then what is added.\n#### {given}"
            found.append({"step": step, "phase": "test", "prompt": question, "answer": answer, "response": words,
                          "extracted": given, "reward": float(is_right)})  # fmt: skip
    return found
