"""Which keys take text: the walk over the schema's classes agrees with the JSON schema that editors get."""

from collections.abc import Iterator
from typing import Any

import pytest

from conf.schema.config import Config
from conf.schema.text_keys import is_text

SCHEMA = Config.model_json_schema()
Path = tuple[str, ...]


def scalars(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Place and description of every value of the config that is no list or mapping; `mine` is a user's own name."""
    node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    for one in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from scalars(one, path)
    for name, child in node.get("properties", {}).items():
        yield from scalars(child, (*path, name))
    if isinstance(child := node.get("additionalProperties"), dict):
        yield from scalars(child, (*path, "mine"))
    for child in (node.get("patternProperties") or {}).values():
        yield from scalars(child, (*path, "mine"))
    for number, child in enumerate(node.get("prefixItems", [node["items"]] if "items" in node else [])):
        yield from scalars(child, (*path, str(number)))
    if node.get("type") not in ("object", "array", "null") and not {"anyOf", "oneOf"} & set(node):
        yield path, node


def all_scalars() -> dict[Path, list[Any]]:
    found: dict[Path, list[Any]] = {}
    for path, node in scalars(SCHEMA, ()):
        found.setdefault(path, []).append(node)
    return found


def _is_string(node: Any) -> bool:
    choices = node.get("enum", [node["const"]] if "const" in node else [])
    return node.get("type") == "string" and "format" not in node and all(isinstance(one, str) for one in choices)


SHORT_FORMS = {("loop", "evaluations", "mine"), ("tpu", "capacity")}
"""A word in the place of a mapping or a list, none of which looks like a number."""
TEXT_KEYS = sorted({path for path, nodes in all_scalars().items() if all(map(_is_string, nodes))} - SHORT_FORMS)


def test_the_walk_finds_the_keys_of_the_json_schema() -> None:
    assert len(TEXT_KEYS) > 200
    assert {path for path in all_scalars() if is_text(path)} == set(TEXT_KEYS)
    assert not any(map(is_text, SHORT_FORMS))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("env.vars.ANY", True),
        ("program.command.7", True),
        ("program.setup.0.2", True),
        ("cloud.kind", True),
        ("ssh.os_login", False),  # auto or a boolean
        ("loop.rollout_correction.rollout_rs_threshold", False),
        ("run.seed", False),
        ("env.vars", False),
        ("program.exit_codes.33", True),
        ("no.such.key", False),
        ("run.name.first", False),
    ],
)
def test_numbers_beside_text_stay_numbers(key: str, text: bool) -> None:
    assert is_text(tuple(key.split("."))) is text
