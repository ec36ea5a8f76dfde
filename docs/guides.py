"""Makes docs/guides.md of docs/guides.yaml: `python docs/guides.py > docs/guides.md`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
HEAD = """# The five guides

<!-- Made by `python docs/guides.py` of docs/guides.yaml, which is what to edit. -->

Each of the five guides that people follow by hand to get onto Cloud TPUs is one command. `slipway plan …` shows what it
would make and cost; `slipway rehearse …` runs it on this machine without a cloud, with a stand-in for the program.
"""
TABLE = """
## Line by line

Every line of the guides that asks for something, and the config key, step, check, verb or file that covers it.
C1 to C25: where a guide is wrong; the header of the program and the experiment says what was done instead. What is
marked *not yet* or *later* belongs to the trainer, or to another part that is not there yet.

| id | what | covered by |
|---|---|---|
"""
FOLDERS = {"experiment": "conf/experiment", "program": "conf/program", "tpu": "conf/tpu", "scale": "conf/scale"}


def page(content: dict[str, Any]) -> str:
    """The whole page."""
    parts = [HEAD]
    for guide in content["guides"]:
        parts.append(f"\n## {guide['title']}\n\n```\n{guide['command']}\n```\n\n{guide['words'].strip()}\n")
    rows = [f"| {name} | {row['what']} | {', '.join(map(said, row['by']))} |" for name, row in content["rows"].items()]
    return "".join(parts) + TABLE + "\n".join(rows) + "\n"


def said(item: str) -> str:
    """One item of `by`, for people."""
    sort, _, name = item.partition(" ")
    if sort == "none":
        return name
    if sort == "later":
        return "*trainer, not yet*" if name == "trainer" else f"*later: {name}*"
    if sort == "page":
        return f"[{name.removeprefix('docs/')}]({name.removeprefix('docs/')})"
    if sort in FOLDERS:
        return f"[{sort}={name}](../{FOLDERS[sort]}/{name}.yaml)"
    if sort == "file":
        return f"[{name}](../{name})"
    if sort == "verb":
        return f"`slipway {name}`"
    words = {"key": "", "kind": "step ", "check": "check "}[sort]
    return f"{words}`{name}`"


if __name__ == "__main__":
    print(page(yaml.safe_load((HERE / "guides.yaml").read_text())), end="")
