"""A mapping that names its `kind` replaces one of another kind, where Hydra would merge the keys of both.

This is for mappings inside a section, such as `optimizer.schedule`. A section itself, such as `cloud` or `loop`, is
chosen as a group, and files of a group build on each other across kinds.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf, open_dict

from controller.config.texts import restore_texts


def make_room(composed: DictConfig, key: str, value: Any) -> None:
    """Remove the mappings from a composed config that `key=value` replaces with one of another kind."""
    for path, kind in _kinds(value, tuple(key.split("."))):
        _remove_other(composed, path, kind)


def use_kinds() -> None:
    """Let the Hydra that is initialized merge files by this rule."""
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    hydra.config_loader = _KindLoader(hydra.config_loader.get_search_path())


class _KindLoader(ConfigLoaderImpl):
    """Hydra's loader, where texts are as written, and each file takes away what it replaces from those before it."""

    _loaded: Iterator[ConfigResult]

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: Any) -> DictConfig:
        loaded = [super(_KindLoader, self)._load_single_config(default, repo) for default in defaults]
        plain = [OmegaConf.to_container(result.config) for result in loaded]
        for default, result, data in zip(defaults, loaded, plain, strict=True):
            file = Path(result.path.removeprefix("file://"), f"{str(default.config_path).removesuffix('.yaml')}.yaml")
            restore_texts(result.config, data, file, default.package or "")
        found = [[*_kinds(data, ())] for data in plain]
        for number, kinds in enumerate(found):
            for path, kind in kinds:
                for earlier in range(number):
                    if any(known == path and other != kind for known, other in found[earlier]):
                        loaded[earlier] = copy.deepcopy(loaded[earlier])  # a file may be in several places
                        _remove_other(loaded[earlier].config, path, kind)
        self._loaded = iter(loaded)
        return super()._compose_config_from_defaults_list(defaults, repo)

    def _load_single_config(self, default: ResultDefault, repo: Any) -> ConfigResult:
        return next(self._loaded)


def _kinds(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield place and kind of each mapping that names its kind, below the sections of the config."""
    if not isinstance(value, dict):
        return
    if len(path) > 1 and isinstance(kind := value.get("kind"), str):
        yield path, kind
    for key, child in value.items():
        yield from _kinds(child, (*path, str(key)))


def _remove_other(config: Any, path: tuple[str, ...], kind: str) -> None:
    """Remove the mapping at a place if it names another kind."""
    parent = OmegaConf.select(config, ".".join(path[:-1]))
    known = parent.get(path[-1]) if isinstance(parent, DictConfig) else None
    if isinstance(known, DictConfig) and known.get("kind") not in (None, kind):
        with open_dict(parent):
            del parent[path[-1]]
