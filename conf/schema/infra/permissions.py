"""IAM: the permissions that Google's methods need, and the roles that contain them, from `permissions.yaml`."""

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import conf
from conf.schema.infra.topology import YamlLoader

TABLE_FILE = Path(conf.__file__).with_name("permissions.yaml")


@cache
def _table() -> dict[str, Any]:
    return yaml.load(TABLE_FILE.read_text(), Loader=YamlLoader)  # noqa: S506 - CSafeLoader is a safe loader


def permissions_of_method(api: str, method: str) -> tuple[str, ...]:
    """Return what a method always needs, `tpu` and `projects.locations.nodes.get`. Raises KeyError for others."""
    return tuple(_table()["methods"][api][method])


def has_method(api: str, method: str) -> bool:
    """Return whether the table lists a method."""
    return method in _table()["methods"].get(api, {})


@cache
def all_permissions() -> frozenset[str]:
    """Return every permission of the table."""
    listed = {name for methods in _table()["methods"].values() for names in methods.values() for name in names}
    return frozenset(listed | set(_table()["others"]))


@cache
def permissions_of_role(role: str) -> frozenset[str]:
    """Return what a predefined role contains of `all_permissions`; nothing for a role that the table lacks."""
    held: set[str] = set()
    for pattern in _table()["roles"].get(role, ()):
        matching = {name for name in all_permissions() if fnmatchcase(name, pattern.removeprefix("-"))}
        held = held - matching if pattern.startswith("-") else held | matching
    return frozenset(held)


def predefined_roles() -> tuple[str, ...]:
    return tuple(_table()["roles"])
