"""An emulated Hugging Face Hub with a few repositories, which tells what it was asked and fails as it is told."""

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from conf.schema.assets import SourceAddress, parse_source
from controller.inputs.hub_sources import HubAccess
from controller.localcloud.hub import CHUNK, HubHandler, HubServer, HubState

ACCEPTED, OTHER = "hf_accepted", "hf_other"
MODEL = "hf://acme/open"
CONTENT = b"weights " * 40_000


@dataclass
class HubFault:
    """What goes wrong with the next `times` requests whose method and path `match`.

    Attributes:
        status: the answer's status, such as 429 or 503; None: the request is answered.
        cut: bytes after which the connection breaks.
        stall: bytes after which nothing more comes, until the client goes away.
        corrupt: whether the first byte sent is wrong.
        loop: whether the answer is a redirect to the same address.
    """

    match: str
    times: int = 1
    status: int | None = None
    cut: int | None = None
    stall: int | None = None
    corrupt: bool = False
    loop: bool = False


@dataclass
class FaultyState(HubState):
    """With what goes wrong, what was asked, and (path, first byte, bytes) of each answer with content."""

    faults: list[HubFault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    sent: list[tuple[str, int, int]] = field(default_factory=list)
    pause: float = 0.0
    """Seconds between two chunks of content."""

    def take_fault(self, request: str) -> HubFault:
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.match, request):
                    fault.times -= 1
                    return fault
        return HubFault("")


class FaultyHandler(HubHandler):
    def do_GET(self) -> None:  # noqa: N802 - the name that the server calls
        request = f"{self.command} {self.path}"
        self.state.requests.append(request)
        self.fault = self.state.take_fault(request)
        if self.fault.loop:
            return self.send(302, {"Location": self.path, "X-Repo-Commit": "0" * 40, "ETag": '"loop"'})
        if self.fault.status is not None:
            return self.refuse(self.fault.status, "", "the emulated Hub was told to refuse")
        return super().do_GET()

    do_HEAD = do_GET  # noqa: N815 - the name that the server calls

    def send_range(self, path: Path, begin: int, end: int) -> None:
        fault, done = self.fault, 0
        stop = end if fault.cut is None else min(end, begin + fault.cut)
        try:
            with path.open("rb") as file:
                file.seek(begin)
                while begin + done < stop:
                    chunk = file.read(min(CHUNK, stop - begin - done))
                    if fault.corrupt and not done:
                        chunk = bytes([chunk[0] ^ 1]) + chunk[1:]
                    self.wfile.write(chunk)
                    done += len(chunk)
                    if fault.stall is not None and done >= fault.stall:
                        self.connection.recv(1)
                    if self.state.pause:
                        threading.Event().wait(self.state.pause)
        finally:
            self.state.sent.append((path.name, begin, done))
        self.close_connection = self.close_connection or stop < end


def faulty_hub(folder: Path, **readers: Any) -> HubServer:
    return HubServer(FaultyState(folder, **readers), FaultyHandler)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub with `acme/open`, its gated copy `acme/gated`, and the dataset `acme/rows`; HF_ENDPOINT names it."""
    import huggingface_hub.constants

    folder = tmp_path / "hub"
    for name in ("open", "gated"):
        write(folder / "models/acme" / name, {"README.md": b"# it", "config.json": b"{}", "model.safetensors": CONTENT})
    write(folder / "datasets/acme/rows", {f"data/train-{i}.parquet": b"rows %d" % i for i in range(3)})
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    readers = {"gated": {"acme/gated"}, "tokens": {ACCEPTED: {"acme/gated"}, OTHER: set()}}
    with faulty_hub(folder, **readers) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server
        huggingface_hub.close_session()  # its connections outlive the server otherwise


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def asked(hub: HubServer, source: str = MODEL, token: str | None = None) -> tuple[SourceAddress, HubAccess]:
    return parse_source(source), HubAccess(hub.endpoint, token)
