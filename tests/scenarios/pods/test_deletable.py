"""Whatever fails for good while a run goes through its steps, `down` ends what is billed.

The table has rows for every kind of resource, and for each later step of a run. A kind without a row fails
`test_every_kind_of_resource_has_a_row`. Each request is refused in one of three ways, in turns: one place makes errors
of them (`controller/gcp/google_errors.py`). Commands and objects, which fail on a pod that is there, do so in one life,
one after the other, on a new pod each time.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller.agent.protocol import Command
from controller.gcp import outages
from controller.reconcile import Resource
from controller.run import standby
from controller.ssh.agent_link import WorkerError
from controller.ssh.fleet import Fleet
from tests.controller.cli.verbs.test_up import until
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.controller.inputs.wheels import package_repository
from tests.controller.localcloud.harness import PROJECT, EmulatedCloud
from tests.paths import ROOT

pytestmark = pytest.mark.e2e
ONE_WORKER = ("tpu.accelerator_type=v6e-1", "tpu.zone=us-east5-b", "cloud.bucket=deletable")
REFUSALS = (403, 404, 500)
COMPUTE_OPERATIONS = "POST .*/zones/[^/]*/operations/"
"""What waits for creations and deletions alike: without it `down` deletes, but cannot say that it is done."""
REQUESTS: dict[str, tuple[str, ...]] = {
    "services": ("POST .*services:batchEnable", "POST .*services:batchGet|GET .*services:batchGet"),
    "service account": ("POST .*/serviceAccounts$",),
    "bucket": ("POST .*/storage/v1/b$",),
    "roles of": ("POST .*/projects/[^/]*:setIamPolicy",),
    "bucket roles of": ("PUT .*/b/[^/]*/iam$",),
    "network": ("POST .*/global/networks$",),
    "firewall": ("POST .*/global/firewalls$", "GET .*/global/firewalls$"),
    "subnet": ("POST .*/subnetworks$",),
    "router": ("POST .*/routers$",),
    "code": ("POST .*/upload/storage/.*",),
    "node": ("POST .*/nodes$", "POST .*/queuedResources$", "GET .*/tpu/.*/operations/"),
    "node of Compute Engine": ("POST .*/zones/[^/]*/instances$", "GET .*/zones/[^/]*/operations/"),
    "group of Compute Engine": (
        "POST .*/resourcePolicies$",
        "POST .*/regions/[^/]*/instanceTemplates$",
        "POST .*/instanceGroupManagers$",
        "POST .*/instanceGroupManagers/[^/]*/resize",
    ),
    "ssh": ("POST .*:getGuestAttributes",),
    "lease": ("(GET|POST) .*/pods(%2F|/).*lease.*",),
    "data disk": ("POST .*/disks$", COMPUTE_OPERATIONS),
    "secrets": ("GET .*/secrets/.*:access",),
    "asset": (
        "POST .*/upload/storage/.*assets/",
        "GET .*/o/assets",
    ),
    "billing budget": ("POST .*/budgets$", "GET .*/budgets$"),
    "own step": ("POST .*/projects/[^/]*/secrets([?]|$)",),
    "bastion": ("POST .*/instances$", "GET .*/instances/", COMPUTE_OPERATIONS),
    "bastion roles of": ("POST .*/instances/[^/]*/setIamPolicy",),
    "account roles of": ("POST .*/serviceAccounts/[^/]*:setIamPolicy",),
}
"""Requests to Google that fail for good, by the step that sends them."""
OBJECTS = {
    "lease": "pods/.*/lease.json",
    "record of the run": "runs/.*/record.json",
    "pods of the run": "runs/.*/pods/.*",
    "launch": "runs/.*/attempt.*|runs/.*/launch.*",
    "results": "runs/.*/result.*",
    "slipway": "code/.*",
    "wheels": "wheels/.*",
    "handover": "runs/.*/handover.*",
}
"""Objects that cannot be written, by the step that writes them."""
COMMANDS = {
    "ssh": "observe",
    "chips": "observe",
    "watchdog": "set_watchdog",
    "venv": "install_venv",
    "worker code": "install_code",
    "run config": "write_config",
    "verified": "probe_peers",
    "launch": "start",
    "follow": "watch",
    "asset of the pod": "fetch_asset",
    "setup": "run_setup",
    "health check": "check_health",
}
"""Commands of the agent that fail for good, by step."""
SECRET = f"{PROJECT}/secrets/key"
DIGEST = "0" * 64
BASTION = ("recovery.driver=bastion", "recovery.lease_duration_seconds=20")
WORDS: dict[str, tuple[str, ...]] = {
    "data disk": ("tpu.data_disk_gb=20",),
    "secrets": (f"env.secrets.KEY=secretmanager:{SECRET}",),
    "asset": ("assets.datasets.rows.path=rows",),
    "asset of the pod": (
        f"assets.models.weights.files={{w: {{url: 'http://127.0.0.1:9/w', sha256: {DIGEST}}}}}",
        "assets.fetch_on=pod",
    ),
    "asset build": ("assets.tokenizers.vocab.build=[sh,-c,exit 7,'{output}']",),
    "billing budget": ("cloud.billing_budget={account: 012345-6789AB-CDEF01, usd: 10, thresholds: [0.5]}",),
    "own step": ("code.resources=[my_secret:LabSecret]",),
    "setup": ("program.setup=[[sh,-c,exit 0]]",),
    "health check": ("cloud.health_check=true",),
    "wheels": ("env.requirements=needed.txt",),
    "node of Compute Engine": ("tpu.plane=compute_engine",),
    "group of Compute Engine": ("tpu=v6e_8_ce", "tpu.accelerator_type=v6e-8"),
    **dict.fromkeys(("bastion", "bastion roles of", "account roles of", "slipway", "handover"), BASTION),
}
"""What the run of a step is configured with, for steps that are not in every run."""
STATUSES = {"GET .*/instances/": (403,), "POST .*:getGuestAttributes": (500,)}
"""Not in turns: told of no bastion, `down` has nothing to delete; and what every run without --deep tries."""
ELSEWHERE = {
    "private Google access": "tests/controller/resources/test_vpc.py",
    "nat": "tests/controller/resources/test_vpc.py",
    "tidied": "tests/scenarios/inputs/test_environment.py",
}
"""Kinds that have tests of their own; the last three send nothing for a network and a pod that Slipway has made."""


@dataclass(frozen=True)
class Failure:
    """One row: a step, and what fails there; the status of a request, None for a command of the agent."""

    step: str
    what: str
    status: int | None = None

    def __str__(self) -> str:
        return f"{self.step}: {self.what}" + ("" if self.status is None else f" {self.status}")


def rows() -> Iterator[Failure]:
    all_requests = [(step, match) for step, requests in REQUESTS.items() for match in requests]
    for number, (step, match) in enumerate(all_requests):
        statuses = STATUSES.get(match, REFUSALS)
        yield Failure(step, match, statuses[number % len(statuses)])
    yield Failure("ssh", "never answers")
    yield Failure("asset build", "exits with 7")
    yield Failure("bastion", "cannot reach Google")


ON_THE_POD = [
    *(
        Failure(step, f"POST .*/upload/storage/.*({name})", (403, 500)[i % 2])
        for i, (step, name) in enumerate(OBJECTS.items())
    ),
    *(Failure(step, command) for step, command in COMMANDS.items()),
]
REFUSALS_IN_STORE = 10_000
"""How often a request is refused: more often than any test repeats it."""
LASTING: dict[str, dict[str, Any]] = {
    "never answers": {"kind": "ssh_refused", "seconds": 36_000},
    "cannot reach Google": {"kind": "partition", "client": "workers", "seconds": 36_000},
}
"""Faults that last, by what fails."""
SAID = {
    "never answers": "no SSH connection",
    "cannot reach Google": "bastion .* did not start in time",
    "exits with 7": "ended with code 7",
}
"""What `up` says of a fault that has no counter."""
FAST = {
    ("ssh", "POST .*:getGuestAttributes"),
    ("data disk", COMPUTE_OPERATIONS),
}
ROWS = [row if (row.step, row.what) in FAST else pytest.param(row, marks=pytest.mark.deep) for row in rows()]


def refused(match: str, status: int = 403) -> dict[str, Any]:
    return {"kind": "http", "status": status, "match": match, "times": REFUSALS_IN_STORE, "message": "refused for good"}


def nothing_is_billed(slipway: SlipwayCli) -> bool:
    state = slipway.cloud().get("state")
    billed = ("/disks/", "/instances/", "/instanceGroupManagers/")
    compute = [path for path in state.get("compute", {}) if any(kind in path for kind in billed)]
    return not state.get("node") and not state.get("queued") and not compute


def inject(slipway: SlipwayCli, row: Failure, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make the step fail from now on; the list fills with the commands refused."""
    monkeypatch.setattr(outages, "OUTAGE_SECONDS", 1.0)
    monkeypatch.setattr(outages, "OUTAGE_PAUSE_SECONDS", 0.1)
    struck: list[str] = []
    if row.status is not None:
        spec = refused(row.what, row.status)
        slipway.cloud().post("faults", {"key": str(row), "faults": [spec]})
    elif row.what in LASTING:
        slipway.cloud().post("faults", {"key": str(row), "faults": [LASTING[row.what]]})
    else:
        really, really_stream = Fleet.call, Fleet.stream

        def call(fleet: Fleet, worker: int, command: Command[Any, Any], payload: Any) -> Any:
            if command != row.what:
                return really(fleet, worker, command, payload)
            struck.append(command)
            raise WorkerError(worker, "10.0.0.1", "agent", f"`{command}` is refused for good")

        def stream(fleet: Fleet, worker: int, command: Command[Any, Any], payload: Any) -> Any:
            return (
                call(fleet, worker, command, payload)
                if command == row.what
                else really_stream(fleet, worker, command, payload)
            )

        monkeypatch.setattr(Fleet, "call", call)
        monkeypatch.setattr(Fleet, "stream", stream)
    return struck


def write_inputs(repository: Path) -> None:
    """Files that `WORDS` name: an asset, a step of one's own, and a package that is built from a git repository."""
    (repository / "slipway").mkdir(exist_ok=True)
    shutil.copy(ROOT / "docs" / "extend" / "my_secret.py", repository / "slipway")
    (repository / "rows").mkdir()
    (repository / "rows" / "a.jsonl").write_text("{}\n")
    source = repository.with_name("package")
    commit = package_repository(source, "answers")
    (repository / "needed.txt").write_text(f"answers @ git+file://{source}@{commit}\n")


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_down_ends_what_is_billed(slipway: SlipwayCli, row: Failure, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(slipway.repository)
    fails_and_is_deletable(slipway, row, monkeypatch)


@pytest.mark.deep
def test_down_ends_what_is_billed_whatever_fails_on_the_pod(
    slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(slipway.repository)
    for number, row in enumerate(ON_THE_POD):
        with monkeypatch.context() as patch:
            fails_and_is_deletable(slipway, row, patch, f"run.name=life-{number}")
        slipway.cloud().delete("faults")
        print(row, flush=True)  # the last one before a failure


def fails_and_is_deletable(slipway: SlipwayCli, row: Failure, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    """Fail at a step of `up`, which `down` survives."""
    way = "queued" if "queuedResources" in row.what else "auto" if "Compute Engine" in row.step else "node"
    words = [ECHO_COMMAND, *ONE_WORKER, "cleanup.on_failure=keep", f"tpu.provisioner={way}"]
    words += ["ssh.ready_timeout_seconds=0.5", "recovery.max_program_failures=0", "recovery.max_preemptions=0"]
    words += ["recovery.max_create_attempts=2", "recovery.policy.network_lost=give_up", *WORDS.get(row.step, ())]
    words = [*{word.partition("=")[0]: word for word in [*words, *more]}.values()]  # a row's take the place of others
    slipway.packages = "requirements" if row.step == "wheels" else "image"
    monkeypatch.setattr(standby, "START_TIMEOUT_SECONDS", 1.0)
    struck = inject(slipway, row, monkeypatch)
    _, out, err = slipway("up", *words)
    assert "Traceback" not in out + err
    if row.status is not None:
        [fault] = [state for key, state in slipway.cloud().get("state")["fault"].items() if key.startswith(str(row))]
        struck += [row.what] * (REFUSALS_IN_STORE - fault["left"])
    struck += re.findall(SAID.get(row.what, "(?!)"), err)
    assert struck, f"the row proves nothing: {out}{err}"
    code, out, err = slipway("down", *words, "--yes")
    assert (code, err) == (0, "") or (row.what == COMPUTE_OPERATIONS and "refused for good" in err)
    if row.what == COMPUTE_OPERATIONS:
        until(lambda: nothing_is_billed(slipway))
    assert nothing_is_billed(slipway)


def kinds(base: type[Resource]) -> Iterator[str]:
    for one in base.__subclasses__():
        ours = one.__module__.startswith("controller.")  # other tests define some of their own
        yield from [one.kind] if ours and hasattr(one, "kind") else ()
        yield from kinds(one)


def test_every_kind_of_resource_has_a_row() -> None:
    found = set(kinds(Resource))
    assert "bastion" in found
    assert found - REQUESTS.keys() - OBJECTS.keys() - COMMANDS.keys() == ELSEWHERE.keys()
    assert all((ROOT / test).is_file() for test in ELSEWHERE.values())


def test_stop_and_down_need_no_bucket(slipway: SlipwayCli) -> None:
    """The rights on it may have gone since, and so may the bucket."""
    words = [ECHO_COMMAND, *ONE_WORKER, "tpu.capacity=on_demand", "cleanup.on_success=keep"]
    assert slipway("up", *words)[0] == 0
    assert not nothing_is_billed(slipway)
    no_bucket, no_ssh = refused("(GET|POST|PUT|PATCH) .*/storage/.*"), {"kind": "ssh_refused", "seconds": 36_000}
    slipway.cloud().post("faults", {"key": "bucket", "faults": [no_bucket]})
    code, _, err = slipway("stop", *words)
    assert code == 2
    assert "cannot see whether a controller is at work (" in err
    code, out, err = slipway("stop", *words, "--yes")
    assert (code, "the end of the runs and of the pod's time is not on record" in err) == (0, True)
    assert "stopped; `slipway up` starts it" in out
    slipway.cloud().delete("faults")
    assert slipway("up", *words, "run.name=again")[0] == 0
    slipway.cloud().post("faults", {"key": "both", "faults": [no_bucket, {**no_ssh, "after_requests": 0}]})
    code, out, err = slipway("down", *words)
    assert code == 2
    assert "nothing was deleted; neither the pod's lease nor its workers can be read, so a run may be on it" in err
    assert not nothing_is_billed(slipway)
    code, out, err = slipway("down", *words, "--yes")
    assert (code, err) == (0, "")
    assert "the end of the runs and of the pod's time is not on record: storage " in out
    assert nothing_is_billed(slipway)


@pytest.mark.deep
def test_a_pod_whose_ssh_never_works_deletes_itself_without_a_controller(slipway: SlipwayCli) -> None:
    """Nobody runs `down`: the node's startup script deletes the pod, without SSH, agent or watchdog."""
    spec = {"kind": "ssh_refused", "seconds": 36_000}
    slipway.cloud().post("faults", {"key": "ssh", "faults": [spec]})
    words = [ECHO_COMMAND, *ONE_WORKER, "cleanup.on_failure=keep", "cleanup.heartbeat_timeout_hours=0.001"]
    assert slipway("up", *words, "ssh.ready_timeout_seconds=0.5", "recovery.policy.setup_failure=give_up")[0] != 0
    until(lambda: nothing_is_billed(slipway))
    assert [r["client"] for r in slipway.cloud().requests() if r["method"] == "DELETE"][-1].endswith("/0")


def test_down_names_a_zone_that_it_may_not_look_into(slipway: SlipwayCli) -> None:
    EmulatedCloud(slipway.cloud().state).establish()  # where the API is off there is no pod to look for
    words = [ECHO_COMMAND, *ONE_WORKER, "tpu.fallback_zones=[us-east5-a]"]
    slipway.cloud().post("faults", {"key": "zone", "faults": [refused("GET .*/locations/us-east5-a/.*")]})
    code, out, err = slipway("down", *words)
    assert code == 2
    assert "nothing to delete" in out
    assert "you may not look for TPUs of the TPU API in us-east5-a: if a pod or queued resource slipway-v6e-1-" in err
