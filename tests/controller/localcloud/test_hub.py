"""The emulated Hub satisfies the real client library, and refuses as the Hub does."""

import hashlib
import subprocess
import sys
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from controller.localcloud import hub as emulated
from controller.localcloud.hub import HubServer
from tests.hub import ACCEPTED, CONTENT, OTHER, HubFault, hub, write
from tests.paths import ROOT

__all__ = ["hub"]


def test_the_library_downloads_a_repository(hub: HubServer, tmp_path: Path) -> None:
    place = snapshot_download("acme/open", local_dir=tmp_path / "here", endpoint=hub.endpoint, token=False)
    assert (Path(place) / "model.safetensors").read_bytes() == CONTENT
    assert (Path(place) / "config.json").read_bytes() == b"{}"
    where = {"repo_type": "dataset", "local_dir": tmp_path / "rows", "endpoint": hub.endpoint, "token": False}
    assert Path(hf_hub_download("acme/rows", "data/train-1.parquet", **where)).read_bytes() == b"rows 1"
    licensed = {"local_dir": tmp_path / "gated", "endpoint": hub.endpoint, "token": ACCEPTED}
    assert Path(hf_hub_download("acme/gated", "model.safetensors", **licensed)).read_bytes() == CONTENT


def test_a_listing_has_hashes_and_comes_in_pages(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "PAGE_SIZE", 2)
    api = HfApi(endpoint=hub.endpoint, token=False)
    commit = api.repo_info("acme/open").sha
    found = {e.path: e for e in api.list_repo_tree("acme/open", recursive=True, revision=commit)}
    weights, config = found["model.safetensors"], found["config.json"]
    assert isinstance(weights, RepoFile)
    assert isinstance(config, RepoFile)
    assert weights.lfs is not None
    assert (weights.size, weights.lfs.sha256) == (len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    assert (config.lfs, config.blob_id) == (None, hashlib.sha1(b"blob 2\0{}").hexdigest())
    assert len([r for r in hub.state.requests if "/tree/" in r]) == 2
    write(hub.state.folder / "models/acme/open", {"config.json": b"{ }"})
    assert api.repo_info("acme/open").sha != commit


@pytest.mark.parametrize(
    ("name", "revision", "file", "token", "error", "status"),
    [
        ("acme/none", None, "x", False, RepositoryNotFoundError, 401),
        ("acme/none", None, "x", OTHER, RepositoryNotFoundError, 404),
        ("acme/open", "v9", "config.json", False, RevisionNotFoundError, 404),
        ("acme/open", None, "x", False, EntryNotFoundError, 404),
        ("acme/gated", None, "config.json", False, GatedRepoError, 401),
        ("acme/gated", None, "config.json", OTHER, GatedRepoError, 403),
        ("acme/open", None, "config.json", "hf_wrong", HfHubHTTPError, 401),
    ],
)
def test_the_library_tells_refusals_apart(
    hub: HubServer, tmp_path: Path, name: str, revision: str, file: str, token: str, error: type[Exception], status: int
) -> None:
    def download() -> None:
        if not HfApi(endpoint=hub.endpoint, token=token).file_exists(name, file, revision=revision):
            where = {"endpoint": hub.endpoint, "local_dir": tmp_path / "d"}
            hf_hub_download(name, file, revision=revision, token=token, **where)

    with pytest.raises(error) as caught:
        download()
    chain: BaseException | None = caught.value
    while chain is not None and getattr(chain, "response", None) is None:
        chain = chain.__cause__
    assert getattr(chain, "response").status_code == status  # noqa: B009


def test_another_revision_is_a_folder_of_its_own(hub: HubServer, tmp_path: Path) -> None:
    name = "refs/convert/parquet"
    other = hub.state.folder / "models/acme" / f"open@{quote(name, safe='')}" / "C++-all"
    other.mkdir(parents=True)
    (other / "0000.parquet").write_bytes(b"converted")
    api = HfApi(endpoint=hub.endpoint, token=False)
    commit = api.repo_info("acme/open", revision=name).sha
    assert commit not in (None, api.repo_info("acme/open").sha)
    assert [file.path for file in api.list_repo_tree("acme/open", revision=commit, recursive=True)][1:] == [
        "C++-all/0000.parquet"
    ]
    where = {"endpoint": hub.endpoint, "local_dir": tmp_path / "d", "token": False}
    found = [hf_hub_download("acme/open", "C++-all/0000.parquet", revision=at, **where) for at in (name, commit)]
    assert [Path(file).read_bytes() for file in found] == [b"converted"] * 2
    with pytest.raises(EntryNotFoundError):
        hf_hub_download("acme/open", "model.safetensors", revision=name, **where)


def head(url: str, **headers: str) -> tuple[int, str]:
    """Send a request that follows no redirect; return the status and where it redirects to."""
    place = urlsplit(url)
    with closing(HTTPConnection(place.netloc, timeout=240)) as connection:
        connection.request("GET", url.removeprefix(f"http://{place.netloc}"), headers=headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers.get("Location", "")


def test_storage_answers_to_a_signature_and_refuses_tokens(hub: HubServer) -> None:
    status, place = head(f"{hub.endpoint}/acme/open/resolve/main/model.safetensors")
    assert (status, place[:17]) == (302, "http://localhost:"), "another host, as on the Hub"
    assert head(place)[0] == 200
    assert head(place, Range="bytes=8-15")[0] == 206
    assert head(place, Range=f"bytes={len(CONTENT)}-")[0] == 416
    assert head(place, Authorization=f"Bearer {ACCEPTED}")[0] == 400
    assert head(place.partition("?")[0])[0] == 403


def test_faults_strike_as_often_as_they_say(hub: HubServer) -> None:
    hub.state.faults.append(HubFault("GET /api/", status=503, times=2))
    assert [head(f"{hub.endpoint}/api/models/acme/open")[0] for _ in range(3)] == [503, 503, 200]


def test_the_command_serves_a_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "controller.localcloud.hub"]
    write(tmp_path / "models/acme/open", {"config.json": b"{}"})
    pipe: Any = subprocess.PIPE
    with subprocess.Popen([*command, str(tmp_path)], cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as serving:
        assert serving.stdout is not None
        status, _ = head(f"{serving.stdout.readline().strip()}/acme/open/resolve/main/config.json")
        assert status == 200
    refused = subprocess.run([*command, "nowhere"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stderr.endswith("error: nowhere is no folder\n")) == (2, True)
