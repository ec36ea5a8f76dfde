"""The config as one frozen schema, whose values live in YAML; and its validation.

Validation reports all problems of composed data at once, with suggestions for misspelled keys.
"""

import difflib
import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from conf.schema.assets import Assets
from conf.schema.base import RENAMED, VOLATILE, Strict, successors, without_volatile
from conf.schema.cloud import Budget, Cloud, HereCloud, Network
from conf.schema.program import Code, Env, Program
from conf.schema.run_sections import Cleanup, Notify, Recovery, Run, RunAlerts, Ssh, Sweep
from conf.schema.topology import Topology, Tpu, find_topology, this_machine, zone_region
from conf.schema.training.data import Data
from conf.schema.training.loop import Loop
from conf.schema.training.model import AnyModel
from conf.schema.training.optimizer import Optimizer
from conf.schema.training.settings import CheckpointSettings, Logging, Mesh


class Config(Strict):
    """Resolved config of one experiment."""

    cloud: Annotated[Cloud, VOLATILE]
    tpu: Tpu
    network: Annotated[Network, VOLATILE]
    assets: Assets
    program: Program
    data: Data | None = None  # program=command has none of these four
    model: AnyModel | None = None
    loop: Loop | None = None
    optimizer: Optimizer | None = None
    mesh: Mesh
    run: Run
    code: Code
    env: Env
    ssh: Annotated[Ssh, VOLATILE]
    checkpoint: CheckpointSettings
    logging: Logging
    recovery: Annotated[Recovery, VOLATILE]
    cleanup: Annotated[Cleanup, VOLATILE]
    alerts: Annotated[RunAlerts, VOLATILE]
    notify: Annotated[Notify, VOLATILE]
    budget: Annotated[Budget, VOLATILE]
    sweep: Annotated[Sweep, VOLATILE]

    @property
    def secret_sources(self) -> dict[str, str | None]:
        """Sources of every secret: the program's, and the address of the webhook."""
        return dict(self.env.secrets) | {"notify.webhook": self.notify.webhook}

    @property
    def topology(self) -> Topology:
        if isinstance(self.cloud, HereCloud):
            return this_machine(self.cloud.backend, len(self.cloud.indices))
        return find_topology(self.tpu.accelerator_type, self.tpu.machine_type)

    @property
    def region(self) -> str:
        return zone_region(self.tpu.zone)

    @property
    def regions(self) -> tuple[str, ...]:
        """Regions where the pod may be, the preferred one first."""
        return tuple(dict.fromkeys(zone_region(zone) for zone in self.tpu.all_zones))

    @property
    def external_ip(self) -> bool:
        """Whether workers have external addresses: they count against a quota of 4 to 8 per region in new projects."""
        if self.tpu.external_ip is not None:
            return self.tpu.external_ip
        direct = self.ssh.method == "external" or self.network.laptop is not None
        return self.tpu.adopt or direct or not self.network.nat

    @property
    def bastion_machine(self) -> str:
        """Machine type of the bastion; us-central2 has no E2 machines."""
        return self.cloud.driver_machine or ("g1-small" if self.region == "us-central2" else "e2-small")

    @property
    def pod_name(self) -> str:
        """Name derived from cloud, tpu and network only, so that runs with equal ones share a warm pod."""
        if isinstance(self.cloud, HereCloud):
            return self.cloud.pod_name
        if self.tpu.name:
            return self.tpu.name
        # These do not identify the pod.
        lasting = {"faults", "operation_seconds", "caller_roles", "realism", "quotas", "port", "trc", "billing_budget"}
        lasting |= {"driver_service_account", "driver_roles", "driver_machine", "health_check"}
        ways = {"plane", "machine_type", "boot_disk_gb", "max_run_hours"}
        tpu = self.tpu.model_dump(mode="json", exclude={"create_timeout_minutes", "valid_until_hours"} | ways)
        if plane := self.tpu.plane_of_name:
            own = self.tpu.model_dump(mode="json", include={"machine_type", "boot_disk_gb"})
            tpu |= {"plane": plane, **own}
        identity = {
            "cloud": self.cloud.model_dump(mode="json", exclude=lasting),
            "tpu": tpu | {"external_ip": self.external_ip},
            "network": self.network.model_dump(mode="json", exclude={"laptop", "open_to_world"}),
        }
        return f"slipway-{self.tpu.accelerator_type}-{digest(identity)[:6]}"

    def run_id(self, code_sha256: str, data_sha256: dict[str, str]) -> str:
        """Return `<run.name>-<8 hex>`. Equal config, code and data give the same ID on every host."""
        return f"{self.run.name}-{digest([without_volatile(self), code_sha256, data_sha256])[:8]}"


def digest(value: Any) -> str:
    """Return the hex SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


MAX_SHOWN_CHARS = 600
"""Limit for a message, and for each value in it."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")

VALUE_HINTS = {
    "project": "use a project ID such as my-project or example.com:my-project",
    "apis": "use a service name such as tpu.googleapis.com",
    "url": "must start with http:// or https:// and contain no spaces",
    "zone": "use a zone such as us-central1-a; conf/tpu_types.yaml lists zones with TPUs",
    "name": "use 1 to 63 characters a-z, 0-9 and -, starting with a letter",
    "run.name": "use 1 to 42 characters a-z, 0-9, _ and -, with a letter or digit at both ends",
    "python": "use a version such as 3.13",
    "user": "use 1 to 32 characters a-z, 0-9, _ and -, starting with a letter",
    "bucket_location": "use a region or multi-region such as us-central1 or us",
    "account": "use a billing account ID such as 012345-6789AB-CDEF01",
}
"""Hint for a value that does not match its pattern, by the key or its last part."""


@dataclass(frozen=True)
class ConfigProblem:
    """A problem in the config: the key to change, the reason, and file and line, if a file of the user's sets it."""

    key: str
    message: str
    place: str = ""

    def __str__(self) -> str:
        return escape_line(f"{self.key}: {self.message}") + (f" ({self.place})" if self.place else "")


def validate(raw: dict[str, Any]) -> tuple[Config | None, list[ConfigProblem]]:
    """Validate composed data. Return the config, or None, and every problem.

    If the only problems are unknown keys, validate again without them, so that the caller can also run the checks
    between sections and report everything at once.
    """
    if problems := [*_unprintable_values(raw)]:
        return None, problems
    try:
        config = Config.model_validate(raw)
        problems = [*_booleans_as_numbers(raw, config)]
        return (None if problems else config), problems
    except ValidationError as error:
        problems = _merged([_problem(raw, item) for item in error.errors()])
        unknown = [_key_path(raw, e["loc"]) for e in error.errors() if e["type"] == "extra_forbidden"]
        error_count = error.error_count()
    if len(unknown) < error_count:
        return None, problems
    try:
        return Config.model_validate(_drop_paths(raw, unknown)), problems
    except ValidationError:
        return None, problems


def _problem(raw: dict[str, Any], error: Any) -> ConfigProblem:
    path = _key_path(raw, error["loc"])
    key = ".".join(path)
    is_file = str(error["input"]).startswith("file:")  # a path, which is no secret
    is_secret = path[:2] in (["env", "secrets"], ["notify", "webhook"])
    if is_secret and not is_file and error["type"] != "extra_forbidden":
        return ConfigProblem(
            key,
            f"names where a secret is, and never holds it; {NAMED_SOURCES} (what you gave is not shown)",
        )
    if error["type"] == "extra_forbidden":
        known = _sibling_keys(path)
        if new := successors(path, error["input"]):
            return ConfigProblem(key, f"unknown key; renamed to {', '.join(new)}")
        if path[-1] in known:
            section = ".".join(path[:-1])
            whole = f"{section}=…" if len(path) == 2 else f"{section}={{kind: …}}"
            way = "choose its group" if len(path) == 2 else "set the section whole"
            return ConfigProblem(key, f"{OTHER_KIND} {way} ({whole}), or remove the key (~{key})")
        if "." in path[-1]:
            nested = path[-1].replace(".", ": {") + ": …" + "}" * path[-1].count(".")
            return ConfigProblem(key, f"a key of a file has no dots; write {nested}, or a line for each part")
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.6)
        hint = f"did you mean {'.'.join([*path[:-1], near[0]])}?" if near else f"choices: {', '.join(sorted(known))}"
        return ConfigProblem(key, f"unknown key; {hint}")
    if error["type"] == "missing":
        return ConfigProblem(key, "missing; choose a group that sets it (loop=…, model=…) or set the key")
    if error["type"] == "union_tag_not_found":
        way = f"choose its group: {key}=…, in a file `override /{key}: …` in `defaults`" if len(path) == 1 else "set it"
        return ConfigProblem(key, f"has no `kind`; {way}")
    if error["type"] == "union_tag_invalid":
        return ConfigProblem(f"{key}.kind", _unknown_choice(error["ctx"]["tag"], _kinds(path)))
    if error["type"] in ("model_attributes_type", "model_type", "dict_type") and (known := _sibling_keys([*path, ""])):
        kinds, given = _kinds(path), error["input"]
        meant = (
            f"did you mean {key}.kind={given}" if given in kinds else f"set one of them, such as {key}.{min(known)}=…"
        )
        shown = f"kinds: {', '.join(kinds)}" if kinds else f"keys: {', '.join(sorted(known))}"
        return ConfigProblem(key, f"is a section with keys, not {escape_line(repr(given))}; {meant}; {shown}")
    if error["type"] == "float_parsing" and path[:-1] == ["loop", "rewards"] and ":" in str(error["input"]):
        function, _, weight = str(error["input"]).rpartition(":")
        name = f"{path[-1]}\\:{function}"
        return ConfigProblem(
            "loop.rewards", f"a colon in a name is written \\: on the command line: {{{name}: {weight.strip()}}}"
        )
    if error["type"] == "value_error" and error["loc"][-1:] == (path[-1],) and not _is_there(raw, path):
        key = ".".join(path[:-1])  # pydantic's name for the kind of a section
    if error["type"] == "tuple_type" and isinstance(error["input"], str) and error["input"]:
        items = ", ".join(shlex.split(error["input"], posix=False))
        return ConfigProblem(key, f"must be a list of words, not a string: '{key}=[{items}]'")
    if error["loc"][-1] == "[key]" and not isinstance(error["input"], str):
        section = ".".join(_key_path(raw, error["loc"][:-2]))
        return ConfigProblem(section, f"a key is read as {json.dumps(error['input'])}, not as text; quote it in YAML")
    if error["type"] == "string_type" and isinstance(error["input"], NoneType | bool | int | float):
        text = json.dumps(error["input"])
        quoted = f"""{path[-1]}: "{text}" in YAML, '{key}="{text}"' in a shell"""
        return ConfigProblem(key, f"must be text, not {text}; if it is meant as text, quote it: {quoted}")
    if error["type"] == "string_pattern_mismatch" and (hint := VALUE_HINTS.get(key, VALUE_HINTS.get(path[-1]))):
        return ConfigProblem(key, f"{escape_line(repr(error['input']))} is invalid; {hint}")
    message = error["msg"].removeprefix("Value error, ")
    # A whole section would hide the message, which names the keys that matter.
    got = "" if isinstance(error["input"], dict) else f" (got {escape_line(repr(error['input']))})"
    return ConfigProblem(key, f"{message[0].lower()}{message[1:]}{got}")


NAMED_SOURCES = "use env, env:NAME, file:PATH or secretmanager:projects/P/secrets/S"
OTHER_KIND = "belongs to another kind of this section;"


def _merged(problems: list[ConfigProblem]) -> list[ConfigProblem]:
    """Say in one line which keys are of another kind of a section, behind what else is wrong: it explains them."""
    sections: dict[str, list[str]] = {}
    for each in problems:
        if each.message.startswith(OTHER_KIND):
            sections.setdefault(each.key.rpartition(".")[0], []).append(each.key)
    found = [each for each in problems if not each.message.startswith(OTHER_KIND)]
    for section, keys in sections.items():
        if len(keys) == 1:
            found += [each for each in problems if each.key == keys[0] and each.message.startswith(OTHER_KIND)]
            continue
        names = ", ".join(key.rpartition(".")[2] for key in keys)
        way = next(each.message for each in problems if each.key == keys[0]).partition("; ")[2].partition(", or ")[0]
        them = " ".join(f"~{key}" for key in keys)
        message = f"{names} belong to another kind of this section; {way}, or remove them: {them}"
        found.append(ConfigProblem(section, message))
    return found


def _kinds(path: list[str]) -> list[str]:
    """Return the kinds of the section at a path; none if it has but one."""
    models: list[type[BaseModel]] = [Config]
    for part in path:
        if not part.isdigit():
            fields = [m.model_fields[part].annotation for m in models if part in m.model_fields]
            models = [m for annotation in fields for m in _models_in(annotation)]
    fields = [m.model_fields["kind"].annotation for m in models if "kind" in m.model_fields]
    return [*dict.fromkeys(kind for annotation in fields for kind in get_args(annotation))]


def _unknown_choice(given: str, choices: list[str]) -> str:
    near = difflib.get_close_matches(given, choices, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown kind {escape_line(repr(given))}; {hint}choices: {', '.join(choices)}"


def _is_there(raw: Any, path: list[str]) -> bool:
    """Return whether composed data have the key."""
    for part in path:
        if isinstance(raw, list) and part.isdigit() and int(part) < len(raw):
            raw = raw[int(part)]
        elif isinstance(raw, dict) and part in raw:
            raw = raw[part]
        else:
            return False
    return True


def escape_line(text: str) -> str:
    """Return text on one line, with newlines and unprintable characters escaped and long text shortened."""
    if len(text) > MAX_SHOWN_CHARS:
        text = f"{text[: MAX_SHOWN_CHARS // 2]}… ({len(text)} characters) …{text[-MAX_SHOWN_CHARS // 2 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _unprintable_values(value: Any, key: str = "") -> Iterator[ConfigProblem]:
    """Yield keys and values that no file, argument or variable can contain. Training text may contain NUL."""
    if isinstance(value, str) and not key.startswith("data.") and "\0" in value:
        yield ConfigProblem(key, "contains a NUL character, which arguments, variables and paths cannot")
    if isinstance(value, str) and LONE_SURROGATE.search(value):
        yield ConfigProblem(key, "contains a lone surrogate, which files cannot")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, child in items:
        inner = f"{key}.{name}".lstrip(".")
        yield from _unprintable_values(str(name), inner)
        yield from _unprintable_values(child, inner)


def _booleans_as_numbers(raw: Any, made: Any, key: str = "") -> Iterator[ConfigProblem]:
    """Yield the keys whose boolean pydantic has made a number."""
    made = vars(made) if isinstance(made, BaseModel) else made
    if isinstance(raw, bool) and type(made) in (int, float):
        text = json.dumps(raw)
        yield ConfigProblem(key, f"must be a number, not {text}; YAML reads yes and on as true, no and off as false")
    elif isinstance(raw, dict) and isinstance(made, dict):
        for name in filter(made.__contains__, raw):
            yield from _booleans_as_numbers(raw[name], made[name], f"{key}.{name}".lstrip("."))
    elif isinstance(raw, list) and isinstance(made, tuple | list):
        for number, (child, inner) in enumerate(zip(raw, made, strict=False)):
            yield from _booleans_as_numbers(child, inner, f"{key}.{number}")


def _key_path(raw: dict[str, Any], loc: tuple[int | str, ...]) -> list[str]:
    """Return pydantic's location without the tags of discriminated unions, which are not keys in the config."""
    path: list[str] = []
    at: Any = raw
    for i, part in enumerate(loc):
        is_key = part in at if isinstance(at, dict) else isinstance(at, list) and isinstance(part, int)
        is_tag = isinstance(at, dict) and part == at.get("kind")
        if not is_key and (is_tag or i < len(loc) - 1):
            continue
        path.append(str(part))
        at = at[part] if is_key else None  # pyright: ignore[reportCallIssue, reportArgumentType]
    return path


def _sibling_keys(path: list[str]) -> set[str]:
    """Return the keys the schema allows in place of the last one in `path`, for every kind of the section."""
    models: list[type[BaseModel]] = [Config]
    for part in path[:-1]:
        if part.isdigit():  # index into a list, whose items share one schema
            continue
        fields = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        models = [m for annotation in fields for m in _models_in(annotation)]
    return {name for m in models for name in m.model_fields}


def find_keys(name: str) -> list[str]:
    """Return up to three dotted keys that end in `name`, now or before a rename, for a user who omitted the section."""
    former = (new for old, new in RENAMED.items() if old.rpartition(".")[2] == name and "*" not in new)
    found: dict[str, None] = dict.fromkeys(former)
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


def _drop_paths(raw: dict[str, Any], paths: list[list[str]]) -> dict[str, Any]:
    clean = json.loads(json.dumps(raw))
    for path in paths:
        at = clean
        for part in path[:-1]:
            at = at[int(part)] if isinstance(at, list) else at[part]
        at.pop(path[-1], None)
    return clean
