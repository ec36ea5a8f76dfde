"""What a server tells of a file before it is fetched."""

from __future__ import annotations

import pytest

from controller.inputs.web import DownloadError, FoundFile, TokenNeededError, find_file, find_open_file, with_patience
from controller.localcloud.hub import HubFault, HubServer
from tests.controller.agent.conftest import wait_for
from tests.hub import ACCEPTED, CONTENT, OTHER, hub, write

__all__ = ["hub"]


def url_of(hub: HubServer, repository: str, file: str = "model.safetensors") -> str:
    return f"{hub.endpoint}/acme/{repository}/resolve/main/{file}"


def test_an_open_file_needs_no_token(hub: HubServer) -> None:
    url = url_of(hub, "open")
    assert find_open_file(url, ACCEPTED) == FoundFile(len(CONTENT), url)
    wait_for(lambda: hub.state.sent)
    assert [size for _, _, size in hub.state.sent] == [1], "a byte tells the size"


def test_a_file_with_a_token_is_open_where_its_server_signs(hub: HubServer) -> None:
    found = find_open_file(url_of(hub, "gated"), ACCEPTED)
    assert found.size == len(CONTENT)
    assert found.address.startswith(f"http://localhost:{hub.server_port}/lfs/")
    assert find_file(found.address, None).size == len(CONTENT)
    with pytest.raises(TokenNeededError, match="stays on this machine"):
        find_open_file(url_of(hub, "gated", "config.json"), ACCEPTED)
    with pytest.raises(DownloadError, match=r"refused access \(403\): the token does not grant access"):
        find_open_file(url_of(hub, "gated"), OTHER)


def test_an_empty_file_has_a_size(hub: HubServer) -> None:
    write(hub.state.folder / "models/acme/open", {"empty.txt": b""})
    assert find_file(url_of(hub, "open", "empty.txt"), None).size == 0


def test_only_what_may_pass_is_asked_again(hub: HubServer) -> None:
    slept = list[float]()
    hub.state.faults.append(HubFault("/acme/", times=3, status=503))
    url = url_of(hub, "open")
    assert with_patience(lambda: find_file(url, None), slept.append).size == len(CONTENT)
    assert slept == [1.0, 2.0, 4.0]
    hub.state.faults.append(HubFault("/acme/", times=99, status=404))
    with pytest.raises(DownloadError, match="HTTP Error 404"):
        with_patience(lambda: find_file(url, None), slept.append)
    assert len(slept) == 3
