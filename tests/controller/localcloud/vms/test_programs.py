"""Storage clients of other people's programs, on an emulated worker."""

from __future__ import annotations

from pathlib import Path

from tests.controller.localcloud.harness import EmulatedCloud

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
