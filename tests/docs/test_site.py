"""The documentation site: it builds without a warning, needs no network to read, and its reference is complete."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from conf.schema.config import Config
from controller.cli.flags import VERBS
from tests.paths import ROOT

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""Elements whose attribute a browser loads by itself."""


class Loads(HTMLParser):
    """The addresses that a page makes a browser load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("rel") != "canonical" and (address := values.get(LOADED.get(tag, ""))):
            self.found.append(address)


@pytest.mark.deep
def test_a_reader_needs_no_network(tmp_path: Path) -> None:
    """`strict` in mkdocs.yml makes a broken link, anchor or a page without a place an error."""
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", site := tmp_path / "site"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        parser = Loads()
        parser.feed(page.read_text())
        assert parser.found
        assert [address for address in parser.found if re.match(r"(https?:)?//", address)] == [], page
    for picture in site.rglob("*.svg"):
        assert not re.search(r"""(?:href|src)=["']https?:|url\(["']?https?:""", picture.read_text()), picture
    index = (site / "search" / "search_index.json").read_text()
    for words in ("Tutorial: train a policy", "slipway rehearse", "lease_duration_seconds"):
        assert words in index


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "reference.py"))


def test_the_reference_has_every_verb_and_flag_and_every_key(reference: dict[str, Any]) -> None:
    page = reference["commands_page"]()
    for name, verb in VERBS.items():
        assert f"### slipway {name}\n" in page
        for flag in verb.flags:
            assert all(part in page for part in flag.names if part.startswith("-")), flag.names
    page = reference["keys_page"]()
    for section, field in Config.model_fields.items():
        assert f"\n## {section}\n" in page
        inner = getattr(field.annotation, "model_fields", {})
        assert all(f"| `{section}.{key}` |" in page for key in inner)
    for path in ("loop.group_size", "tpu.accelerator_type", "optimizer.lr", "recovery.policy.preempted"):
        assert f"| `{path}` |" in page


def test_the_messages_of_troubleshooting_are_those_of_the_code() -> None:
    code = "".join(p.read_text() for part in ("conf", "controller", "trainer") for p in (ROOT / part).rglob("*.py"))
    words = code.replace("_", " ").lower()  # a verdict is written in code with underscores
    headings = re.findall(r"^### (.*)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    messages = [message for heading in headings for message in re.findall(r'"([^"]+)"', heading)]
    assert len(messages) > 20
    assert [message for message in messages if message.lower() not in words] == []


@pytest.mark.parametrize("name", ["troubleshooting", "comparison"])
def test_the_keys_that_a_page_names_exist(name: str, reference: dict[str, Any]) -> None:
    keys = set(re.findall(r"^\| `([a-z_.A-Z\[\]]+)` \|", reference["keys_page"](), re.MULTILINE))
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", (ROOT / "docs" / f"{name}.md").read_text())
    assert named
    assert [key for key in named if key.partition(".")[0] in Config.model_fields and key not in keys] == []
