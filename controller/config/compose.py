"""Hydra's part: command-line overrides and YAML groups in, one validated `Config` out.

Hydra composes plain data; `conf.schema.validation` validates it. Hydra's own complaints are turned into ours.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import conf
from controller.core.errors import ConfigError

if TYPE_CHECKING:
    from conf.schema.config import Config
    from conf.schema.validation import ConfigProblem

CONFIG_DIR = Path(conf.__file__).parent
OVERRIDE = re.compile(r"^(?P<sign>\+{0,2}|~)(?P<key>[A-Za-z_][\w./@-]*)(?P<value>=.*)?$", re.DOTALL)


def compose(overrides: Sequence[str], *, extra_dir: Path | None = None) -> tuple[Config | None, list[ConfigProblem]]:
    """Compose the groups and overrides and validate the result.

    Args:
        overrides: as typed, `tpu.zone=us-central1-a` or `+experiment=quickstart`.
        extra_dir: a folder of the user's own YAML, searched beside the bundled one (`./slipway`).

    Raises:
        ConfigError: what Hydra could not compose.
    """
    from conf.schema.validation import validate

    return validate(compose_raw(overrides, extra_dir=extra_dir))


def compose_raw(overrides: Sequence[str], *, extra_dir: Path | None = None) -> dict[str, Any]:
    """The composed data before the schema sees it, interpolations resolved."""
    return _resolve_interpolations(_compose_unresolved(overrides, extra_dir), overrides, extra_dir)


def compose_variants(
    variants: Iterable[Sequence[str]], *, extra_dir: Path | None = None
) -> Iterator[tuple[Config | None, list[ConfigProblem]]]:
    """`compose` of many lists of words that share most of them: groups are composed once, single values laid over.

    Hydra does the same within one composition: the values of the command line come last, before interpolations.
    """
    from conf.schema.validation import validate

    composed: dict[tuple[str, ...], Any] = {}
    for words in variants:
        heads = tuple(word for word in words if not _is_value_override(word))
        if heads not in composed:
            composed[heads] = _compose_unresolved(heads, extra_dir)
        made = copy.deepcopy(composed[heads])
        _apply_overrides(made, [word for word in words if _is_value_override(word)])
        yield validate(_resolve_interpolations(made, words, extra_dir))


def _is_value_override(word: str) -> bool:
    """Is it `a.b=value`, which chooses no file?"""
    key = word.partition("=")[0]
    return "." in key and "@" not in key and not key.startswith(("~", "hydra"))


def _apply_overrides(made: Any, words: Sequence[str]) -> None:
    """Set single values of what is composed.

    Raises:
        ConfigError: a word that cannot be read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    try:
        for override in OverridesParser.create().parse_overrides([normalize_override(word) for word in words]):
            OmegaConf.update(made, override.key_or_group, override.value(), force_add=True)
    except HydraException as error:
        raise ConfigError(_translate_error(error, words, None)) from None


def _compose_unresolved(overrides: Sequence[str], extra_dir: Path | None) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    wanted = [*(normalize_override(o) for o in overrides), *search_path_override(extra_dir)]
    register_resolver()
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            return hydra_compose("config", overrides=wanted)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_translate_error(error, wanted, extra_dir)) from None
    except YAMLError as error:  # of a file of the user's; a tag that would make an object is one
        raise ConfigError(" ".join(f"the config cannot be composed: {error}".split())) from None


def search_path_override(extra_dir: Path | None) -> list[str]:
    """The word that makes Hydra look into a folder of the user's own, if there is one."""
    if extra_dir is None or not extra_dir.is_dir():
        return []
    return [f"hydra.searchpath=[{_quoted(f'file://{extra_dir.resolve()}')}]"]


def register_resolver() -> None:
    """`${installed:PATH}` can be composed from now on."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("installed", _installed, replace=True)


def _resolve_interpolations(composed: Any, overrides: Sequence[str], extra_dir: Path | None) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        data = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_translate_error(error, [normalize_override(o) for o in overrides], extra_dir)) from None
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def normalize_override(override: str) -> str:
    """`a.b=v` becomes `++a.b=v`, so that the schema and not Hydra judges a typo; `+group=x` becomes `group=x`."""
    match = OVERRIDE.match(override)
    if match is None or match["sign"] == "~":
        return override
    if "." in match["key"] and not match["key"].startswith("hydra"):
        return f"++{match['key']}{match['value'] or ''}"
    return f"{match['key']}{match['value'] or ''}"


def with_overrides(data: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Composed data with single values changed: `key.path=value` as Hydra reads it.

    Raises:
        ConfigError: a word that cannot be read.
    """
    from omegaconf import OmegaConf

    made = OmegaConf.create(data)
    _apply_overrides(made, words)
    plain = OmegaConf.to_container(made)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def config_groups(extra_dir: Path | None = None) -> dict[str, list[str]]:
    """Every config group and its choices, from the bundled YAML and the user's own."""
    found: dict[str, set[str]] = {}
    for root in [CONFIG_DIR, *([extra_dir] if extra_dir else [])]:
        for file in sorted(root.glob("*/*.yaml")):
            found.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(found.items())}


def _quoted(text: str) -> str:
    """A word of Hydra's grammar that means just this text, whatever a folder is called."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"


def _installed(path: str) -> str:
    """`${installed:PATH}`: a file or folder that came with slipway."""
    return str(CONFIG_DIR.parent / path)


def _parses(override: str) -> bool:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True


def _translate_error(error: Exception, overrides: Sequence[str], extra_dir: Path | None) -> str:
    """Name the override that is wrong and its choices; Hydra's sentence only where we know no better one."""
    from conf.schema.renamed_keys import successors
    from conf.schema.validation import find_keys

    choices = config_groups(extra_dir)
    for override in overrides:
        key, equals, value = override.lstrip("+~").partition("=")
        if "." in key or not equals:
            continue
        if key not in choices:
            if meant := find_keys(key):
                return f"{key}: no such group; did you mean {' or '.join(f'{path}={value}' for path in meant)}?"
            near = difflib.get_close_matches(key, choices, n=1)
            hint = f"did you mean {near[0]}=…? " if near else ""
            return f"{key}: no such group; {hint}groups: {', '.join(choices)}"
        if value not in {*choices[key], "null"}:
            near = difflib.get_close_matches(value.replace("v5e", "v5litepod"), choices[key], n=1)
            hint = f"did you mean {key}={near[0]}? " if near else ""
            return f"{key}: no {key} named {value!r}; {hint}choices: {', '.join(choices[key])}"
    for override in overrides:
        if not _parses(override):
            key, _, value = override.lstrip("+~").partition("=")
            return f"{key}: {value!r} cannot be read; quote what holds commas, brackets or spaces: '{key}=\"…\"'"
    cause: BaseException = error
    while not str(cause).strip() and cause.__cause__ is not None:
        cause = cause.__cause__  # Hydra sometimes wraps the words it has in an exception without any
    message = (str(cause).strip() or repr(cause)).splitlines()[0]
    named = re.findall(r"'([\w.]+)'", message)  # of `~key`, and of ${key}
    renamed = ", ".join(name for key in named for name in successors(key.split(".")))
    return f"the config cannot be composed: {message}{f'; renamed to {renamed}' if renamed else ''}"
