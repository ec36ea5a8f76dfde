"""Workers: what SSH gives, what the environment holds, what the firewall hides."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from controller.localcloud.apis.catalog import load_catalog
from controller.localcloud.vms.image import first_chip, install_chips
from controller.localcloud.vms.sessions import MAX_SESSIONS, authorized_keys, is_dropped
from controller.resources.pod.provisioner import mount_part
from tests.controller.localcloud.harness import COMPUTE, NODES, EmulatedCloud, is_alive, wait_for


@pytest.fixture(scope="module")
def pod(cloud: EmulatedCloud) -> dict[str, Any]:
    """A pod of four workers that reach each other."""
    cloud.create_network("net")
    return cloud.create_node("pod", "net", "v5litepod-16")


def environment(cloud: EmulatedCloud, node: Mapping[str, Any], worker: int = 0) -> dict[str, str]:
    text = cloud.run_on_worker(node, "env", worker).stdout
    assert isinstance(text, str)
    return dict(line.split("=", 1) for line in text.splitlines())


def refused(cloud: EmulatedCloud, node: Mapping[str, Any]) -> bool:
    try:
        cloud.run_on_worker(node, "true")
    except ConnectionRefusedError:
        return True
    return False


def test_commands_have_input_output_and_a_status(cloud: EmulatedCloud, pod: dict[str, Any]) -> None:
    done = cloud.run_on_worker(pod, "cat; echo words >&2; exit 7", worker=2, input="given\n")
    assert (done.stdout, done.stderr, done.exit_status) == ("given\n", "words\n", 7)
    assert cloud.run_on_worker(pod, "kill -TERM $$").exit_signal == ("TERM", False, "", "en-US")
    done = cloud.run_on_worker(pod, "head -c 5000000 /dev/zero; head -c 300000 /dev/zero >&2", encoding=None)
    assert done.stdout is not None
    assert done.stderr is not None
    assert (len(done.stdout), len(done.stderr)) == (5_000_000, 300_000)
    done = cloud.run_on_worker(pod, "test -t 0 && stty size && echo $TERM", term_type="xterm", term_size=(100, 30))
    assert done.stdout == "30 100\r\nxterm\r\n"


def test_a_dropped_connection_hangs_up_a_terminal_but_not_a_program(cloud: EmulatedCloud, pod: dict[str, Any]) -> None:
    """Unless it writes to the client that has gone."""

    async def start(program: str = "exec sleep 500", **options: Any) -> int:
        connection = await cloud.connect(pod, 3)
        process = await connection.create_process(f"echo $$; {program}", **options)
        pid = int(await process.stdout.readline())
        connection.abort()
        await connection.wait_closed()
        return pid

    with_pipes, with_terminal = asyncio.run(start()), asyncio.run(start(term_type="xterm"))
    writes = asyncio.run(start("while sleep 0.1; do echo beat || exit; done"))
    wait_for(lambda: not is_alive(with_terminal), "the terminal's program ends")
    wait_for(lambda: not is_alive(writes), "so does the one that writes")
    assert is_alive(with_pipes)


def test_files_are_copied_to_the_home(cloud: EmulatedCloud, pod: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 1000)

    async def copy() -> None:
        async with await cloud.connect(pod, 1) as connection:
            async with connection.start_sftp_client() as sftp:
                await sftp.makedirs("folder")
                await sftp.put(tmp_path / "file", "folder/sftp")
            await asyncssh.scp(tmp_path / "file", (connection, "folder/scp"))

    asyncio.run(copy())
    done = cloud.run_on_worker(pod, "cd folder && cmp sftp scp && wc -c < sftp", worker=1)
    assert done.stdout == "256000\n", done.stderr
    assert cloud.run_on_worker(pod, "ls folder", worker=0).exit_status != 0, "homes are not shared"


def test_only_the_keys_of_the_metadata_open_the_door_and_new_ones_count_at_once(
    cloud: EmulatedCloud, pod: dict[str, Any]
) -> None:
    key = asyncssh.generate_private_key("ssh-ed25519")
    for username, tried in (("you", cloud.ssh_key), ("me", key)):
        with pytest.raises(asyncssh.PermissionDenied):
            asyncio.run(cloud.connect(pod, username=username, client_keys=[tried]))
    more = f"{pod['metadata']['ssh-keys']}\nyou:{key.export_public_key().decode()}"
    cloud.call_and_wait("PATCH", f"{NODES}/pod?updateMask=metadata", {"metadata": {"ssh-keys": more}})

    async def whoami() -> object:
        async with await cloud.connect(pod, username="you", client_keys=[key]) as connection:
            return (await connection.run("echo $USER")).stdout

    assert asyncio.run(whoami()) == "you\n"


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("me:ssh-ed25519 AAAA me", ["ssh-ed25519 AAAA me"]),
        ("\nyou:ssh-rsa BBBB\nme:ssh-rsa CCCC\nme:ssh-rsa DDDD", ["ssh-rsa CCCC", "ssh-rsa DDDD"]),
        ("", []),
    ],
)
def test_keys_in_metadata(text: str, keys: list[str]) -> None:
    assert authorized_keys(text, "me") == keys


def test_the_environment_is_that_of_a_tpu_vm(
    cloud: EmulatedCloud, pod: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = environment(cloud, pod, 0), environment(cloud, pod, 3)
    addresses = [endpoint["ipAddress"] for endpoint in pod["networkEndpoints"]]
    assert not {"TPU_WORKER_HOSTNAMES", "JAX_COORDINATOR_ADDRESS"} & {*first, *last}, "the controller says it"
    assert (first["TPU_WORKER_ID"], last["TPU_WORKER_ID"]) == ("0", "3")
    assert (first["JAX_PLATFORMS"], first["JAX_NUM_CPU_DEVICES"]) == ("cpu", "4")
    assert first["JAX_COORDINATOR_BIND_ADDRESS"].startswith(addresses[0])
    assert first["HOME"] != last["HOME"]
    assert first["TMPDIR"] != last["TMPDIR"]
    assert first["SLIPWAY_BOOT_ID"] != last["SLIPWAY_BOOT_ID"]
    inherited = set(first) - {"_", "PWD", "SHLVL", "OLDPWD"}
    assert not inherited & {"VIRTUAL_ENV", "PYTHONPATH", "XDG_CONFIG_HOME", "PYTEST_CURRENT_TEST"}


def test_the_metadata_server_knows_the_worker(cloud: EmulatedCloud, pod: dict[str, Any]) -> None:
    variables = environment(cloud, pod, 1)
    root = f"http://{variables['GCE_METADATA_HOST']}/computeMetadata/v1/"
    flavor = {"Metadata-Flavor": "Google", "Authorization": ""}

    def ask(path: str) -> str:
        status, text, headers = cloud.send("GET", root + path, headers=flavor)
        assert (status, headers["Metadata-Flavor"]) == (200, "Google"), path
        return text.decode()

    assert ask("instance/attributes/agent-worker-number") == "1"
    assert ask("instance/attributes/accelerator-type") == "v5litepod-16"
    assert ask("instance/preempted") == "FALSE"
    assert ask("project/project-id") == "slipway-local"
    assert "default/" in ask("instance/service-accounts/")
    assert '"access_token"' in ask("instance/service-accounts/default/token")
    assert ask("instance/service-accounts/default/?recursive=true").startswith("{")
    assert cloud.send("GET", f"{root}instance/nothing", headers=flavor)[0] == 404
    assert cloud.send("GET", f"{root}instance/preempted", headers={"Authorization": ""})[0] == 403


def test_ssh_follows_the_firewall(cloud: EmulatedCloud) -> None:
    cloud.create_network("closed", ssh=False)
    node = cloud.create_node("closed", "closed")
    assert refused(cloud, node)
    cloud.create_rule("closed-iap", "closed", ["22"], ["35.235.240.0/20"])
    assert refused(cloud, node)
    cloud.create_rule("closed-ssh", "closed", ["22"], ["127.0.0.1/32"])
    wait_for(lambda: not refused(cloud, node), "SSH is admitted")
    cloud.call_and_wait("PATCH", f"{COMPUTE}/global/firewalls/closed-ssh", {"disabled": True})
    wait_for(lambda: refused(cloud, node), "SSH is closed again")


def test_a_connection_has_as_many_sessions_as_sshd_allows(cloud: EmulatedCloud, pod: dict[str, Any]) -> None:
    async def attempts() -> list[str]:
        connection = await cloud.connect(pod)
        async with connection:
            found = await asyncio.gather(
                *(connection.create_process("sleep 100") for _ in range(MAX_SESSIONS + 2)), return_exceptions=True
            )
            kinds = [type(one).__name__ for one in found]
            for one in found:
                if isinstance(one, asyncssh.SSHClientProcess):
                    one.close()
        return kinds

    assert sorted(asyncio.run(attempts())) == ["ChannelOpenError"] * 2 + ["SSHClientProcess"] * MAX_SESSIONS


@pytest.mark.parametrize(
    ("startups", "draw", "dropped"),
    [(9, 0.0, False), (10, 0.29, True), (10, 0.31, False), (55, 0.64, True), (55, 0.66, False), (100, 0.999, True)],
)
def test_sshd_drops_some_of_many_logins_at_once(startups: int, draw: float, dropped: bool) -> None:
    assert is_dropped(startups, draw) is dropped


def test_peers_follow_the_firewall(cloud: EmulatedCloud) -> None:
    cloud.create_network("alone", internal=False)
    node = cloud.create_node("alone", "alone", "v5litepod-16")
    addresses = [endpoint["ipAddress"] for endpoint in node["networkEndpoints"]]
    hostnames = environment(cloud, node, 1)["TPU_WORKER_HOSTNAMES"].split(",")
    assert hostnames[1] == addresses[1]
    assert not set(hostnames[:1] + hostnames[2:]) & set(addresses)
    probe = f"python3 -c \"import socket; socket.create_connection(('{hostnames[0]}', 22), 2)\""
    assert "ConnectionRefusedError" in str(cloud.run_on_worker(node, probe, worker=1).stderr)
    cloud.create_rule("alone-internal", "alone", None, ["10.0.0.0/8"])
    assert "TPU_WORKER_HOSTNAMES" not in environment(cloud, node, 1), "each is at its address"


def test_ssh_refused_for_some_seconds(fresh_cloud: EmulatedCloud) -> None:
    fresh_cloud.script({"kind": "ssh_refused", "seconds": 1.0})
    node = fresh_cloud.create_pod()
    assert refused(fresh_cloud, node)
    wait_for(lambda: not refused(fresh_cloud, node), "SSH comes up")


SCRIPT = f"""#!/bin/bash
{mount_part(100)}
lsblk && blkid && mkfs.ext4 /dev/sda && mount /dev/sda /mnt && echo "no disk was touched"
url="http://$GCE_METADATA_HOST/computeMetadata/v1/instance/attributes/agent-worker-number"
python3 -c "import sys, urllib.request as u
print(u.urlopen(u.Request(sys.argv[1], headers={{'Metadata-Flavor': 'Google'}})).read().decode())" "$url"
echo "$SLIPWAY_HOMES"
"""


def printed(home: Path) -> list[str]:
    log = home.parent / "startup.log"
    return log.read_text().splitlines() if log.exists() else []


def test_a_startup_script_runs_on_each_worker_at_each_boot(cloud: EmulatedCloud) -> None:
    cloud.create_network("startup")
    body: dict[str, Any] = cloud.node_body("startup")
    body["metadata"]["startup-script"] = SCRIPT
    cloud.call_and_wait("POST", f"{NODES}?nodeId=startup", body)
    uid = cloud.call_ok("GET", f"{NODES}/startup")["id"]
    home = cloud.state.resolve() / "nodes" / uid / "worker-0" / "home"
    once = ["no disk was touched", "0", str(home)]
    wait_for(lambda: printed(home) == once, "the script has run")
    cloud.call_and_wait("POST", f"{NODES}/startup:stop", {})
    cloud.call_and_wait("POST", f"{NODES}/startup:start", {})
    wait_for(lambda: printed(home) == once * 2, "the script has run at the second boot")


PROGRAM = Path(__file__).with_name("client_libraries.py")


def test_storage_clients_work_on_a_worker(cloud: EmulatedCloud) -> None:
    cloud.create_network("clients")
    node = cloud.create_node("clients", "clients")
    cloud.call_ok("POST", "storage/v1/b?project=slipway-local", {"name": "clients"})
    endpoint = cloud.endpoint
    words = f"clients {endpoint['roots']['storage']} {endpoint['token']}"
    done = cloud.run_on_worker(node, f"cat > uses.py; python3 uses.py {words}", input=PROGRAM.read_text(), timeout=300)
    assert done.exit_status == 0, f"{done.stdout}\n{done.stderr}"
    assert str(done.stdout).split() == ["use_gcsfs", "use_google_api_client"]
    by_client = {entry["client"] for entry in cloud.request_log() if entry["call"] == "objects.insert"}
    assert f"{node['id']}/0" in by_client


LIST = "cd $SLIPWAY_DEV && find . -type f | sort | tr '\\n' ' '"


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("v2-8", "accel0 accel1 accel2 accel3"),
        ("v4-16", "accel0 accel1 accel2 accel3"),
        ("v5litepod-1", "vfio/0 vfio/vfio"),
        ("v5p-8", "vfio/0 vfio/1 vfio/2 vfio/3 vfio/vfio"),
        ("v6e-8", "vfio/0 vfio/1 vfio/2 vfio/3 vfio/4 vfio/5 vfio/6 vfio/7 vfio/vfio"),
    ],
)
def test_device_nodes_of_a_generation(tmp_path: Path, name: str, files: str) -> None:
    kind = load_catalog().types[name]
    install_chips(tmp_path, kind)
    dev, bus = tmp_path / "dev", tmp_path / "sys/bus/pci/devices"
    found = sorted(path.relative_to(dev).as_posix() for path in dev.rglob("*") if path.is_file())
    assert found == files.split()
    assert len(list(bus.iterdir())) == kind.chips
    assert first_chip(tmp_path).exists()
    install_chips(tmp_path, kind, missing=True)
    assert len(list(bus.iterdir())) == kind.chips - 1


def test_a_missing_chip_and_a_held_one(fresh_cloud: EmulatedCloud) -> None:
    held = {"kind": "chip_held", "worker": 2, "seconds": 600}
    fresh_cloud.script({"kind": "chip_missing", "worker": 1}, held)
    node = fresh_cloud.create_pod("v5litepod-16")
    found = [str(fresh_cloud.run_on_worker(node, LIST, worker).stdout).split() for worker in (0, 1)]
    assert [len(paths) for paths in found] == [5, 4]
    holder = "for fd in /proc/[0-9]*/fd/0; do [ $fd -ef $SLIPWAY_DEV/vfio/0 ] && echo $fd; done; true"

    def held_by(worker: int) -> list[int]:
        return [int(line.split("/")[2]) for line in str(fresh_cloud.run_on_worker(node, holder, worker).stdout).split()]

    [pid] = wait_for(lambda: held_by(2), "a process holds it")
    assert held_by(0) == []
    fresh_cloud.delete(f"{NODES}/pod")
    wait_for(lambda: not is_alive(pid), "it ends with the VM")
    again = fresh_cloud.create_node("pod", "net", "v5litepod-16")
    assert len(str(fresh_cloud.run_on_worker(again, LIST, 1).stdout).split()) == 5, "once"
