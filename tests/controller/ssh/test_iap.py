"""Pods without external addresses are reached through Google's Identity-Aware Proxy; the emulated cloud has one too."""

import socket

import pytest

from conf.schema.infra.cloud import IAP_RANGE
from controller.cli import main
from controller.cloud.emulator import Emulator
from controller.ssh import iap
from tests.controller.conftest import ECHO_COMMAND, ONE_WORKER, SlipwayCli

pytestmark = pytest.mark.e2e
KEEP = [ECHO_COMMAND, ONE_WORKER, "cleanup.on_success=keep"]
HIDDEN = [f"network.ssh_source_ranges=[{IAP_RANGE}]"]


def tunnels(cloud: Emulator) -> int:
    return sum(request["api"] == "iap" for request in cloud.requests())


def test_a_pod_without_external_addresses_runs_a_program(slipway: SlipwayCli) -> None:
    code, out, err = slipway("up", *KEEP, *HIDDEN)
    assert (code, err) == (0, "")
    assert "hello from worker 0" in out
    cloud = slipway.cloud()
    assert tunnels(cloud) == 1
    [node] = cloud.get("state")["node"].values()
    assert not any("accessConfig" in endpoint for endpoint in node["networkEndpoints"])
    [worker, *_] = cloud.get("state")["worker"].values()
    with pytest.raises(ConnectionRefusedError):  # there is no other way
        socket.create_connection((worker["host"], worker["port"]), timeout=5)
    words = "head -c 4000000 /dev/zero | tr '\\0' x"
    assert main.run(["exec", "--worker", "0", "--json", "--", words]) == 0  # many windows of the tunnel
    assert "x" * 4_000_000 in slipway.capsys.readouterr().out
    what_goes_wrong_is_told_apart(cloud)


def target(cloud: Emulator, **changed: object) -> iap.IapTarget:
    [node] = cloud.get("state")["node"].values()
    plain = {"project": "slipway-local", "zone": node["name"].split("/")[3], "instance": f"t1v-n-{node['id']}-w-0"}
    return iap.IapTarget(**{**plain, **changed})  # pyright: ignore[reportArgumentType]


def what_goes_wrong_is_told_apart(cloud: Emulator) -> None:
    tunnel = iap.connect(target(cloud), lambda: cloud.token, 10, cloud.iap)
    tunnel.settimeout(10)
    assert tunnel.recv(4) == b"SSH-"
    assert tunnel.recv(1000).startswith(b"2.0-")
    tunnel.settimeout(0.05)
    with pytest.raises(TimeoutError):
        tunnel.recv(1)
    tunnel.close()
    assert tunnel.recv(1) == b""
    with pytest.raises(BrokenPipeError):
        tunnel.send(b"x")
    with pytest.raises(PermissionError, match="401"):
        iap.connect(target(cloud), lambda: "wrong", 10, cloud.iap)
    for changed, words in [
        ({"instance": "t1v-n-1-w-0"}, "cannot find the VM"),
        ({"zone": "us-east1-c"}, "cannot find the VM"),
        ({"port": 80}, "does a firewall rule allow"),
    ]:
        with pytest.raises(ConnectionRefusedError, match=words):
            iap.connect(target(cloud, **changed), lambda: cloud.token, 10, cloud.iap)


def test_a_host_that_is_no_proxy_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"ws://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TimeoutError):
            iap.connect(iap.IapTarget("p", "z", "i"), lambda: "t", 0.2, where)
    with pytest.raises(OSError, match="refused"):
        iap.connect(iap.IapTarget("p", "z", "i"), lambda: "t", 5, where)
