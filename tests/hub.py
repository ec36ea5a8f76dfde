"""An emulated Hugging Face Hub with a few repositories, for tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.schema.assets import SourceAddress, parse_source
from controller.inputs.hub_sources import HubAccess
from controller.localcloud.hub import HubServer, HubState

ACCEPTED, OTHER = "hf_accepted", "hf_other"
MODEL = "hf://acme/open"
CONTENT = b"weights " * 40_000


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub with `acme/open`, its gated copy `acme/gated`, and the dataset `acme/rows`; HF_ENDPOINT names it."""
    import huggingface_hub.constants

    folder = tmp_path / "hub"
    for name in ("open", "gated"):
        write(folder / "models/acme" / name, {"README.md": b"# it", "config.json": b"{}", "model.safetensors": CONTENT})
    write(folder / "datasets/acme/rows", {f"data/train-{i}.parquet": b"rows %d" % i for i in range(3)})
    state = HubState(folder, gated={"acme/gated"}, tokens={ACCEPTED: {"acme/gated"}, OTHER: set()})
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with HubServer(state) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server
        huggingface_hub.close_session()  # its connections outlive the server otherwise


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def asked(hub: HubServer, source: str = MODEL, token: str | None = None) -> tuple[SourceAddress, HubAccess]:
    return parse_source(source), HubAccess(hub.endpoint, token)
