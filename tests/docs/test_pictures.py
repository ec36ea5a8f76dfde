"""Pictures of the terminal: those that pages show exist, and that of `plan` is what `plan` prints now."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from controller.cli import main
from controller.cli.verbs.run.plan import _wrapped, format_plan
from controller.cloud.connect import project_of
from controller.gcp.prices import HourlyPrice
from controller.plan.build import build_plan
from controller.plan.preview import ResourcePreview
from controller.reconcile.resource import Absent, Diff
from controller.run.preview import RunPreview
from tests.paths import ROOT

PICTURES = ROOT / "docs" / "pictures"
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
SHOWN = re.compile(r"!\[[^\]]+\]\((?:docs/)?pictures/(\w+)\.svg\)")
LINE = re.compile(r'<text class="\w+-r\d+" x="(?P<x>[\d.]+)" y="(?P<y>[\d.]+)"[^>]*>(?P<text>.*?)</text>')
COLUMN = 12.2
"""Width of a character in the pictures."""
CHANGING = re.compile(r"\b[0-9a-f]{8,12}\b|\d+ files")
"""Hashes of code and the number of its files, which every commit changes."""


def lines_of(picture: Path) -> list[str]:
    lines: dict[float, str] = {}
    for part in LINE.finditer(picture.read_text()):
        before = lines.get(float(part["y"]), "").ljust(round(float(part["x"]) / COLUMN))  # spaces have no element
        lines[float(part["y"])] = before + html.unescape(part["text"]).replace("\xa0", " ")
    return [text.rstrip() for _, text in sorted(lines.items())]


def test_every_picture_is_shown_and_every_one_shown_exists() -> None:
    shown = {name for page in PAGES for name in SHOWN.findall(page.read_text())}
    assert shown == {file.stem for file in PICTURES.iterdir()} == {"plan", "status", "sweep", "up"}


@pytest.mark.parametrize("name", ["plan", "status", "sweep", "up"])
def test_a_picture_has_80_columns_and_needs_no_network(name: str) -> None:
    lines = lines_of(PICTURES / f"{name}.svg")
    assert lines[0].startswith("$ slipway")
    assert len(lines) > 4
    assert max(map(len, lines)) <= 80
    assert "@font-face" not in (PICTURES / f"{name}.svg").read_text()


def test_the_picture_of_plan_is_what_plan_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a project that has what runs share; to take it again: python docs/pictures.py plan."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    pictured = lines_of(PICTURES / "plan.svg")
    words = pictured.pop(0).removeprefix("$ slipway ").split()
    config, _ = main.parse(words).options.config()
    plan = build_plan(config, project_of(config), tmp_path)
    rows = [
        ResourcePreview(resource, None, Diff("none"))
        if resource.scope in ("external", "shared")
        else ResourcePreview(resource, Absent(), resource.diff(Absent()))
        for resource in plan.resources
    ]
    printed = _wrapped(format_plan(RunPreview(plan, rows, [], HourlyPrice(None, 0.0, ""), "")))
    assert len(rows) > 20
    shown = [CHANGING.sub("#", line) for line in printed.splitlines() if line]
    assert [CHANGING.sub("#", line) for line in pictured[: len(shown)]] == shown
    assert all(line.startswith(("note: ", "  ")) for line in pictured[len(shown) :])
