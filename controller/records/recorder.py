"""Recorder of a run: its inputs, written once at the first launch, and its results, written when it ends.

`runs/<id>/record.json` in the bucket equals the one in `<state>/runs/<id>/` on this machine. Next to it are run.yaml,
plan.yaml (the same config, readable), git.json with diff.patch, and the events and Google requests of each machine that
drove the run. The code itself is in the bucket's archive `code/<sha256>.tar.gz`.
"""

import os
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import yaml

from conf.formats import POD_VARIABLE
from conf.strict_json import dumps
from controller.agent.protocol import OBSERVE
from controller.context import Context
from controller.core import json_documents
from controller.core.events import Event
from controller.core.json_documents import DamagedRecordError, checked, dump, load, load_json, type_problem
from controller.core.text import one_line
from controller.core.this_process import DISTRIBUTION
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import ConflictError
from controller.inputs.git import collect_git_status as git_record
from controller.inputs.resolved_assets import ResolvedAsset
from controller.plan.build import Plan
from controller.plan.samplers import sampler_suffix
from controller.records import index, trust
from controller.records.ledger import Ledger, Result, parse_record
from controller.records.spending import Spending
from controller.resources.software import Venv
from controller.ssh.fleet import Fleet

RECORD_FILE = "record.json"
LOCAL_METRICS_FILE = "told.jsonl"
"""Metrics lines as they arrived: the only copy if the program does not upload metrics.jsonl."""
MACHINE_ID = re.compile(r"[0-9a-f]{8}")
REPEAT_SUFFIX = re.compile(r"-r(\d+)$")
JOB_MODULE = "slipway_job.multirun.job"
"""Module on the workers that runs a job of someone else's Hydra app, whose words follow it in the command."""
RunRecord = dict[str, Any]


class AssetKeys(TypedDict):
    """What the record says of an asset."""

    kind: str
    name: str
    identity: str
    files: dict[str, str]


class RecordKeys(TypedDict):
    """What readers of a record rely on. A record that was written again after damage lacks what the launch knew."""

    run: str
    slipway: str
    project: str
    bucket: str
    overrides: list[str]
    code_sha256: str
    config: dict[str, Any]
    run_yaml: str
    requirements: str
    assets: list[AssetKeys]
    worker_0: NotRequired[dict[str, Any]]
    prices: NotRequired[dict[str, Any]]
    git: NotRequired[dict[str, Any]]


class Recorder:
    """Keeps the record of one run while one `up` drives it."""

    def __init__(
        self,
        plan: Plan,
        context: Context,
        ledger: Ledger,
        overrides: Sequence[str],
        sweep: str = "",
        known: RunRecord | None = None,
    ) -> None:
        """Prepare the recorder, writing nothing; `known` is the document of the machine that handed over the run."""
        self._handover = known
        self._plan, self._context, self._ledger = plan, context, ledger
        self._overrides, self._sweep = list(overrides), sweep
        self.folder = run_folder(context.state_dir, plan.run_id)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Write events, metrics and requests to local files while the context is open."""
        notes = self._context.local_notes
        events = notes.listener(self.folder / "events.jsonl")

        def write(call: RunRecord) -> None:
            notes.append(self.folder / "requests.jsonl", dumps(call) + "\n")

        def keep(event: Event) -> None:
            if event.kind == "metrics":
                line = dumps({"time": round(event.time, 3)} | event.data["metrics"])
                notes.append(self.folder / LOCAL_METRICS_FILE, f"{line}\n")

        self._context.events.add_listener(events)
        self._context.events.add_listener(keep)
        self._context.google.add_listener(write)
        try:
            yield
        finally:
            self._context.events.remove_listener(events)
            self._context.events.remove_listener(keep)
            self._context.google.remove_listener(write)

    def begin(self, fleet: Fleet) -> None:
        """Write the inputs of the run unless they are recorded already; record.json is written last."""
        plan, ledger = self._plan, self._ledger
        if (known := ledger.read(RECORD_FILE)) is None:
            document: RunRecord = describe_plan(plan, self._overrides) | {"worker_0": _worker_0_facts(plan, fleet)}
            document["assets"] = [_with_pinned(asset, plan, self._context.google) for asset in document["assets"]]
            document |= {"created": self._context.clock.now(), "prices": self._price_fields(), "sweep": self._sweep}
            document |= self._handed_over_code_origin() or self._repeated_run_origin() or self._save_code_state()
            shown = {key: document[key] for key in ("run", "overrides", "code_sha256", "config")}
            ledger.write("plan.yaml", yaml.safe_dump(shown, sort_keys=False))
            ledger.write("run.yaml", plan.run_yaml)
            known = dump(document, indent=1).encode()
            if ledger.create(RECORD_FILE, known.decode()):
                trust.remember(self._context.state_dir, read_run_record(known, RECORD_FILE, plan.run_id))
            else:
                known = ledger.read(RECORD_FILE) or known  # another controller was faster
        if self._parse(known, f"{ledger.prefix}/{RECORD_FILE}") is not None:
            self._context.local_notes.write(self.folder / RECORD_FILE, known)
        seen = index.row_generation(self._context.google, ledger.bucket, plan.run_id)
        self._context.before_pod_write()  # whoever acquires the lease after this writes the row later than we looked
        with suppress(ConflictError):
            self._publish_row({"state": "running"}, seen)

    def finish(self, result: Result, spending: Spending) -> None:
        """Record that the run has finished: copy its results to this machine and upload this machine's files."""
        self._restore_record()
        notes = self._context.local_notes
        notes.write(self.folder / "result.json", dumps(result.to_json(), indent=1))
        if (told := _text_of(self.folder / LOCAL_METRICS_FILE)) and not self._ledger.exists("metrics.jsonl"):
            self._ledger.create("metrics.jsonl", told)  # of a program that left it on its worker
        for name in ("metrics.jsonl", "transcripts.jsonl"):  # a custom program need not write any
            if (lines := self._ledger.read(name)) is not None:
                notes.write(self.folder / name, lines)
        numbers = {"ended": result.ended, "seconds": result.seconds, "attempts": result.attempts}
        self._publish_row({"state": result.outcome, **numbers, "metrics": result.summary, **_cost_fields(spending)})
        self._upload()

    def finish_after_crash(self, result: Result, spending: Spending) -> None:
        """Call `finish` if an earlier controller was killed before it could."""
        if not (self.folder / "result.json").is_file() and self._load_record() is not None:
            self.finish(result, spending)

    def record_stop(self, state: str, why: str, spending: Spending) -> None:
        """Record that the run has stopped without finishing: failed or cancelled."""
        if (known := self._load_record()) is not None:
            now = self._context.clock.now()
            row = {"state": state, "reason": why.partition("\n")[0][:500], "ended": now}
            row["seconds"] = round(now - known["created"], 1)
            self._publish_row(row | _cost_fields(spending))
            self._upload()

    def _publish_row(self, row: RunRecord, generation: int | None = None) -> None:
        known = self._load_record() or self._rebuilt_record()
        whole = row_from_record(known) | row
        with self._context.local_notes.best_effort(index.index_file(self._context.state_dir)):
            index.append_rows(self._context.state_dir, [whole])
        index.publish_row(self._context.google, self._ledger.bucket, whole, generation)

    def _load_record(self) -> RunRecord | None:
        """Return the record, downloaded if another machine started the run; None before the first launch.

        If both copies are damaged, return what this machine knows.
        """
        file = self.folder / RECORD_FILE
        if (known := self._parse(file.read_bytes() if file.is_file() else None, str(file))) is not None:
            return known
        if (content := self._ledger.read(RECORD_FILE)) is None:
            return self._rebuilt_record() if file.is_file() else None
        if (known := self._parse(content, f"{self._ledger.prefix}/{RECORD_FILE}")) is None:
            return self._rebuilt_record()
        self._context.local_notes.write(file, content)
        return known

    def _parse(self, content: bytes | None, name: str, run_id: str = "") -> RunRecord | None:
        """Return a record, of this run if none is named; None if it is damaged, which the ledger reports, or absent."""
        if content is None:
            return None
        try:
            return read_run_record(content, name, run_id or self._plan.run_id, self._ledger.bucket)
        except DamagedRecordError as error:
            self._ledger.report(str(error))
            return None

    def _restore_record(self) -> None:
        """Write the record to the bucket again if it is gone or damaged there: the run can be repeated from it."""
        name = f"{self._ledger.prefix}/{RECORD_FILE}"
        there = self._ledger.read(RECORD_FILE)
        if self._parse(there, name) is not None:
            return
        if there is None:
            self._ledger.report(f"{name} is missing")
        self._ledger.write(RECORD_FILE, dump(self._load_record() or self._rebuilt_record(), indent=1))

    def _rebuilt_record(self) -> RunRecord:
        """Return a record of what the plan says, without what only the first launch knew."""
        return describe_plan(self._plan, self._overrides) | {"created": self._context.clock.now(), "sweep": self._sweep}

    def _upload(self) -> None:
        """Upload the events and requests of this machine; other machines upload their own."""
        machine = machine_id(self._context.state_dir)
        for name in ("events", "requests"):
            if text := _text_of(self.folder / f"{name}.jsonl"):
                self._ledger.write(f"{name}/{machine}.jsonl", text)

    def handover_data(self) -> RunRecord:
        """Return what another machine needs to drive the run and keep its record."""
        document = describe_plan(self._plan, self._overrides)
        return document | (self._repeated_run_origin() or self._save_code_state())

    def _handed_over_code_origin(self) -> RunRecord:
        """Return the code's origin as the handing-over machine recorded it; empty without a handover."""
        known = self._handover or {}
        return {key: known[key] for key in ("git", "slipway") if key in known}

    def _repeated_run_origin(self) -> RunRecord:
        """Return the overrides and the code's origin from the record of the run that this one repeats."""
        if (base := REPEAT_SUFFIX.sub("", self._plan.run_id)) == self._plan.run_id:
            return {}
        content = Ledger(self._context.google, self._ledger.bucket, base).read(RECORD_FILE)
        known = self._parse(content, f"runs/{base}/{RECORD_FILE}", base) or {}
        return {key: known[key] for key in ("overrides", "git") if key in known}

    def _save_code_state(self) -> RunRecord:
        """Record the git state of the code, with the changes as a patch."""
        snapshot, config, secrets = self._plan.snapshot, self._plan.config, self._plan.vault.values().values()
        document, patch = git_record(snapshot.root, config.code.exclude, secrets)
        if patch:
            self._ledger.write("diff.patch", patch)
        self._ledger.write("git.json", dump(document, indent=1))
        return {"git": document}

    def _price_fields(self) -> RunRecord:
        from controller.gcp.prices import hourly_price

        price = hourly_price(self._plan.config, self._context.clock.now())
        return {"usd_per_hour": price.tpu, "usd_per_hour_network": price.network, "source": price.source}


def describe_plan(plan: Plan, overrides: Sequence[str]) -> RunRecord:
    """Return every decision made before the run starts; `restore` rebuilds the plan from it."""
    venv = plan.get(Venv)
    return {
        "run": plan.run_id,
        "repeats": REPEAT_SUFFIX.sub("", plan.run_id) if REPEAT_SUFFIX.search(plan.run_id) else None,
        "slipway": version(DISTRIBUTION),
        "project": plan.project,
        "bucket": plan.bucket,
        "overrides": list(overrides),
        "code_sha256": plan.snapshot.sha256,
        "config": plan.config.model_dump(mode="json"),
        "run_yaml": plan.run_yaml,
        "requirements": venv.requirements,
        "assets": [_asset_manifest(content) for content in plan.assets],
    }


def row_from_record(document: RunRecord) -> RunRecord:
    """Return the row of the table of runs with what is known at the start of the run."""
    config = document["config"]
    row = {key: document.get(key) for key in ("run", "created", "project", "bucket", "sweep")}
    cloud = config["cloud"]
    pod = {"type": config["tpu"]["accelerator_type"], "zone": config["tpu"]["zone"], "cloud": cloud["kind"]}
    if cloud["kind"] == "here":
        pod |= {"type": f"{cloud['backend']}-{len(cloud['devices'])}", "zone": None}
    commit = document.get("git", {}).get("commit")
    name = {"name": config["run"]["name"], "seed": config["run"]["seed"], "overrides": document["overrides"]}
    command = config.get("program", {}).get("command")  # null for the bundled trainer
    if command and JOB_MODULE in command:
        command, name["overrides"] = split_job(command)
    program = {"program": program_name(command)} if command else {}
    number = config.get("env", {}).get("vars", {}).get(POD_VARIABLE)  # of samplers, whose run belongs to another
    program |= {"samples_for": document["run"].removesuffix(sampler_suffix(number))} if number else {}
    return {**row, **name, **program, **pod, "commit": commit, "code": document["code_sha256"]}


def split_job(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return how a job of a Hydra app starts the app, and the app's own words, which tell one job from another."""
    words = list(command[command.index(JOB_MODULE) + 1 :])
    if words[0] == "--in":
        del words[:2]
    size = 2 if words[0] == "-m" else 1
    return words[:size], words[size:]


def program_name(words: Sequence[str]) -> str:
    """Return what tells one command from another: its script or module, else its first word."""
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    scripts = [word for word in words if word.endswith((".py", ".sh"))]
    return Path((scripts or words)[0]).name


def run_folder(state: Path, run_id: str) -> Path:
    return state / "runs" / run_id


def load_record(state: Path, run_id: str) -> RunRecord | None:
    """Load the record from this machine. Raises DamagedRecordError and FormatError as `read_run_record`."""
    file = run_folder(state, run_id) / RECORD_FILE
    return read_run_record(file.read_bytes(), str(file), run_id) if file.is_file() else None


def read_run_record(content: bytes, name: str, run_id: str, bucket: str = "") -> RunRecord:
    """Parse the record of a run. One from a bucket must name it: else its reader would act elsewhere, or in a folder.

    Raises:
        DamagedRecordError: it is not what `Recorder` writes for this run.
        FormatError: a later Slipway wrote it.
    """
    known = parse_record(content, checked, name)
    problem = type_problem(known, RecordKeys, "the record")
    try:
        problem = problem or index.row_problem(row_from_record(known))
        if not problem and known["run"] != run_id:
            problem = f"it is of another run, {known['run']}"
        if not problem and bucket and os.path.realpath(known["bucket"]) != os.path.realpath(bucket):
            problem = f"it names another bucket, {one_line(known['bucket']):.200}"
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        problem = problem or f"{type(error).__name__} {error}"
    if problem:
        raise DamagedRecordError(f"{name} is damaged: {problem}")
    return known


def machine_id(state: Path) -> str:
    """Return the random id of this machine's state folder, created on first use; a new one where it is not kept."""
    file, new = state / "machine", uuid.uuid4().hex[:8]
    if not MACHINE_ID.fullmatch(_text_of(file)):
        with suppress(OSError):
            json_documents.replace_file(file, new)
    known = _text_of(file)
    return known if MACHINE_ID.fullmatch(known) else new


def _text_of(file: Path) -> str:
    """Return what a note of this machine says; "" if it cannot be read."""
    try:
        return file.read_text(errors="replace") if file.is_file() else ""
    except OSError:
        return ""


def _worker_0_facts(plan: Plan, fleet: Fleet) -> RunRecord:
    """Return worker 0's packages, devices and Python, which the launch has compared; empty if it does not answer."""
    venv = plan.get(Venv)
    [observed] = fleet.call_all(OBSERVE, {"venv": venv.name}, workers=[0])
    if not isinstance(observed, dict):
        return {"packages": {}, "devices": None, "python": None, "runtime_version": plan.node.spec.runtime_version}
    devices = {key: observed["devices"][key] for key in ("backend", "devices", "kind")} if observed["devices"] else None
    return {
        "packages": (observed["venv"] or {}).get("versions", {}),
        "devices": devices,
        "python": observed["image"]["python"],
        "image_fingerprint": observed["image"]["fingerprint"],
        "runtime_version": plan.node.spec.runtime_version,
    }


def _cost_fields(spending: Spending) -> RunRecord:
    spent = spending.usage()
    usd = None if spent.usd is None else round(spent.usd, 4)
    return {"pod_hours": round(spent.hours, 4), "usd": usd, "pods": [life.to_json() for life in spending.lifetimes()]}


def _with_pinned(asset: RunRecord, plan: Plan, google: GoogleClient) -> RunRecord:
    """Add to an asset with a source the commit that was fetched, and the SHA-256 of its files."""
    if "source" not in asset:
        return asset
    prefix = next(content.prefix for content in plan.assets if content.identity == asset["identity"])
    pinned = load(google.download(plan.bucket, f"{prefix}/source.json"), f"{prefix}/source.json")
    hashes = load_json(google.download(plan.bucket, f"{prefix}/manifest.json"), f"{prefix}/manifest.json")
    if problem := type_problem(pinned.get("revision"), str) or type_problem(hashes, dict[str, str]):
        raise DamagedRecordError(f"gs://{plan.bucket}/{prefix} is damaged: {problem}; delete it")
    files = {name: text for name, text in hashes.items() if ":" not in text}  # objects of a bucket have an MD5
    return asset | {"revision": pinned["revision"], "files": files}


def _asset_manifest(content: ResolvedAsset) -> RunRecord:
    files = {source.name: source.sha256 for source in content.files}
    told = {"kind": content.kind, "name": content.name, "identity": content.identity, "files": files}
    return told | ({"source": content.source} if content.source else {})
