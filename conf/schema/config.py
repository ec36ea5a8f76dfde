"""The config: one frozen schema that judges what Hydra composed. Types, bounds and docs here; values in YAML.

`judge` reports every error at once, each with its key path and, for a misspelt key, the right one.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from conf.schema.base import VOLATILE, Strict, essential
from conf.schema.infra.assets import Assets
from conf.schema.infra.budget import Budget
from conf.schema.infra.cloud import Cloud
from conf.schema.infra.network import Network
from conf.schema.infra.topology import Topology, region, topology
from conf.schema.infra.tpu import Tpu
from conf.schema.run.lifecycle import Cleanup, Recovery, Run, Ssh
from conf.schema.run.program import Code, Env, Program
from conf.schema.run.sweep import Sweep
from conf.schema.training.data import Data
from conf.schema.training.loop import Loop
from conf.schema.training.model import Model
from conf.schema.training.optimizer import Optimizer
from conf.schema.training.settings import Checkpoint, Logging, Mesh


class Config(Strict):
    """One experiment, resolved."""

    cloud: Annotated[Cloud, VOLATILE]
    tpu: Tpu
    network: Annotated[Network, VOLATILE]
    assets: Assets
    program: Program
    data: Data | None = None  # the four groups of the trainer are absent with program=command
    model: Model | None = None
    loop: Loop | None = None
    optimizer: Optimizer | None = None
    mesh: Mesh
    run: Run
    code: Code
    env: Env
    ssh: Annotated[Ssh, VOLATILE]
    checkpoint: Checkpoint
    logging: Logging
    recovery: Annotated[Recovery, VOLATILE]
    cleanup: Annotated[Cleanup, VOLATILE]
    budget: Annotated[Budget, VOLATILE]
    sweep: Annotated[Sweep, VOLATILE]

    @property
    def topology(self) -> Topology:
        return topology(self.tpu.accelerator_type)

    @property
    def region(self) -> str:
        return region(self.tpu.zone)

    @property
    def regions(self) -> tuple[str, ...]:
        """Every region that the pod may be in, the wanted one first."""
        return tuple(dict.fromkeys(region(zone) for zone in self.tpu.all_zones))

    @property
    def pod_name(self) -> str:
        """Derives from cloud, tpu and network alone: every run with the same three shares one warm pod."""
        if self.tpu.name:
            return self.tpu.name
        lasting = {"faults", "operation_seconds", "port", "trc", "billing_budget"}  # these do not say where the pod is
        lasting |= {"driver_account", "driver_roles", "driver_machine"}
        identity = {
            "cloud": self.cloud.model_dump(mode="json", exclude=lasting),
            "tpu": self.tpu.model_dump(mode="json", exclude={"create_minutes", "valid_until_hours"}),
            "network": self.network.model_dump(mode="json", exclude={"laptop", "open_to_world"}),
        }
        return f"slipway-{self.tpu.accelerator_type}-{digest(identity)[:6]}"

    def run_id(self, code_sha256: str, data_sha256: dict[str, str]) -> str:
        """`<run.name>-<8 hex>`: the same config, code and data give the same id on every host."""
        return f"{self.run.name}-{digest([essential(self), code_sha256, data_sha256])[:8]}"


LONGEST_SHOWN = 600
"""Characters of a message, or of a value in it."""


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`, in hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


SHAPES = {
    "project": "a project looks like my-project, or example.com:my-project",
    "apis": "a service looks like tpu.googleapis.com",
    "url": "a URL begins with http:// or https:// and holds no space",
    "zone": "a zone looks like us-central1-a; conf/tpu_types.yaml lists those with TPUs",
    "name": "a name has 1 to 63 of a-z, 0-9 and -, a letter first",
    "python": "a version looks like 3.11",
    "user": "a user is a-z, 0-9, _ and -, at most 32 of them, a letter first",
    "bucket_location": "a location looks like us-central1, or us",
    "account": "a billing account looks like 012345-6789AB-CDEF01",
}
"""What a value that breaks its pattern should look like, by the last part of its key."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a config: the key to change, and why."""

    key: str
    words: str

    def __str__(self) -> str:
        return one_line(f"{self.key}: {self.words}")


def judge(raw: dict[str, Any]) -> tuple[Config | None, list[Problem]]:
    """Validate composed data; returns the config, or None and every problem found.

    A config whose only faults are unknown keys is also validated without them, so that the caller can go on to the
    rules between sections and report those in the same breath.
    """
    if problems := [*_no_text(raw)]:
        return None, problems
    try:
        return Config.model_validate(raw), []
    except ValidationError as error:
        problems = [_problem(raw, item) for item in error.errors()]
        unknown = [_path(raw, e["loc"]) for e in error.errors() if e["type"] == "extra_forbidden"]
    if len(unknown) < len(problems):
        return None, problems
    try:
        return Config.model_validate(_without(raw, unknown)), problems
    except ValidationError:
        return None, problems


def _problem(raw: dict[str, Any], error: Any) -> Problem:
    path = _path(raw, error["loc"])
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        known = _keys_beside(path)
        if path[-1] in known:
            return Problem(key, "is a key of another kind of this section; choose that group, or leave the key out")
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.6)
        hint = f"did you mean {'.'.join([*path[:-1], near[0]])}?" if near else f"choices: {', '.join(sorted(known))}"
        return Problem(key, f"unknown key; {hint}")
    if error["type"] == "missing":
        return Problem(key, "missing; choose the group that holds it (loop=…, model=…) or set it")
    if error["type"] == "tuple_type" and isinstance(error["input"], str) and error["input"]:
        words = ", ".join(shlex.split(error["input"], posix=False))
        return Problem(key, f"is a list of words, not one string: '{key}=[{words}]'")
    if error["type"] == "string_pattern_mismatch" and path[-1] in SHAPES:
        return Problem(key, f"{one_line(repr(error['input']))} does not fit: {SHAPES[path[-1]]}")
    words = error["msg"].removeprefix("Value error, ")
    return Problem(key, f"{words[0].lower()}{words[1:]} (got {one_line(repr(error['input']))})")


def one_line(text: str) -> str:
    """A message about text that may be anything: newlines and what does not show are escaped, too much is left out."""
    if len(text) > LONGEST_SHOWN:
        text = f"{text[: LONGEST_SHOWN // 2]}… ({len(text)} characters) …{text[-LONGEST_SHOWN // 2 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _no_text(value: Any, key: str = "") -> Iterator[Problem]:
    """Keys and values that no file, argument or variable can hold; a text to learn from may hold a NUL."""
    if isinstance(value, str) and not key.startswith("data.") and "\0" in value:
        yield Problem(key, "holds a NUL character, which no argument, variable or path can")
    if isinstance(value, str) and any("\ud800" <= sign <= "\udfff" for sign in value):
        yield Problem(key, "holds half a character (a surrogate), which no file can")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, child in items:
        inner = f"{key}.{name}".lstrip(".")
        yield from _no_text(str(name), inner)
        yield from _no_text(child, inner)


def _path(raw: dict[str, Any], loc: tuple[int | str, ...]) -> list[str]:
    """pydantic's location without the tags of discriminated unions, which are no keys of the user's."""
    path: list[str] = []
    at: Any = raw
    for i, part in enumerate(loc):
        is_key = part in at if isinstance(at, dict) else isinstance(at, list) and isinstance(part, int)
        if not is_key and i < len(loc) - 1:
            continue
        path.append(str(part))
        at = at[part] if is_key else None  # pyright: ignore[reportCallIssue, reportArgumentType]
    return path


def _keys_beside(path: list[str]) -> set[str]:
    """Every key the schema knows beside the last one of `path` (of all kinds, where a section has several)."""
    models: list[type[BaseModel]] = [Config]
    for part in path[:-1]:
        if part.isdigit():  # of a list, whose items are of the same kinds
            continue
        fields = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        models = [m for annotation in fields for m in _models_in(annotation)]
    return {name for m in models for name in m.model_fields}


def keys_called(name: str) -> list[str]:
    """Every dotted key whose last part is `name`, for a user who left out the section; the shallowest first."""
    found: dict[str, None] = {}
    todo: list[tuple[str, type[BaseModel]]] = [("", Config)]
    while todo:
        prefix, model = todo.pop(0)
        for key, info in model.model_fields.items():
            path = f"{prefix}{key}"
            if key == name and prefix:
                found[path] = None
            if get_origin(info.annotation) is not tuple and path.count(".") < 2:  # items of a list have no keys
                todo += [(f"{path}.", inner) for inner in _models_in(info.annotation)]
    return list(found)[:3]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for part in get_args(annotation) for m in _models_in(part)]


def _without(raw: dict[str, Any], paths: list[list[str]]) -> dict[str, Any]:
    clean = json.loads(json.dumps(raw))
    for path in paths:
        at = clean
        for part in path[:-1]:
            at = at[int(part)] if isinstance(at, list) else at[part]
        at.pop(path[-1], None)
    return clean


def json_schema() -> dict[str, Any]:
    """The schema for editors."""
    return Config.model_json_schema()
