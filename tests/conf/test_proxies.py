"""Variables of proxies mean the same to every library, and no proxy stands between two parts of Slipway."""

import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.error import URLError

import pytest
from google.oauth2.credentials import Credentials
from huggingface_hub import HfApi, close_session

from conf.proxies import DIRECT, settle_proxies, unusable_proxy
from controller.core.errors import ConfigError
from controller.emulator import find_answering
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import GoogleError
from controller.inputs.hub_sources import lookup_problem
from controller.localcloud.lifecycle import client_environment, find_endpoint
from controller.run.notifications import post_json
from controller.ssh.route import IapTarget, open_tunnel
from tests.controller.localcloud.conftest import cloud as cloud
from tests.controller.localcloud.harness import EmulatedCloud, run_localcloud
from tests.fakes.clock import ManualClock
from tests.fakes.proxy import ListeningProxy, set_proxies, silent_proxy
from trainer.checkpoint.storage import RunStorage
from trainer.corpus import files
from trainer.corpus.buckets import BucketFileSystem

ALWAYS = ",".join(DIRECT)


@pytest.fixture(autouse=True)
def fresh_clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Libraries that read the variables once, at their first request, have made none."""
    monkeypatch.setattr(urllib.request, "_opener", None)
    close_session()
    yield
    close_session()
    BucketFileSystem.clear_instance_cache()


P, Q = "http://p:1", "http://q:2"


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        ({}, {}),
        ({"NO_PROXY": "corp"}, {"NO_PROXY": "corp"}),  # without a proxy nothing is touched
        ({"all_proxy": P}, {"http": P, "https": P, "all": P, "no": ALWAYS}),
        ({"ALL_PROXY": P, "HTTPS_PROXY": Q}, {"http": P, "https": Q, "all": Q, "no": ALWAYS}),
        ({"https_proxy": "p:1"}, {"https": P, "no": ALWAYS}),
        ({"http_proxy": "", "HTTP_PROXY": Q, "https_proxy": P}, {"https": P, "no": ALWAYS}),
        ({"https_proxy": P, "all_proxy": "socks5://s:1"}, {"http": "socks5://s:1", "https": P, "all": P, "no": ALWAYS}),
        ({"http_proxy": P, "no_proxy": "*"}, {"http": P, "no": "*"}),
        (
            {"http_proxy": P, "NO_PROXY": "*.lab, 10.0.0.7 mine.org"},
            {"http": P, "no": f".lab,10.0.0.7,mine.org,.mine.org,{ALWAYS}"},
        ),
    ],
)
def test_one_meaning_is_written_for_all_libraries(given: dict[str, str], settled: dict[str, str]) -> None:
    environment, wanted = dict(given), dict(settled)
    if {"http", "https"} & set(settled):
        wanted = {n: text for name, text in settled.items() for n in (f"{name}_proxy", f"{name.upper()}_PROXY")}
    settle_proxies(environment)
    assert environment == wanted
    settle_proxies(environment)
    assert environment == wanted, "settled for good"


@pytest.mark.parametrize("address", ["socks5://p:1", "socks://p:1", "https://p:1", "http://", "http://p:x", "ftp://p"])
def test_what_is_no_http_proxy_is_refused_by_name(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_proxies(monkeypatch, ALL_PROXY=address.replace("//", "//anna:secret@"))
    said = f"https_proxy: {address!r} is no HTTP proxy; set http://HOST:PORT"
    assert unusable_proxy() == said
    with pytest.raises(ConfigError) as error:
        GoogleClient(None, ManualClock())
    assert str(error.value) == said
    assert lookup_problem("https://hub.example") == said
    GoogleClient(None, ManualClock(), {"tpu": "http://127.0.0.1:1/"})  # the emulated cloud is on loopback


def ask_google(url: str = "http://google.example/") -> None:
    google = GoogleClient(Credentials(token="t"), ManualClock(), {"storage": url})
    with closing(google):
        google.call("storage", "buckets.get", bucket="b")


def storage(url: str = "http://storage.example") -> BucketFileSystem:
    BucketFileSystem.clear_instance_cache()
    return BucketFileSystem(token="anon", endpoint_url=url)


CLIENTS: dict[str, Callable[[], object]] = {
    "google.example": ask_google,
    "storage.example": lambda: storage().cat_file("bucket/object"),
    "hub.example": lambda: HfApi(endpoint="http://hub.example", token=False).repo_info("a/b"),
    "plain.example": lambda: urllib.request.urlopen("http://plain.example/x", timeout=60).close(),
}


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_each_client_goes_through_the_proxy(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    with ListeningProxy.serving(seen=seen, content={"id": "a/b"}) as url:
        set_proxies(monkeypatch, **{variable: url.rstrip("/").replace("//", "//anna:p%40ss@")})
        settle_proxies()
        for ask in CLIENTS.values():
            ask()
    for host in CLIENTS:
        assert any(host in line and line.endswith(" as anna:p@ss") for line in seen), (host, seen)


@pytest.mark.parametrize("variable", ["no_proxy", "NO_PROXY"])
def test_a_host_of_no_proxy_is_asked_directly(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    with ListeningProxy.serving(seen=seen, content={}) as url:
        set_proxies(monkeypatch, http_proxy=url, **{variable: "other.org, hub.example,google.example ,storage.example"})
        settle_proxies()
        with pytest.raises(GoogleError, match="check the network"):
            ask_google("http://www.google.example/")
        with pytest.raises(Exception, match=r"resol|known|Name"):
            CLIENTS["hub.example"]()
        assert (storage().session_kwargs, bool(storage("http://else.example").session_kwargs)) == ({}, True)
    assert [line for line in seen if "example" in line] == []


def test_encrypted_requests_ask_the_proxy_for_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    with ListeningProxy.serving(seen=seen, content={}) as url:
        set_proxies(monkeypatch, ALL_PROXY=url)
        google = GoogleClient(Credentials(token="t"), ManualClock())
        asked: list[Callable[[], object]] = [
            lambda: google.call("storage", "buckets.get", bucket="b"),
            lambda: open_tunnel(IapTarget("p", "z", "vm"), lambda: "token", 60),
            lambda: post_json("https://hook.example/x", {"a": 1}, lambda _: None),
        ]
        for ask in asked:
            with suppress(Exception):
                ask()
    assert {line.split()[1] for line in seen} >= {
        "storage.googleapis.com:443", "tunnel.cloudproxy.app:443", "hook.example:443",
    }  # fmt: skip


def test_between_parts_of_slipway_no_proxy_stands(cloud: EmulatedCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = cloud.endpoint
    root = f"{endpoint['url']}t/{endpoint['token']}"
    with silent_proxy() as silent:
        set_proxies(monkeypatch, http_proxy=silent, HTTPS_PROXY=silent, all_proxy=silent)
        assert find_endpoint(cloud.state) == endpoint
        assert client_environment(cloud.state)["no_proxy"] == ALWAYS, "for gcloud"
        emulator = find_answering(cloud.state)
        assert emulator is not None
        google = GoogleClient(Credentials(token=endpoint["token"]), ManualClock(), endpoint["roots"])
        with closing(google):
            google.call("storage", "buckets.insert", project="slipway-local", body={"name": "near"})
        BucketFileSystem.clear_instance_cache()
        bucket = BucketFileSystem(token="anon", project="slipway-local", endpoint_url=root)
        bucket.pipe_file("near/x", b"1")
        assert bucket.cat_file("near/x") == b"1"
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", root)
        assert RunStorage("gs://near/runs/x").answers()
        with pytest.raises(ConnectionRefusedError, match="IAP cannot find the VM"):
            open_tunnel(IapTarget("p", "z", "vm"), lambda: endpoint["token"], 60, emulator.iap)


def test_the_emulated_cloud_starts_behind_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with silent_proxy() as silent:
        set_proxies(monkeypatch, http_proxy=silent, HTTP_PROXY=silent)
        done = run_localcloud("start", tmp_path / "state")
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads((tmp_path / "state" / "endpoint.json").read_text())["pid"]
        assert run_localcloud("wipe", tmp_path / "state").returncode == 0
    with suppress(URLError):
        assert find_endpoint(tmp_path / "state") is None


def test_neighbours_of_an_emulated_pod_are_reached_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC, over which the processes of JAX meet, takes a proxy to any address that `no_proxy` does not name."""
    set_proxies(monkeypatch, https_proxy=P)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "127.0.0.5,127.0.0.6")
    files.use_buckets()
    assert os.environ["no_proxy"] == f"{ALWAYS},127.0.0.5,127.0.0.6"
