"""Writes written_fields.json: what transformers has written into config.json, from 2.0 on, and what its models read.

Each field has the type of the newest version that says one.

Nothing is installed or run: the sources are read as they are in the wheels. The recording names its versions.

    pip download --no-deps --dest WHEELS transformers==VERSION …
    python tests/conf/make_written_fields.py WHEELS/*.whl
"""

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("written_fields.json")
FAMILIES = {
    "gemma2": "gemma2", "gemma3_text": "gemma3", "gemma3": "gemma3", "llama": "llama", "qwen2": "qwen2",
    "qwen3": "qwen3", "qwen3_moe": "qwen3_moe", "gpt_oss": "gpt_oss", "gpt2": "gpt2",
    **{kind: kind for kind in ("mistral", "ministral", "gemma", "smollm3", "olmo2", "granite", "phi3", "olmo3")},
    **{kind: kind for kind in ("ministral3", "mistral3")},
    **{f"{kind}{part}": kind for kind in ("gemma4", "gemma4_unified") for part in ("_text", "")},
    **{f"{kind}{part}": kind for kind in ("qwen3_5", "qwen3_5_moe") for part in ("_text", "")},
}  # fmt: skip
"""The folder of each model_type; before 4.0.1 there were none."""
CLASSES = {"gemma3_text": "Gemma3TextConfig", "gemma3": "Gemma3Config"}
CLASSES |= {"gemma4_text": "Gemma4TextConfig", "gemma4": "Gemma4Config"}
CLASSES |= {"qwen3_5_text": "Qwen3_5TextConfig", "qwen3_5": "Qwen3_5Config"}
CLASSES |= {"qwen3_5_moe_text": "Qwen3_5MoeTextConfig", "qwen3_5_moe": "Qwen3_5MoeConfig"}
CLASSES |= {"gemma4_unified_text": "Gemma4UnifiedTextConfig", "gemma4_unified": "Gemma4UnifiedConfig"}
"""Where a file has several."""


def written_names(source: str, class_name: str | None = None) -> dict[str, str]:
    """Return the attributes that the config classes of a module have, or one of them, with their types if they say it.

    `to_dict` writes all attributes.
    """
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or class_name not in (None, node.name):
            continue
        if node.name.endswith("Config") and not node.name.endswith("OnnxConfig"):
            of_fields = any("strict" in ast.unparse(word) for word in node.decorator_list)
            for item in node.body:
                found |= {name: type_ for name, type_ in _names(item, of_fields) if type_ or name not in found}
            removed = {name for item in node.body for name in _removed(item)}
            found = {name: type_ for name, type_ in found.items() if name not in removed}
    return found


def _removed(item: ast.stmt) -> Iterator[str]:
    """Yield the keys that a method deletes or pops of what it writes."""
    if isinstance(item, ast.FunctionDef) and item.name in ("to_dict", "_remove_keys_not_serialized"):
        for node in ast.walk(item):
            if isinstance(node, ast.Delete):
                keys = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "pop":
                keys = node.args[:1]
            else:
                continue
            yield from (str(key.value) for key in keys if isinstance(key, ast.Constant))


def _names(item: ast.stmt, of_fields: bool) -> Iterator[tuple[str, str]]:
    """Yield the attributes that a statement of a class gives its instances. of_fields: an annotation is one."""
    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
        if of_fields and "ClassVar" not in (type_ := ast.unparse(item.annotation)):
            yield item.target.id, type_
    elif isinstance(item, ast.FunctionDef) and item.name in ("__init__", "__post_init__"):
        yield from ((word.arg, "") for word in item.args.args + item.args.kwonlyargs if word.arg != "self")
        for node in ast.walk(item):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_name(node.value, "self"):
                yield node.attr, ""
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "kwargs.pop":
                yield from ((str(word.value), "") for word in node.args[:1] if isinstance(word, ast.Constant))


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def read_names(source: str) -> set[str]:
    """Return the attributes of `config` and `self.config` that a module reads."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            if _is_name(owner, "config") or (isinstance(owner, ast.Attribute) and owner.attr == "config"):
                found.add(node.attr)
    return found


def read_wheel(path: str) -> Iterator[tuple[str, dict[str, str], set[str]]]:
    """Yield each model_type with the fields that its classes write and the names that its models read."""
    with zipfile.ZipFile(path) as wheel:
        files = set(wheel.namelist())

        def source(*names: str) -> str:
            return next((wheel.read(name).decode() for name in names if name in files), "")

        base = written_names(source("transformers/configuration_utils.py"))
        for kind, folder in FAMILIES.items():
            places = (f"transformers/models/{folder}/", "transformers/")
            config, model = ([f"{at}{part}_{folder}.py" for at in places] for part in ("configuration", "modeling"))
            if text := source(*config):
                yield kind, base | written_names(text, CLASSES.get(kind)), read_names(source(*model))


def main(wheels: list[str]) -> None:
    versions = {tuple(int(part) for part in Path(wheel).name.split("-")[1].split(".")): wheel for wheel in wheels}
    together: dict[str, Any] = {kind: {"written": {}, "read": set()} for kind in FAMILIES}
    for _, wheel in sorted(versions.items()):
        for kind, written, read in read_wheel(wheel):
            known = together[kind]["written"]
            known |= {name: type_ for name, type_ in written.items() if type_ or name not in known}
            together[kind]["read"] |= read
    found = {kind: uses | {"read": sorted(uses["read"])} for kind, uses in together.items()}
    names = [".".join(map(str, version)) for version in sorted(versions)]
    FILE.write_text(json.dumps({"versions": names, "families": found}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
