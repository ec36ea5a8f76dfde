"""What is wrong with the files that a file of the user's builds on, or that an override chooses; and what is meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

import conf
from conf.schema.forms import misspelled, near_choices, program_line
from conf.schema.topology import tpu_type_table, usual_type

if TYPE_CHECKING:
    from controller.config.own_files import OwnFile

Groups = Mapping[str, Sequence[str]]
"""Names of files by group, bundled and the user's own."""
DEFAULT = re.compile(
    r"(?P<words>(?:(?:optional|override)\s+)*)(?P<root>/?)(?P<group>(?!/|override/|optional/)[\w/-]+)(?P<at>@[\w.]*)?$"
)
"""Key of an entry of `defaults`, such as `override /model` or `/model@loop.teacher`."""

SIZE = re.compile(r"(?<![a-z\d])\d+[bm](?![a-z])")
"""The part of a model's name that says how large it is."""


def wrong_defaults(file: OwnFile, folder: Path, groups: Groups, base: Groups) -> Iterator[str]:
    """Yield what is wrong with the files that a file chooses in `defaults`."""
    for key, value in file.root.value:
        if key.value == "defaults" and not isinstance(value, yaml.SequenceNode):
            yield f"{file.place(key)}: defaults must be a list: `- override /model: tiny`, or the name of a base"
    first: dict[str, yaml.Node] = {}
    for entry in file.defaults:
        pairs = entry.value if isinstance(entry, yaml.MappingNode) else [(entry, entry)]
        if len(pairs) > 1:
            again = pairs[1][0]
            yield f"{file.place(again)}: defaults: each entry has its own dash: `- {again.value}: {pairs[1][1].value}`"
            continue
        for key, value in pairs:
            if said := _wrong_default(file, key, value, folder, groups, base):
                yield f"{file.place(key)}: {said}"
            elif isinstance(key, yaml.ScalarNode):
                yield from _wrong_order(file, key, first)
                if key is value and "_self_" in first and key.value != "_self_" and len(file.root.value) > 1:
                    said = "replaces what this file sets, since it stands below `_self_`; put `- _self_` last"
                    yield f"{file.place(key)}: defaults: {key.value} {said}"


def _wrong_order(file: OwnFile, key: yaml.ScalarNode, first: dict[str, yaml.Node]) -> Iterator[str]:
    """Yield an entry that stands twice, or a base behind an override: overrides change what stands above them."""
    name = " ".join(str(key.value).split())
    if (known := first.setdefault(name, key)) is not key:
        yield f"{file.place(key)}: defaults: {name} stands in line {known.start_mark.line + 1} already"
        return
    above = next((each for each in first if each.startswith("override ")), None)
    if above is not None and name != "_self_" and "override" not in name.split():
        yield f"{file.place(key)}: defaults: put `- {name}` above `- {above}`, since overrides come last"


def _wrong_default(file: OwnFile, key: yaml.Node, value: yaml.Node, folder: Path, groups: Groups, base: Groups) -> str:
    """Return what is wrong with an entry of `defaults`, and what to write; empty if nothing is."""
    if not isinstance(key, yaml.ScalarNode):
        return f"defaults: {kind_of(key)} is no name of a file"
    if key is value:
        return _wrong_base(file, key, folder, groups, base)
    found = DEFAULT.match(" ".join(key.value.split()))
    if found is None:
        words = re.split(r"[\s/.]+", key.value.strip())
        group = next((word for word in words if word in base), "model")
        file_of_group = value.value if value.value in groups[group] else base[group][0]
        return f"defaults: {key.value!r} is no group; write `override /{group}: {file_of_group}`"
    group, words = found["group"], found["words"].split()
    is_null = value.tag == "tag:yaml.org,2002:null"
    name = value.value if isinstance(value, yaml.ScalarNode) and not is_null else "…"
    if group == file.group and not found["at"] and group in base:
        return f"{group}: a base is named alone: `- {name}`"
    if group == "experiment" and group in base:
        return f"an experiment is chosen on the command line: +experiment={name}"
    if group not in groups and not found["root"] and f"{file.group}/{group}" in groups:
        return ""
    if "/" in group or (folder / file.group / group).is_dir():
        return ""
    if group not in groups:
        near = misspelled(group, groups)
        hint = f"did you mean {' '.join([*words, f'/{near[0]}'])}? " if near else ""
        return f"{group}: unknown group; {hint}groups: {', '.join(groups)}"
    if "override" in words and group not in base:
        return f"{group}: the config has no such group to override; write `/{group}: {name}`"
    if not found["root"]:
        prefix = "" if "override" not in words and (found["at"] or group not in base) else "override "
        return f"{group} is a group of the whole config; write `{prefix}/{group}{found['at'] or ''}: {name}`"
    if "override" not in words and not found["at"] and group in base:
        return f"{group}: is chosen already, and a file can only override it; write `override /{group}: {name}`"
    if is_null and not value.value:
        return f"{group}: names no file; write `override /{group}: NAME`, or null for none"
    names = value.value if isinstance(value, yaml.SequenceNode) else [] if is_null else [value]
    if "override" in words and group != "assets" and len(names) > 1:
        return f"override /{group} takes one file, not a list"
    for each in names:
        if not isinstance(each, yaml.ScalarNode):
            return f"{group}: {kind_of(each)} is no name of a file"
        is_known = each.value.removesuffix(".yaml") in groups[group]
        if "$" not in each.value and "optional" not in words and not is_known:
            return wrong_name(group, each.value, folder, groups)
    return ""


def _wrong_base(file: OwnFile, key: yaml.ScalarNode, folder: Path, groups: Groups, base: Groups) -> str:
    """Return what is wrong with the name of a base; empty if nothing is."""
    name = base_name(file.group, key.value)
    if key.tag != "tag:yaml.org,2002:str":
        return f"defaults: {key.value} is no name of a file"
    if name == "_self_" or "$" in name or name in groups.get(file.group, ()):
        return ""
    if name in base:
        return f"{name} is a group; name a file of it, as in `override /{name}: {base[name][0]}`"
    head, _, rest = name.lstrip("/").partition("/")
    if rest and head == file.group:
        return f"defaults: a base is named without its folder: `- {rest}`"
    if rest and head in base:
        return f"defaults: write `- override /{head}: {rest}`"
    if rest and (folder / file.group / f"{name}.yaml").is_file():
        return ""
    inside = sorted(path.stem for path in (Path(conf.__file__).parent / file.group / head).glob("*.yaml"))
    if rest and inside:
        stem = rest.partition("@")[0]
        if stem in inside:
            return "" if rest == f"{stem}@_here_" else f"defaults: write `- {head}/{stem}@_here_`"
        return f"defaults: {head} has no {stem}; choices: {', '.join(f'{head}/{each}@_here_' for each in inside)}"
    if closed := re.fullmatch(r"((?:override )?/?[\w/]+(?:@[\w.]+)?):(\S+)", name):
        return f"defaults: a space belongs behind the colon: `- {closed[1]}: {closed[2]}`"
    if name.split()[0] == "override" or "=" in name:
        return f"defaults: {name!r} is no name of a file; write `- override /model: tiny`"
    if holders := [group for group, names in base.items() if name in names]:
        return f"{name} is a file of {holders[0]}; write `- override /{holders[0]}: {name}`"
    return wrong_name(file.group, name, folder, groups)


def base_name(group: str, entry: str) -> str:
    """Return the name of a base: `/experiment/quickstart` is Hydra's for `quickstart` in another experiment."""
    return entry.removesuffix(".yaml").removeprefix(f"/{group}/").removesuffix("@_global_" * (group == "experiment"))


def kind_of(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else f"{node.value!r}"


def wrong_name(group: str, name: str, folder: Path | None, groups: Groups) -> str:
    """Say that a group has no such file, what is meant, and the choices; for the command line and files alike."""
    stem = re.sub(r"\.ya?ml$", "", name, flags=re.IGNORECASE).rpartition("/")[2]
    near = [each for each in groups[group] if each.lower() == stem.lower().replace("-", "_")]
    near = near or near_choices(usual_type(stem), groups[group])
    near = near or [each for each in groups[group] if group == "tpu" and each.startswith(usual_type(f"{stem}_"))]
    near.sort(key=lambda each: not {*SIZE.findall(stem)} <= {*SIZE.findall(each)})
    hint = f"did you mean {group}={near[0]}? " if near else ""
    kind = usual_type(stem).replace("_", "-")
    if group == "tpu" and (not near or near[0].replace("_", "-") != kind) and kind in tpu_type_table()["types"]:
        hint = f"set tpu.accelerator_type={kind}; "
    hint = f"did you mean `{line}`? " if (line := program_line(name)) else hint
    hint = f"~{group} removes it; " if name.lower() == "null" else hint
    if "/" not in name or stem not in groups[group]:
        hint = f"{found}; " if (found := _elsewhere(folder, group, stem, groups)) else hint
    if group == "model" and "/" in name and stem == name.rpartition("/")[2] and "; " not in hint:
        hint += f"a model of the Hub is model=hf model.weights=hf://{'/'.join(name.split('/')[-2:])}; "
    shown = [each for each in groups[group] if group != "scale" or not each.startswith("tiny_")]  # `tiny` chooses these
    return f"no {group} named {name!r}; {hint}choices: {', '.join(shown)}"


def _elsewhere(folder: Path | None, group: str, stem: str, groups: Groups) -> str:
    """Return where the file lies that is meant, and how to move it; empty if there is none."""
    if folder is None or not re.fullmatch(r"[\w.-]+", stem):
        return ""
    of_other = ""
    for file in sorted(folder.glob("*/*")) if folder.is_dir() else ():
        if not re.fullmatch(rf"{re.escape(stem)}(\.ya?ml)?(\.txt)?", file.name, re.IGNORECASE) or file.is_dir():
            continue
        shown, of = f"{folder.name}/{file.parent.name}/{file.name}", file.parent.name
        if of == group and file.suffix != ".yaml":
            return f"{shown} must be renamed to {stem}.yaml"
        if of not in groups or (of != group and difflib.get_close_matches(of, [group], n=1)):
            return f"{shown} lies in a folder of another name; move it to {folder.name}/{group}/{stem}.yaml"
        if stem in groups[of]:
            choice = f"{'+' * (of == 'experiment')}{of}={stem}"
            of_other = f"{shown} is a file of {of}: choose {choice}, or move it to {folder.name}/{group}/{stem}.yaml"
    if of_other:
        return of_other
    root = folder.parent
    if (lone := folder / f"{stem}.yaml").is_file() or (lone := root / f"{stem}.yaml").is_file():
        return f"{lone.relative_to(root)} is in no group; move it to {folder.name}/{group}/{stem}.yaml"
    for above in [*folder.resolve().parents][1:4]:
        if (there := above / folder.name / group / f"{stem}.yaml").is_file():
            return f"{there} exists, and {folder.name}/ is looked for in the current folder; run slipway in {above}"
    places = ("*/{}.y*ml", "*/*/{}.y*ml", f"{folder.name}/*/*/{{}}.y*ml")  # conf/, configs/experiment/, .slipway/…
    for file in (file for place in places for file in sorted(root.glob(place.format(stem)))):
        if file.parent.parent != folder:
            return f"{file.relative_to(root)} is not looked at; move it to {folder.name}/{group}/{stem}.yaml"
    return ""
