"""Clients of the emulated cloud whose tokens expire: the laptop, a program on a VM, and a run that is followed."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from google.oauth2.credentials import Credentials

from controller.core.this_process import Clock
from controller.emulator import find_running
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import NoCredentialsError
from controller.localcloud import iam as token_module
from controller.localcloud.http.errors import ApiError
from controller.localcloud.iam import Tokens
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store
from tests.controller.cli.verbs.test_up import let_go
from tests.controller.conftest import SlipwayCli
from tests.controller.localcloud.harness import LOCATION, NODES, EmulatedCloud, wait_for

PROJECT = {"projectId": "slipway-local"}


@pytest.fixture
def clients(cloud: EmulatedCloud) -> Iterator[tuple[GoogleClient, GoogleClient]]:
    """A client as Slipway opens it, and one with an access token alone."""
    running = find_running(cloud.state)
    user = GoogleClient(Credentials(token=None, **running.credentials), Clock(), running.roots)
    bare = GoogleClient(Credentials(token=user.token()), Clock(), running.roots)
    yield user, bare
    user.close()
    bare.close()


def expire_tokens(cloud: EmulatedCloud) -> None:
    """End all tokens at the laptop's next request."""
    cloud.script({"kind": "tokens_expired", "after_requests": 0})
    cloud.call("GET", LOCATION)
    wait_for(lambda: all(f["struck"] for f in cloud.call_ok("GET", "emulator/state")["fault"].values()), "their end")


def test_an_expired_token_is_refreshed_and_the_request_repeated(
    cloud: EmulatedCloud, clients: tuple[GoogleClient, GoogleClient]
) -> None:
    user, bare = clients
    for client in clients:
        assert client.call("cloudresourcemanager", "projects.get", **PROJECT)["lifecycleState"] == "ACTIVE"
    expire_tokens(cloud)
    assert user.call("cloudresourcemanager", "projects.get", **PROJECT)["lifecycleState"] == "ACTIVE"
    with pytest.raises(NoCredentialsError, match="log in again"):
        bare.call("cloudresourcemanager", "projects.get", **PROJECT)


def test_a_vm_gets_a_token_of_its_account_that_expires(cloud: EmulatedCloud) -> None:
    cloud.create_network("tokens")
    node = cloud.create_node("tokens", "tokens", "v5litepod-4")
    endpoint = cloud.endpoint
    place = f"w/{endpoint['token']}/{node['id']}/0/computeMetadata/v1/instance/service-accounts/default"

    def ask(path: str) -> str:
        status, text, _ = cloud.send("GET", f"{place}/{path}", None, {"Metadata-Flavor": "Google", "Authorization": ""})
        assert status == 200
        return text.decode()

    assert "cloud-platform" in ask("scopes")
    token = json.loads(ask("token"))
    assert token["expires_in"] == 3600
    bearer = {"Authorization": f"Bearer {token['access_token']}"}
    assert cloud.send("GET", NODES, headers=bearer)[0] == 200
    expire_tokens(cloud)
    assert cloud.send("GET", NODES, headers=bearer)[0] == 401
    fresh = {"Authorization": f"Bearer {json.loads(ask('token'))['access_token']}"}
    assert cloud.send("GET", NODES, headers=fresh)[0] == 200


@pytest.mark.deep
@pytest.mark.e2e
def test_a_run_is_followed_to_its_end_although_tokens_expire(slipway: SlipwayCli, tmp_path: Path) -> None:
    """They expire twice while the program waits; it goes on once Google has answered the laptop after that."""
    program = 'program.command=[sh,-c,"echo line 1; while [ ! -e ../go ]; do sleep 0.1; done; echo line 2"]'
    at_launch = "kind: tokens_expired, after_object: launches/0001"
    faults = f"cloud.faults=[{{{at_launch}}}, {{{at_launch}, delay_seconds: 1}}]"

    cloud = slipway.cloud()

    def fault_times() -> list[float]:
        return [time for fault in cloud.get("state")["fault"].values() for time in fault["struck"]]

    def answered_after_both() -> bool:
        times = fault_times()
        of_laptop = [r for r in cloud.requests() if r["client"] == "laptop" and r["status"] == 200]
        return len(times) == 2 and any(r["time"] > max(times) for r in of_laptop)

    def release() -> None:
        try:
            wait_for(answered_after_both, "an answer after the tokens expired")
        finally:  # whatever was seen, the program must end
            let_go(slipway)

    with ThreadPoolExecutor(max_workers=1) as pool:
        released = pool.submit(release)
        code, out, err = slipway("up", program, faults)
        released.result()
    assert code == 0, err
    assert "line 2" in out
    assert len(fault_times()) == 2


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state.db")


def refusal(tokens: Tokens, token: str) -> ApiError:
    with pytest.raises(ApiError) as found:
        tokens.identify(token)
    return found.value


def test_a_token_names_its_holder_until_it_expires(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(token_module.time, "time", lambda: now[0])
    tokens = Tokens(store, Settings(store), "secret")
    issued = tokens.issue("77/3")
    assert issued["expires_in"] == 3600
    assert tokens.identify(issued["access_token"]) == "77/3"
    now[0] += 3600
    late = refusal(tokens, issued["access_token"])
    assert (late.code, late.status) == (401, "UNAUTHENTICATED")
    assert late.details[0]["reason"] == "ACCESS_TOKEN_EXPIRED"
    assert tokens.identify("secret") == "laptop"


def test_a_forged_token_is_unknown(store: Store) -> None:
    tokens = Tokens(store, Settings(store), "secret")
    issued = tokens.issue("77/3")["access_token"]
    for forged in (issued.replace("77_3", "77_4"), "ya29.x", "", "wrong", "\udcff"):
        assert refusal(tokens, forged).code == 401


def test_a_refresh_token_gets_access_tokens(store: Store) -> None:
    tokens = Tokens(store, Settings(store), "secret")
    answer = tokens.refresh({"grant_type": "refresh_token", "refresh_token": "secret"})
    assert tokens.identify(answer["access_token"]) == "laptop"
    assert "cloud-platform" in answer["scope"]
    with pytest.raises(ApiError, match="invalid_grant"):
        tokens.refresh({"grant_type": "refresh_token", "refresh_token": "stale"})
    with pytest.raises(ApiError, match="unsupported_grant_type"):
        tokens.refresh({"grant_type": "password"})
