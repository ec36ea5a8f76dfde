"""What every stand-in does: look for its assets, meet the other workers, step, save, resume."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

STEPS = 8
SAVE_EVERY = 2
STEP_SECONDS = 0.25
PORT = 8476
"""Where worker 0 waits for the others."""
PATIENCE = 60.0
"""Seconds that a worker waits for the others: a program that runs on some workers only must not hang."""
DISAGREE = 4
"""The exit code that slipway takes for workers that disagree."""


def fail(message: str, code: int = 1) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(code)


def variables(*names: str) -> list[str]:
    """The values of environment variables that the real program cannot do without."""
    if missing := [name for name in names if not os.environ.get(name)]:
        fail(f"not set: {', '.join(missing)}")
    return [os.environ[name] for name in names]


def expect(folder: str, *files: str) -> None:
    """Each file is below a folder, local or gs://, and not empty."""
    for name in files:
        if not (content := read(f"{folder.rstrip('/')}/{name}")):
            fail(f"{folder.rstrip('/')}/{name} is {'missing' if content is None else 'empty'}")
    print(f"found {', '.join(files)} in {folder}", flush=True)


def train(checkpoints: str, config: dict[str, Any], steps: int = STEPS) -> None:
    """The whole life of a training program.

    Args:
        checkpoints: folder, local or gs://, where worker 0 saves and every worker looks for what to resume from.
        config: must be the same on every worker.
    """
    peers = Peers(int(os.environ["TPU_WORKER_ID"]), os.environ["TPU_WORKER_HOSTNAMES"].split(","))
    # Code and config are the same everywhere, or everybody ends, naming the odd one.
    mine = hashlib.sha256(json.dumps([config, os.environ.get("SLIPWAY_CODE_SHA256")], sort_keys=True).encode())
    hashes = peers.gather(mine.hexdigest()[:12])
    if len(set(hashes)) > 1:
        fail(f"the workers disagree: {hashes}", DISAGREE)
    first, loss = _newest(checkpoints)
    print(f"worker {peers.worker} of {len(peers.hosts)}: from step {first} of {steps}", flush=True)
    for step in range(first, steps):
        began = time.monotonic()
        time.sleep(STEP_SECONDS)
        loss = sum(peers.gather(loss / len(peers.hosts))) * 0.5
        if peers.worker:
            continue
        _log(step + 1, steps, loss, time.monotonic() - began)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            _save(checkpoints, step + 1, loss)
    if peers.worker == 0:
        summary = {"stand_in": True, "steps": steps, "final_loss": loss, "resumed_from": first}
        (_run_dir() / "summary.json").write_text(json.dumps(summary))
    peers.gather(loss)


class Peers:
    """The run's workers, connected through worker 0. A worker that does not connect is named in the error."""

    def __init__(self, worker: int, hosts: list[str]) -> None:
        self.worker, self.hosts = worker, hosts
        self._links = self._accept() if worker == 0 else {0: self._connect()}

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, on every worker: an all-gather, which proves that they reach each other."""
        if self.worker:
            self._send(0, value)
            return self._receive(0)
        values = [value, *(self._receive(worker) for worker in range(1, len(self.hosts)))]
        for worker in self._links:
            self._send(worker, values)
        return values

    def _accept(self) -> dict[int, Any]:
        links: dict[int, Any] = {}
        with socket.create_server((self.hosts[0], PORT), backlog=len(self.hosts)) as server:
            server.settimeout(PATIENCE)
            while len(links) < len(self.hosts) - 1:
                try:
                    link = server.accept()[0].makefile("rwb")
                except TimeoutError:
                    fail(f"no word from workers {sorted(set(range(1, len(self.hosts))) - set(links))}")
                if line := link.readline():  # an empty one: somebody looked whether we listen
                    links[int(line)] = link
        return dict(sorted(links.items()))

    def _connect(self) -> Any:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                link = socket.create_connection((self.hosts[0], PORT), timeout=PATIENCE).makefile("rwb")
            except OSError:
                if time.monotonic() > end:
                    fail(f"worker 0 does not answer at {self.hosts[0]}:{PORT}")
                time.sleep(0.02)
                continue
            link.write(b"%d\n" % self.worker)
            link.flush()
            return link

    def _send(self, worker: int, value: Any) -> None:
        self._links[worker].write(json.dumps(value).encode() + b"\n")
        self._links[worker].flush()

    def _receive(self, worker: int) -> Any:
        return json.loads(self._links[worker].readline() or fail(f"worker {worker} has gone"))


def _newest(checkpoints: str) -> tuple[int, float]:
    """Step and loss of the newest complete checkpoint; 0 and 1 without one."""
    done = [name for name in names(checkpoints) if name.endswith("/commit_success")]
    if not done:
        return 0, 1.0
    step = max(int(name.split("/")[-2]) for name in done)
    saved = json.loads(read(f"{checkpoints.rstrip('/')}/{step}/state.json") or b"{}")
    return saved["step"], saved["loss"]


def _save(checkpoints: str, step: int, loss: float) -> None:
    """The state, and then the mark that it is complete, as Orbax does on object storage."""
    folder = f"{checkpoints.rstrip('/')}/{step}"
    write(f"{folder}/state.json", json.dumps({"step": step, "loss": loss}).encode())
    write(f"{folder}/commit_success", b"1")
    print(f"checkpoint {step} in {checkpoints}", flush=True)


def _log(step: int, steps: int, loss: float, seconds: float) -> None:
    metrics = {"phase": "train", "step": step, "steps_total": steps, "loss": loss, "step_time": seconds}
    with (_run_dir() / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics) + "\n")
    print(f"step {step}: loss={loss:.4f}", flush=True)


def _run_dir() -> Path:
    return Path(os.environ["SLIPWAY_RUN_DIR"])


# Files, local or in a bucket of the emulated cloud; https://cloud.google.com/storage/docs/json_api


def read(path: str) -> bytes | None:
    """None where there is no such file."""
    if not path.startswith("gs://"):
        return Path(path).read_bytes() if Path(path).is_file() else None
    bucket, name = _parts(path)
    try:
        return _ask(f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}?alt=media")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def write(path: str, content: bytes) -> None:
    if not path.startswith("gs://"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content)
        return
    bucket, name = _parts(path)
    query = urllib.parse.urlencode({"uploadType": "media", "name": name})
    _ask(f"/upload/storage/v1/b/{bucket}/o?{query}", content)


def names(folder: str) -> list[str]:
    """Paths of the files below a folder."""
    if not folder.startswith("gs://"):
        return [str(path) for path in Path(folder).rglob("*") if path.is_file()]
    bucket, name = _parts(folder)
    query = urllib.parse.urlencode({"prefix": f"{name.rstrip('/')}/"})
    items: Iterable[dict[str, str]] = json.loads(_ask(f"/storage/v1/b/{bucket}/o?{query}")).get("items", [])
    return [f"gs://{bucket}/{item['name']}" for item in items]


def _parts(path: str) -> tuple[str, str]:
    bucket, _, name = path.removeprefix("gs://").partition("/")
    return bucket, name


def _ask(path: str, body: bytes | None = None) -> bytes:
    headers = {"Content-Type": "application/octet-stream"} if body is not None else {}
    url = os.environ["STORAGE_EMULATOR_HOST"] + path
    request = urllib.request.Request(url, data=body, headers=headers)  # noqa: S310 - on loopback
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
        return answer.read()
