"""Compose command-line overrides and YAML groups with Hydra into one validated `Config`.

Hydra composes plain data; `conf.schema.config` validates it. Whatever Hydra refuses becomes a ConfigError. A user's
files are checked before Hydra reads them, and no secret of the environment gets into a config, which is shown and
recorded.
"""

from __future__ import annotations

import copy
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import conf
from controller.config.refusals import base_cure, explained, require_lone_functions, several_values
from controller.config.texts import quote_numbers
from controller.core.errors import ConfigError
from controller.core.this_process import state_home_name

if TYPE_CHECKING:
    from conf.schema.config import Config
    from conf.schema.problems import ConfigProblem

CONFIG_DIR = Path(conf.__file__).parent
REPLACED = ("loop.rewards=",)
"""Mappings that the command line replaces as a whole: merged, a reward could not be removed."""
SCALED = {"scale": "program", "scale/loop": "loop", "scale/data": "data", "scale/model": "model"}
"""Groups of the scale's values for what is chosen: `scale/loop/tiny_grpo.yaml` with scale=tiny and loop=grpo."""
OVERRIDE = re.compile(r"^(?P<sign>\+{0,2}|~)(?P<key>[A-Za-z_][\w./@-]*)(?P<value>=.*)?$", re.DOTALL)


def compose(overrides: Sequence[str], *, extra_dir: Path | None = None) -> tuple[Config | None, list[ConfigProblem]]:
    """Compose the groups and overrides and validate the result.

    Args:
        overrides: as typed, `tpu.zone=us-central1-a` or `+experiment=quickstart`.
        extra_dir: a folder of the user's own YAML, searched beside the bundled one (`./slipway`).

    Raises:
        ConfigError: Hydra could not compose the config.
    """
    config, problems = _validate(compose_raw(overrides, extra_dir=extra_dir))
    return config, [_placed(problem, overrides, extra_dir) for problem in problems]


def sound(found: tuple[Config | None, list[ConfigProblem]]) -> Config:
    """Return a config that was composed or validated. Raises ConfigError with all of its problems."""
    config, problems = found
    if config is None or problems:
        raise ConfigError(problems)
    return config


def _placed(problem: ConfigProblem, overrides: Sequence[str], extra_dir: Path | None) -> ConfigProblem:
    """Return a problem with file and line, if a file of the user's sets the key."""
    from controller.config.own_files import where_set, without_base

    if problem.message.startswith("lacks ") and (removed := [w for w in overrides if w.startswith(f"~{problem.key}.")]):
        return replace(problem, message=f"needs what {' '.join(removed)} removes; leave that out, or set another value")
    is_part = problem.message.startswith(("lacks ", "has no `kind`", "has keys of another kind"))
    if is_part and (file := without_base(problem.key, extra_dir, overrides)):
        reason = f"{problem.message.partition(';')[0]}; {base_cure(problem.key, file)}"
        return replace(problem, message=reason, place=file.shown)
    return replace(problem, place=where_set(problem.key, extra_dir, overrides))


def compose_raw(overrides: Sequence[str], *, extra_dir: Path | None = None) -> dict[str, Any]:
    """Return the composed data before validation, with interpolations resolved."""
    from controller.config import composed_cache

    _require_removals_first(overrides)
    if of_hydra := next((word for word in overrides if re.match(r"[+~]*hydra[./]", word)), ""):
        raise ConfigError(f"{of_hydra.partition('=')[0]}: Slipway takes no settings of Hydra; leave it out")
    kept = composed_cache.cache_file(overrides, extra_dir)
    if kept is not None and (known := composed_cache.load(kept)):
        return known
    data = _resolve_interpolations(_compose_unresolved(overrides, extra_dir), overrides, extra_dir)
    if kept is not None:
        composed_cache.store(kept, data)
    return data


def compose_variants(
    variants: Iterable[Sequence[str]], *, extra_dir: Path | None = None
) -> Iterator[tuple[Config | None, list[ConfigProblem]]]:
    """Compose many lists of overrides that share most entries: each choice of groups is composed once.

    Single values are then set, and taken back.
    """
    composed: dict[tuple[str, ...], tuple[Any, dict[str, Any]]] = {}
    for overrides in variants:
        _require_removals_first(overrides)
        heads = tuple(word for word in overrides if not _is_value_override(word))
        if heads not in composed:
            composed[heads] = (base := _compose_unresolved(heads, extra_dir)), _without_interpolations(base)
        made, plain = composed[heads]
        values = [word for word in overrides if _is_value_override(word)]
        changed = {word.lstrip("+").partition(".")[0] for word in values}
        with _restored(made, changed):
            _apply_overrides(made, values, extra_dir)
            same = {name: section for name, section in plain.items() if name not in changed}
            data = _resolve_interpolations(made, overrides, extra_dir, same)
        config, problems = _validate(data)
        yield config, [_placed(problem, overrides, extra_dir) for problem in problems]


def _without_interpolations(made: Any) -> dict[str, Any]:
    """Return the sections of composed data that say the same whatever the others have."""
    from omegaconf import OmegaConf

    sections: Any = OmegaConf.to_container(made)
    return {name: section for name, section in sections.items() if "${" not in repr(section)}


@contextmanager
def _restored(made: Any, sections: Set[str]) -> Iterator[None]:
    """Give composed data these sections back in the end: a copy of all of them would take half the time of a run."""
    from omegaconf import OmegaConf, flag_override

    kept = {name: copy.deepcopy(made[name]) for name in sections if name in made}
    for section in filter(OmegaConf.is_config, kept.values()):
        section._set_parent(None)  # one that has a parent would be copied again
    try:
        yield
    finally:
        with flag_override(made, ["struct", "no_deepcopy_set_nodes"], [False, True]):
            for name in sections:
                made[name] = kept.get(name)
                if name not in kept:
                    del made[name]


def _validate(data: dict[str, Any]) -> tuple[Config | None, list[ConfigProblem]]:
    """Validate composed data, complete with what config.json and, for `cloud=here`, this machine say."""
    from conf.schema.validation import validate

    if _is_pretrained(data.get("model")):
        from controller.config.pretrained_model import with_pretrained_model

        data, problems = with_pretrained_model(data)
        if problems:
            return None, problems
    config, problems = validate(data)
    if config is not None and config.cloud.kind == "here":
        from controller.config.this_machine import resolve_machine

        config = resolve_machine(config)
    return config, problems


def _is_pretrained(model: Any) -> bool:
    """Return whether the model has to be completed: it has no switches, or names config.json or weights on the Hub."""
    weights = model.get("weights") if isinstance(model, dict) else None
    from_hub = isinstance(weights, str) and weights.startswith("hf://")
    return isinstance(model, dict) and ("norm" not in model or model.get("config_json") is not None or from_hub)


def _is_value_override(word: str) -> bool:
    """Return whether an override is `a.b=value`, which selects no file."""
    key = word.partition("=")[0]
    return "." in key and "@" not in key and not key.startswith(("~", "hydra"))


def _apply_overrides(made: Any, overrides: Sequence[str], extra_dir: Path | None = None) -> None:
    """Set single values in composed data. Raises ConfigError if an override cannot be parsed or set."""
    if not overrides:
        return
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    from controller.config.kinds import make_room

    words = [normalize_override(word) for word in overrides]
    with explained(words, extra_dir, config_groups):
        for word, override in zip(
            words, OverridesParser.create().parse_overrides([*map(quote_numbers, words)]), strict=True
        ):
            key = override.key_or_group
            require_lone_functions(key, override.value())
            if override.is_sweep_override():
                raise ConfigError(several_values(key, word.partition("=")[2]))
            make_room(made, key, override.value())
            OmegaConf.update(made, key, override.value(), merge=f"{key}=" not in REPLACED, force_add=True)


def _compose_unresolved(overrides: Sequence[str], extra_dir: Path | None) -> Any:
    from hydra import compose as hydra_compose
    from omegaconf import open_dict

    from controller.config.kinds import use_kinds

    chosen = [normalize_override(word) for word in overrides if not _is_value_override(word)]
    wanted = [*map(quote_numbers, chosen), *search_path_override(extra_dir)]
    if extra_dir is not None:
        from controller.config.own_files import check_own_files

        check_own_files(extra_dir, chosen, config_groups(extra_dir), config_groups())
    register_resolvers()
    with (
        explained(chosen, extra_dir, config_groups),
        guarded_variables(),
        initialize_hydra(),
    ):
        use_kinds()
        made = hydra_compose("config", overrides=wanted, return_hydra_config=True)
        if scaled := scale_overrides(made.hydra.runtime.choices, extra_dir):
            made = hydra_compose("config", overrides=[*wanted, *scaled], return_hydra_config=True)
    with open_dict(made):
        del made["hydra"]
    _apply_overrides(made, [word for word in overrides if _is_value_override(word)], extra_dir)
    return made


def initialize_hydra() -> Any:
    """Return a context in which Hydra has the bundled YAML. Hydra 1.3 wants to be told its version, 1.4 does not."""
    from hydra import __version__, initialize_config_dir

    told: dict[str, Any] = {"version_base": "1.3"} if __version__.startswith("1.3.") else {}
    return initialize_config_dir(str(CONFIG_DIR), **told)


def scale_overrides(choices: Mapping[str, Any], extra_dir: Path | None) -> list[str]:
    """Return the overrides that add the scale's files for the chosen program, loop, data and model, where they exist.

    The defaults list of Hydra 1.4 cannot interpolate a choice that is null, as `data` is without data.
    """
    found = []
    for group, chosen in SCALED.items():
        name = f"{choices.get('scale')}_{choices.get(chosen)}".removesuffix(".yaml")
        parts = name.split("_")
        begun = ["_".join(parts[:count]) for count in range(len(parts), 1, -1)] if chosen == "model" else [name]
        for each in begun:  # a model without a file has that of its family
            if any((root / group / f"{each}.yaml").is_file() for root in (extra_dir, CONFIG_DIR) if root):
                found.append(f"+{group}@_global_={each}")
                break
    return found


def search_path_override(extra_dir: Path | None) -> list[str]:
    """Return the override that adds the user's folder to Hydra's search path, if there is one."""
    if extra_dir is None or not extra_dir.is_dir():
        return []
    return [f"hydra.searchpath=[{quote_text(f'file://{extra_dir.resolve()}')}]"]


def register_resolvers() -> None:
    """Register the bundled YAML's resolvers: `${installed:PATH}`, `${packages_on:CLOUD}`, `${state_home:}`."""
    _register_resolver("installed", lambda path: str(CONFIG_DIR.parent / path))
    _register_resolver("state_home", state_home_name)
    # emulated workers have this machine's packages, and TPU VM images have no JAX
    _register_resolver("packages_on", lambda kind: "image" if kind == "local" else "lock")


def _register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    from omegaconf import OmegaConf, __version__

    old = __version__.startswith("2.3.")  # whose register_resolver is another function
    register: Any = OmegaConf.register_new_resolver if old else OmegaConf.register_resolver
    register(name, resolver, replace=True)


def _resolve_interpolations(
    composed: Any, overrides: Sequence[str], extra_dir: Path | None, same: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return composed data as plain data; `same` has sections that need no work."""
    with explained([*map(normalize_override, overrides)], extra_dir, config_groups), guarded_variables():
        return {str(name): same[name] if name in same else _resolved(composed, name) for name in composed}


def _resolved(composed: Any, name: Any) -> Any:
    """Return a section of composed data as plain data."""
    from omegaconf import OmegaConf

    section = "???" if OmegaConf.is_missing(composed, name) else composed[name]
    return OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section


def _require_removals_first(overrides: Sequence[str]) -> None:
    """Raise ConfigError for `~key` behind a value of that key: removals come first, so it would count for nothing."""
    for number, word in enumerate(overrides):
        removed = word.partition("=")[0].removeprefix("~")
        for earlier in overrides[:number] if word.startswith("~") else ():
            if f"{earlier.lstrip('+').partition('=')[0]}.".startswith(f"{removed}.") and _is_value_override(earlier):
                raise ConfigError(f"{word}: would remove {earlier}, which stands before it; leave out one of them")


def normalize_override(override: str) -> str:
    """Turn `a.b=v` into `++a.b=v`, so that the schema reports typos, not Hydra; and `+group=x` into `group=x`.

    A group at another place, `model@loop.teacher=x`, is added, since no config has it.
    """
    match = OVERRIDE.match(override)
    if match is None or match["sign"] == "~":
        return override
    if "@" in match["key"]:
        return f"+{match['key']}{match['value'] or ''}"
    if "." in match["key"] and not match["key"].startswith("hydra"):
        return f"++{match['key']}{match['value'] or ''}"
    return f"{match['key']}{match['value'] or ''}"


def with_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return composed data with `key.path=value` applied. Raises ConfigError if an override cannot be parsed.

    The data are what they are, also where a text looks like an interpolation: nothing of the environment gets in.
    """
    from omegaconf import OmegaConf

    held: dict[str, str] = {}

    def hold(text: str) -> str:
        if "${" not in text and not text.startswith(HELD):
            return text
        held[name := f"{HELD}{len(held)}"] = text
        return name

    made = OmegaConf.create(_with_texts(data, hold))
    _apply_overrides(made, overrides)
    return _with_texts(OmegaConf.to_container(made), lambda text: held.get(text, text))


HELD = "\0held "
"""Beginning of what stands for a text while OmegaConf has the data."""


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of composed data with each text, keys aside, as `change` has it."""
    if isinstance(value, dict):
        return {str(key): _with_texts(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_texts(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


def config_groups(extra_dir: Path | None = None) -> dict[str, list[str]]:
    """Return every config group with its choices, from the bundled YAML and the user's own."""
    found: dict[str, set[str]] = {}
    for root in [CONFIG_DIR, *([extra_dir] if extra_dir else [])]:
        for file in sorted(root.glob("*/*.yaml")):
            found.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(found.items())}


def quote_text(text: str) -> str:
    """Quote a text for Hydra's grammar, whatever characters it contains; `${x}` is not interpolated."""
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    if not set(text) & set('"\\'):
        return f'"{escaped}"'  # a shell shows it more legibly
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", escaped)
    escaped = re.sub(r"(\\+)\Z", r"\1\1", escaped)
    return f"'{escaped}'"


SECRET_NAME = re.compile(
    r"TOKEN|SECRET|CREDENTIAL|PASSW|PASSPHRASE|PRIVATE|COOKIE|(^|_)(PASS|PAT|PWD|AUTH|DSN)(_|$)|API_?KEY|_KEY(_|$)",
    re.I,
)
"""Names of variables that hold a secret, or may."""
SECRET_VALUE = re.compile(r"://[^/\s:@]*:[^/\s@]+@|-----BEGIN [A-Z ]*PRIVATE KEY-----")
"""An address with a password, or a private key."""
NOT_SECRET = frozenset({"PWD", "OLDPWD"})
"""Folders."""


HYDRA_LOCK = threading.Lock()
"""Held while a config is composed: Hydra and OmegaConf keep globals, and threads compose configs of records."""


@contextmanager
def guarded_variables() -> Iterator[None]:
    """Refuse `${oc.env:NAME}` of a secret inside the block: its value would be in the plan and in the record.

    One thread at a time may be inside.
    The resolver of OmegaConf is put back afterwards: a notebook, or a Hydra program, may have configs of its own.
    """
    from omegaconf.resolvers import oc

    def lookup(name: str, *default: Any) -> str | None:
        is_secret = SECRET_NAME.search(name) and name not in NOT_SECRET
        if is_secret or SECRET_VALUE.search(os.environ.get(name, "")):
            raise ConfigError(
                f"${{oc.env:{name}}} would put a secret into the plan and the record; use "
                f"env.secrets.{name}=env, which passes the variable on to the program"
            )
        return oc.env(name, *default)

    with HYDRA_LOCK:
        _register_resolver("oc.env", lookup)
        try:
            yield
        finally:
            _register_resolver("oc.env", oc.env)
