"""A run, restored from its record: the same config, code, packages and data, whatever the working tree holds.

The record is read from this machine, else from the bucket that the overrides next to `--run` (`cloud=…`) select. The
code comes from the archive in the bucket, so that a clean clone at any commit is enough; verbs that only look at the
run or end it need neither.
"""

import difflib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from conf.schema.base import without_volatile
from conf.schema.config import Config
from conf.schema.validation import validate
from controller.config.compose import compose, compose_raw, sound, with_overrides
from controller.config.run_yaml import bucket_name
from controller.connect import open_context, project_of
from controller.context import Context
from controller.core.errors import ConfigError
from controller.core.json_documents import DamagedRecordError, UnreadableError
from controller.core.text import object_url, one_line
from controller.emulator import Emulator
from controller.gcp.client import GoogleClient
from controller.gcp.credentials import missing_project
from controller.gcp.google_errors import NoCredentialsError, NotFoundError
from controller.inputs.code import CodeSnapshot, NamedCode
from controller.inputs.resolved_assets import AssetFile, ResolvedAsset
from controller.plan.build import Plan, RecordedInputs, build_plan
from controller.records import index, recorder
from controller.records.ledger import Ledger
from controller.records.recorded_code import MissingInputsError, checked_hash, restore_code
from controller.records.recorder import RECORD_FILE, REPEAT_SUFFIX, RunRecord, read_run_record
from controller.records.trust import is_trusted, parse_run_yaml


@dataclass(frozen=True)
class RecordedRun:
    """A run as its record has it, with a connection to its cloud. Nothing of its code has been imported or executed."""

    document: RunRecord
    config: Config
    context: Context
    emulator: Emulator | None
    folder: Path

    @cached_property
    def code(self) -> CodeSnapshot:
        """Its code, unpacked on this machine. Raises ConfigError if the bucket does not have it."""
        return restore_code(self.context.google, self.document, self.context.state_dir)

    def plan(self, *, drives: bool) -> Plan:
        """Return its plan.

        Args:
            drives: for a verb that executes what the record holds: its own steps are imported, and the plan is that of
                a new run `ID-r1` if the run has finished. Other verbs need neither its code nor its data.
        """
        google, document = self.context.google, self.document
        name = _next_run_id(google, document["bucket"], document["run"]) if drives else document["run"]
        inputs = _recorded_inputs(google if drives else None, document, name, self.context.state_dir)
        code = self.code if drives else self._code_to_look_with()
        plan = build_plan(self.config, document["project"], self.folder, code, inputs, own_code=drives)
        return replace(plan, trusted=is_trusted(self.context.state_dir, document))

    def _code_to_look_with(self) -> CodeSnapshot:
        """Return the code if its requirements say which packages the workers have, and the bucket has it."""
        if self.config.env.packages == "requirements":
            try:
                return self.code
            except (ConfigError, OSError) as error:
                print(f"warning: {error}; `verify` cannot compare the packages", file=sys.stderr)
        return _named_code(self.document, self.folder)


@contextmanager
def open_record(
    run_id: str, overrides: Sequence[str], folder: Path, *, only_results: bool = False
) -> Iterator[RecordedRun]:
    """Open the record of a run and a connection to its cloud.

    Raises ConfigError if the record is missing or incomplete, or the overrides would make it another run.

    Args:
        run_id: id of the run.
        overrides: `cloud=…` selects where the record is; `key.path=value` changes where and how the run executes.
        folder: current folder of the user.
        only_results: for a verb that only reads files of the run: if the record is missing or damaged, that is said,
            and the files are those in the bucket of the overrides.
    """
    groups = [word for word in overrides if "." not in word.partition("=")[0]]
    here = sound(compose(groups, extra_dir=folder / "slipway"))
    state = Path(here.run.state_dir).expanduser()
    try:
        document = _record_here(state, run_id) or download_record(here, run_id)
        config = _config_here(document, [word for word in overrides if word not in groups], here, folder)
        # no choice of a group that the record does not have, but for `cloud`, which says where the record is
        same = {word.lstrip("+") for word in document["overrides"]}
        if others := [word for word in groups if not word.startswith("cloud=") and word.lstrip("+") not in same]:
            raise ConfigError(f"{', '.join(others)}: {_another_run(document)}")
    except (ConfigError, UnreadableError) as error:
        if not only_results or not _has_files(here, run_id):
            raise
        print(f"warning: {error}; its files are there all the same", file=sys.stderr)
        document, config = {"run": run_id, "project": project_of(here), "bucket": _bucket(here)}, here
    if only_results:  # so that nothing else that a record holds is in the way of them
        document = document | {"code_sha256": "0" * 64, "run_yaml": "", "requirements": "", "assets": []}
        config = here.model_copy(update={"cloud": config.cloud, "tpu": config.tpu})
    with open_context(config) as (context, emulator):
        yield RecordedRun(document, config, context, emulator, folder)


def _another_run(document: RunRecord) -> str:
    return (
        f"--run {document['run']}: overrides cannot change what a recorded run computes; for a new run, "
        f"replace --run with its overrides: {' '.join(document['overrides'])}"
    )


def plan_of_launched(run_id: str, edited: Plan, context: Context, emulator: Emulator | None) -> Plan:
    """Return the plan of a run that this machine launched, where its words mean another one since code was edited.

    Args:
        run_id: id of the run.
        edited: what the words mean now; it is returned if this machine has no record of the run, as before its launch.
    """
    try:
        document = recorder.load_record(context.state_dir, run_id)
    except (UnreadableError, OSError) as error:
        print(f"warning: {error}", file=sys.stderr)
        document = None
    if document is None:
        return edited
    print(f"note: what was edited since is no part of {run_id}; `slipway up` would start another run", file=sys.stderr)
    return RecordedRun(document, edited.config, context, emulator, Path.cwd()).plan(drives=False)


def _record_here(state: Path, run_id: str) -> RunRecord | None:
    """Return the record if this machine has it; of a damaged one, which is said, the bucket has another copy."""
    try:
        return recorder.load_record(state, run_id)
    except (DamagedRecordError, OSError) as error:
        print(f"warning: {error}; the bucket's copy is used", file=sys.stderr)
        return None


def _bucket(here: Config) -> str:
    return bucket_name(here, project_of(here))


def _has_files(here: Config, run_id: str) -> bool:
    where = {"bucket": _bucket(here), "prefix": f"runs/{run_id}/", "maxResults": 1}
    try:
        with open_context(here) as (context, _):
            return bool(context.google.call("storage", "objects.list", **where).get("items"))
    except (NotFoundError, NoCredentialsError):
        return False


def plan_from_record(
    document: RunRecord, config: Config, google: GoogleClient, state: Path, *, drives: bool = True
) -> Plan:
    """Rebuild the plan of a record on another machine than the one that made it, without the user's own steps.

    Raises ConfigError if it is to drive the run, and its code or data no longer exists.
    """
    code = restore_code(google, document, state) if drives else _named_code(document, state)
    inputs = _recorded_inputs(google if drives else None, document, document["run"], state)
    return build_plan(config, document["project"], state, code, inputs, own_code=False)


def _named_code(document: RunRecord, folder: Path) -> NamedCode:
    return NamedCode(folder, (), checked_hash(document, document["code_sha256"]))


def find_record(overrides: Sequence[str], run_id: str, folder: Path) -> RunRecord:
    """Download the record of a run from the bucket of the overrides. Raises ConfigError if there is none."""
    return download_record(sound(compose(overrides, extra_dir=folder / "slipway")), run_id)


def download_record(here: Config, run_id: str) -> RunRecord:
    """Download the record of a run from the bucket of a config. Raises ConfigError if there is none."""
    project = project_of(here)
    bucket = bucket_name(here, project)
    try:
        with open_context(here) as (context, _):
            content = Ledger(context.google, bucket, run_id).read(RECORD_FILE)
    except NoCredentialsError as error:
        where = "the bucket" if missing_project(project) else f"gs://{bucket}"
        raise ConfigError(f"{_no_record(here, run_id)}, and {where} cannot be read: {error}") from None
    if content is None:
        raise ConfigError(
            f"--run {run_id}: no such run on this machine or in {object_url(bucket)}; `slipway runs` lists runs; to "
            "search elsewhere, add cloud=… or cloud.bucket=…"
        )
    document = read_run_record(content, object_url(bucket, f"runs/{run_id}/{RECORD_FILE}"), run_id, bucket)
    if (kind := document["config"]["cloud"]["kind"]) != here.cloud.kind:
        raise DamagedRecordError(f"--run {run_id}: its record says cloud={kind}, and is in {object_url(bucket)}")
    if document["project"] != project and not missing_project(project):
        theirs = f"{one_line(document['project']):.200}"
        raise ConfigError(
            f"--run {run_id}: its record, in {object_url(bucket)}, says project {theirs}, not {project}; if that is "
            f"right, add cloud.project={shlex.quote(theirs)}"
        )
    return document


def _no_record(here: Config, run_id: str) -> str:
    """Say that this machine has no record of a run, and what its table of runs says of it, or which id is close."""
    known = {row["run"]: row for row in index.load_rows(Path(here.run.state_dir).expanduser())}
    if run_id in known:
        cloud = one_line(known[run_id].get("cloud") or "unknown")
        return f"{run_id}: no record of it on this machine (the table of runs has it, with cloud={cloud:.20})"
    near = difflib.get_close_matches(run_id, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "`slipway runs` lists its runs"
    return f"{run_id}: no such run on this machine ({hint})"


def recorded_config(document: RunRecord, folder: Path) -> Config:
    """Return the config of a record; keys added since then get their current values.

    Raises ConfigError if it has keys that do not exist any more.
    """
    config, problems = validate(document["config"])
    if config is None:
        config, problems = validate(_fill_missing(document["config"], _recompose_config(document, folder)))
    if config is None or problems:
        said = [f"--run {document['run']}: recorded by slipway {document['slipway']}, with different config keys:"]
        raise ConfigError([*said, *map(str, problems)])
    return config


def _config_here(document: RunRecord, overrides: Sequence[str], here: Config, folder: Path) -> Config:
    """Return the recorded config with this machine's state folder, and with overrides that leave the run the same."""
    config = recorded_config(document, folder)
    local = {"run": {"state_dir": here.run.state_dir}, "cloud": {"project": document["project"]}}
    changed = sound(validate(with_overrides(_fill_missing(local, config.model_dump(mode="json")), overrides)))
    if without_volatile(changed) != without_volatile(config):
        raise ConfigError(_another_run(document))
    return changed


def _recompose_config(document: RunRecord, folder: Path) -> dict[str, Any]:
    """Compose the run's overrides as they read today, or only its cloud if they no longer compose.

    Also where they would read this machine's environment, or files beside ours: others may have written them.
    """
    try:
        if not any("${" in word or re.match(r"[+~]*hydra\b", word) for word in document["overrides"]):
            return compose_raw(document["overrides"], extra_dir=folder / "slipway")
    except ConfigError:
        pass
    return compose_raw([f"cloud={document['config']['cloud']['kind']}"])


def _fill_missing(known: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    both = {key: value for key, value in others.items() if key not in known}
    for key, value in known.items():
        other = others.get(key)
        both[key] = _fill_missing(value, other) if isinstance(value, dict) and isinstance(other, dict) else value
    return both


def _next_run_id(google: GoogleClient, bucket: str, run_id: str) -> str:
    """Return the run id while the run has not finished, else the id of its next repetition."""
    if Ledger(google, bucket, run_id).result() is None:
        return run_id
    found = REPEAT_SUFFIX.search(run_id)
    base = run_id[: found.start()] if found else run_id
    return f"{base}-r{int(found[1]) + 1 if found else 1}"


def _recorded_inputs(google: GoogleClient | None, document: RunRecord, run_id: str, state: Path) -> RecordedInputs:
    """Return what the record says of the run's inputs; with `google`, the bucket must have the data."""
    bucket = document["bucket"]
    run_yaml = document["run_yaml"]
    if run_id != document["run"]:
        content = parse_run_yaml(document)
        content |= {"id": run_id, "dir": f"{content['dir'].rpartition('/')[0]}/{run_id}"}
        run_yaml = yaml.safe_dump(content, sort_keys=False)
    held: dict[str, ResolvedAsset] = {}
    for asset in document["assets"]:
        hashes = {name: checked_hash(document, sha) for name, sha in asset["files"].items()}
        files = tuple(AssetFile(name, state / "downloads" / sha, sha) for name, sha in hashes.items())
        content = ResolvedAsset(asset["kind"], asset["name"], asset["identity"], files)
        held[content.path] = content
        if google is None:
            continue
        manifest = f"{content.prefix}/manifest.json"
        if google.find("storage", "objects.get", bucket=bucket, object=manifest) is None:
            raise MissingInputsError(
                f"--run {document['run']}: its {content.path} is missing from {object_url(bucket, content.prefix)}; "
                "a run with the same overrides copies it again"
            )
    return RecordedInputs(run_id, run_yaml, held, document["requirements"])
