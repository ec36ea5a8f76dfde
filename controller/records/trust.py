"""Which records this machine may execute: those that it made, and those that its user has agreed to.

A record is data: whoever can write to the bucket can put one there, for any run. So a verb that executes one first
shows what it holds, and asks once. The answer is kept as a file of the state folder, named by the hash of the record's
content, which has the hashes of the code and the data: any change asks again.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from conf.strict_json import dumps
from controller.config.compose import compose_raw
from controller.config.run_yaml import render
from controller.core.errors import ConfigError
from controller.core.events import confirm
from controller.core.json_documents import DamagedRecordError
from controller.core.text import object_url, one_line, plural, width_of, wrap
from controller.inputs.modules import references
from controller.inputs.resolved_assets import ResolvedAsset
from controller.plan.worker_steps import venv_requirements

if TYPE_CHECKING:
    from conf.schema.config import Config
    from controller.inputs.code import CodeSnapshot

RunRecord = Mapping[str, Any]
ON_THIS_MACHINE = ("check", "notifier", "resource kind")
"""Kinds of own code that run on the machine that drives the run."""
SETTINGS = ("cloud", "network", "ssh", "env", "logging", "notify", "recovery")
"""Sections of the config of which all that is not usual is shown."""
MAX_WORDS = 2000
"""Characters of a value that are shown; the rest is in the record."""


def _mark(state: Path, document: RunRecord) -> Path:
    return state / "trusted" / hashlib.sha256(dumps(document, sort_keys=True).encode()).hexdigest()


def is_trusted(state: Path, document: RunRecord) -> bool:
    """Return whether this machine made the record, or its user agreed to execute it."""
    return _mark(state, document).is_file()


def remember(state: Path, document: RunRecord) -> None:
    """Keep that the record may be executed here. A state folder that cannot be written makes us ask again."""
    mark = _mark(state, document)
    with suppress(OSError):
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.write_text(f"{document['run']}\n")


def require_trust(
    document: RunRecord, config: Config, code: CodeSnapshot, state: Path, *, trust: bool, asks: bool
) -> None:
    """Show what a record that this machine did not make would execute, and ask once.

    Raises ConfigError if nobody agreed.

    Args:
        document: the record.
        config: its config, with what the user has added.
        code: its code.
        state: state folder of this machine, which remembers the answer.
        trust: the user has agreed beforehand, with --trust.
        asks: whether there may be someone to ask.
    """
    if is_trusted(state, document):
        return
    width = width_of(sys.stderr)
    print(wrap(f"{document['run']} is from a record that this machine did not make. It would execute:", width, 2),
          file=sys.stderr)  # fmt: skip
    for name, words in what_it_executes(document, config, code):
        text = one_line(words)
        text = text if len(text) <= MAX_WORDS else f"{text[:MAX_WORDS]} … ({len(text)} characters)"
        print(wrap(f"  {name:<9} {text}", width, 12), file=sys.stderr)
    if not trust and not (asks and confirm("Trust this record?")):
        raise ConfigError(
            f"--run {document['run']}: nothing was executed: this machine did not make the record. Read it and the "
            "files named above, then pass --trust (in Python trust=True)"
        )
    remember(state, document)


def what_it_executes(document: RunRecord, config: Config, code: CodeSnapshot) -> Iterator[tuple[str, str]]:
    """Yield what a record makes machines execute, or hands to what they execute, as pairs of name and words.

    Raises DamagedRecordError if its run.yaml is none.
    """
    run, bucket = document["run"], document["bucket"]
    yield "record", f"{object_url(bucket, f'runs/{run}/record.json')}, in project {document['project']}"
    yield "files", f"{plural(len(code.files), 'file')} in {code.root}"
    git = document.get("git") or {}
    changes = " with changes of its own" if git.get("dirty") else ""
    yield "commit", f"{git.get('commit') or 'unknown'}{changes}, as the record says"
    if (repository := config.code.repository) is not None:
        yield "from", f"{repository.url} at {repository.commit}"
    requirements = venv_requirements(config, code)
    yield "packages", f"{config.env.packages}{_packages(document['requirements'], requirements.text, config)}"
    for built in requirements.git:
        yield "build", f"{built.line}, on this machine"
    everything_here = config.cloud.kind == "here"
    for use in references(config):
        where = "this machine" if everything_here or use.kind in ON_THIS_MACHINE else "the workers"
        yield "own code", f"{use.key}: {use.reference}, on {where}"
    for words in config.program.setup:
        yield "setup", shlex.join(words)
    yield "command", "the bundled trainer" if config.program.kind == "trainer" else shlex.join(config.program.command)
    for name, source in sorted(config.secret_sources.items()):
        if source is not None:
            yield "secret", f"{name}, which this machine reads from {source}"
    # What grants rights, opens networks, and changes what a program finds around it.
    usual, chosen = compose_raw([f"cloud={config.cloud.kind}"]), config.model_dump(mode="json")
    for key, value in _differences({name: chosen[name] for name in SETTINGS}, usual):
        yield "sets", f"{key}: {dumps(value)}"
    if config.program.kind == "trainer":
        prefixes = {each["name"]: ResolvedAsset(each["kind"], each["name"], each["identity"]).prefix
                    for each in document["assets"]}  # fmt: skip
        rendered = yaml.safe_load(render(config, run, bucket, prefixes))
        told = {key: value for key, value in parse_run_yaml(document).items() if key not in ("pod", "compile_cache")}
        for key, value in _differences(told, rendered):
            yield "run.yaml", f"{key}: {dumps(value)}, which its config does not say"


def _packages(recorded: str, wanted: str, config: Config) -> str:
    """Return what is known of the packages: with a lock, which lines of the record this version's lock lacks."""
    if config.env.packages != "lock":
        return f", as in {config.env.requirements}" if config.env.requirements else ""
    there = set(wanted.splitlines())
    others = [line.strip(" \\") for line in recorded.splitlines() if line.strip() and line not in there]
    if not others:
        return ", that of this version"
    return f", in which {plural(len(others), 'line')} are not in that of this version: {', '.join(others)}"


def parse_run_yaml(document: RunRecord) -> dict[str, Any]:
    """Return the content of a record's run.yaml. Raises DamagedRecordError if it is not what Slipway writes."""
    try:
        text = document["run_yaml"]
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise ValueError("it has aliases")
        content = yaml.safe_load(text)
        if not isinstance(content, dict) or not isinstance(content.get("dir"), str):
            raise ValueError("it has no dir")
        dumps(content)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        why = one_line(" ".join(str(error).split()))
        raise DamagedRecordError(
            f"--run {document['run']}: the run.yaml of its record is damaged: {why:.200}"
        ) from None
    return content


def _differences(found: Mapping[Any, Any], usual: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value, by its dotted key, that is another one than usual."""
    for key, value in found.items():
        there = usual.get(key, {})
        if isinstance(value, dict) and isinstance(there, dict):
            yield from _differences(value, there, f"{above}{key}.")
        elif value != there or key not in usual:
            yield f"{above}{key}", value
