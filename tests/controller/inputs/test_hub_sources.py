"""Files of the Hub, pinned, resumed and verified; what a server tells of a file; each mistake is one clear error."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.schema.assets import parse_source
from controller.inputs import hub_sources as inputs
from controller.inputs.download import DownloadError, find_file
from controller.inputs.hub_sources import (
    SourceError,
    fetch_file,
    list_source,
    lookup_problem,
    require_readable,
)
from controller.localcloud.hub import HubServer
from tests.controller.agent.conftest import wait_for
from tests.hub import ACCEPTED, CONTENT, MODEL, OTHER, HubFault, asked, hub, write

__all__ = ["hub"]


def fetched(hub: HubServer, folder: Path, source: str = MODEL, token: str | None = None, name: str = "") -> Path:
    """Fetch one file of a source, without pauses."""
    address, access = asked(hub, source, token)
    commit, files = list_source(address, access)
    file = next(f for f in files if f.name == (name or "model.safetensors"))
    target = folder / "fetched"
    fetch_file(address, commit, file, target, access, lambda size: None, lambda seconds: None)
    return target


def test_names_are_relative_to_the_folder_before_the_first_wildcard(hub: HubServer) -> None:
    address, access = asked(hub, "hf://datasets/acme/rows/data/train-[01]*")
    commit, files = list_source(address, access)
    assert [f.name for f in files] == ["train-0.parquet", "train-1.parquet"]
    assert len(commit) == 40
    assert list_source(asked(hub, "hf://datasets/acme/rows")[0], access)[1][0].name == "data/train-0.parquet"
    pinned, _ = asked(hub, f"hf://acme/open@{list_source(asked(hub)[0], access)[0]}/*.json")
    assert [f.path for f in list_source(pinned, access)[1]] == ["config.json"]


def test_what_is_no_source_is_refused() -> None:
    for source in ("hf://acme", "https://x/y", "hf://acme/open/../x", "gs://B/x", "hf://a/b@"):
        with pytest.raises(ValueError, match=r"neither hf://.* nor gs://"):
            parse_source(source)


def test_a_cut_connection_is_resumed_and_all_bytes_are_right(hub: HubServer, tmp_path: Path) -> None:
    (part := tmp_path / "fetched.part").write_bytes(CONTENT[:100_000])  # of a process that was killed
    assert fetched(hub, tmp_path).read_bytes() == CONTENT
    wait_for(lambda: hub.state.sent)  # written down once all has been sent, when the client may be done
    assert hub.state.sent == [("model.safetensors", 100_000, len(CONTENT) - 100_000)]
    assert not part.exists()


@pytest.mark.parametrize("status", [429, 503])
def test_an_overloaded_hub_is_asked_again(hub: HubServer, tmp_path: Path, status: int) -> None:
    """Its storage gets no token: the emulated one refuses a request with it, as the real one does."""
    hub.state.faults.append(HubFault("/lfs/|resolve", status=status, times=2))
    assert fetched(hub, tmp_path, "hf://acme/gated", ACCEPTED).read_bytes() == CONTENT
    assert ACCEPTED not in repr(asked(hub, token=ACCEPTED))


@pytest.mark.parametrize(
    ("source", "token", "expected"),
    [
        ("hf://acme/opne", None, "Hugging Face has no model acme/opne (401), or it is private and needs a token"),
        ("hf://acme/opne", OTHER, "Hugging Face has no model acme/opne (404), or your token has no access to it"),
        ("hf://datasets/acme/open", OTHER, "Hugging Face has no dataset acme/open (404)"),
        ("hf://acme/open@v9", None, "model acme/open has no revision v9; "),
        ("hf://acme/open/*.gguf", None, "model acme/open: no file matches '*.gguf' at revision main; see "),
        ("hf://acme/gated", None, "model acme/gated is gated (401): accept its license at "),
        ("hf://acme/gated", OTHER, "model acme/gated is gated (403): accept its license at "),
        ("hf://acme/open", "hf_wrong", "Hugging Face rejects your token (401); make a new one at "),
    ],
)
def test_what_cannot_be_read_is_said_in_a_line(hub: HubServer, source: str, token: str | None, expected: str) -> None:
    address, access = asked(hub, source, token)
    with pytest.raises(SourceError) as caught:
        require_readable(address, *list_source(address, access), access)
    assert str(caught.value).startswith(expected)
    assert caught.value.permanent
    assert "\n" not in str(caught.value)


def test_a_token_without_the_permission_is_not_told_to_wait(hub: HubServer) -> None:
    for token, expected in {
        None: "model acme/open may not be read without a token (403): export HF_TOKEN, which",
        OTHER: "your token may not read model acme/open (403); see HUB/acme/open and its permissions at HUB/settings",
    }.items():
        hub.state.faults.append(HubFault("/api/", status=403))
        with pytest.raises(SourceError) as caught:
            list_source(*asked(hub, token=token))
        assert str(caught.value).startswith(expected.replace("HUB", hub.endpoint))
        assert caught.value.permanent


@pytest.mark.parametrize(
    ("fault", "permanent", "expected"),
    [
        (HubFault("/lfs/", corrupt=True), True, "model.safetensors has SHA-256 "),
        (HubFault("/lfs/", cut=0, times=99), False, "`slipway up` resumes"),
        (HubFault("/lfs/", status=503, times=99), False, "answered 503; `slipway up` resumes"),
        (HubFault("/lfs/", loop=True, times=99), True, "is redirected in a circle"),
        (HubFault("/resolve/", loop=True, times=99), True, "is redirected in a circle"),
        (HubFault("/resolve/", status=404, times=99), True, "acme/open"),
    ],
)
def test_a_file_that_does_not_come_is_an_error(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: HubFault, permanent: bool, expected: str
) -> None:
    from huggingface_hub import file_download

    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
    hub.state.faults.append(fault)
    with pytest.raises(SourceError) as caught:
        fetched(hub, tmp_path)
    assert expected in str(caught.value)
    assert "Signature" not in str(caught.value), "a signed address is a key to the file"
    assert caught.value.permanent == permanent
    assert not (tmp_path / "fetched").exists(), "nothing that is wrong or short is kept as the file"


def test_a_file_of_git_is_verified_too(hub: HubServer, tmp_path: Path) -> None:
    hub.state.faults.append(HubFault("GET .*resolve", corrupt=True))
    with pytest.raises(SourceError, match=r"config\.json has git id .*, but the Hub lists"):
        fetched(hub, tmp_path, name="config.json")


def test_a_full_disk_is_found_before_the_download_or_said_meanwhile(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
        with pytest.raises(SourceError, match=r"model\.safetensors needs 0\.0 GB in .*run\.state_dir"):
            fetched(hub, tmp_path)
    assert hub.state.sent == []
    monkeypatch.setattr(inputs._CountedFile, "write", full)
    with pytest.raises(SourceError, match=r"no space left in .*; free some, `slipway up` resumes"):
        fetched(hub, tmp_path)


def test_another_size_than_listed_is_an_error(hub: HubServer, tmp_path: Path) -> None:
    address, access = asked(hub)
    commit, files = list_source(address, access)
    wrong = next(f for f in files if f.sha256)._replace(size=7)
    with pytest.raises(SourceError, match=r"has 320000 bytes, but 7 in the list of its commit"):
        fetch_file(address, commit, wrong, tmp_path / "x", access, lambda size: None, lambda seconds: None)


def test_without_a_network_the_name_is_named() -> None:
    assert lookup_problem("https://nowhere.invalid").startswith("nowhere.invalid cannot be looked up")


def url_of(hub: HubServer, repository: str, file: str = "model.safetensors") -> str:
    return f"{hub.endpoint}/acme/{repository}/resolve/main/{file}"


def test_a_file_is_asked_for_with_its_token(hub: HubServer) -> None:
    assert find_file(url_of(hub, "open"), None) == len(CONTENT)
    wait_for(lambda: hub.state.sent)
    assert [size for _, _, size in hub.state.sent] == [1], "a byte tells the size"
    write(hub.state.folder / "models/acme/open", {"empty.txt": b""})
    assert find_file(url_of(hub, "open", "empty.txt"), None) == 0
    assert find_file(url_of(hub, "gated"), ACCEPTED) == len(CONTENT)
    with pytest.raises(DownloadError, match=r"refused access \(403\): the token does not grant access"):
        find_file(url_of(hub, "gated"), OTHER)
    with pytest.raises(DownloadError, match=r"refused access \(401\): it requires a token"):
        find_file(url_of(hub, "gated"), None)
