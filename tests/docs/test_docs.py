"""What the documents say exists: commands, files, keys, examples, notebook, pictures; the site built of them."""

import html
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from conf.extension import PROTOCOLS
from conf.schema.config import Config
from conf.schema.run_sections import RecoveryPolicy
from controller.cli import main
from controller.cli.flags import VERBS
from controller.cli.verbs.up import _wrapped, format_plan
from controller.config.compose import config_groups
from controller.connect import project_of
from controller.gcp.prices import HourlyPrice
from controller.plan.build import ResourcePreview, build_plan
from controller.reconcile import Absent, Diff
from controller.run.preview import RunPreview
from controller.sweep.definition import define_sweep
from tests.conftest import deep
from tests.docs import commands
from tests.docs.commands import CANNOT, commands_on, meant_by, verb_of
from tests.docs.reader import as_a_user
from tests.paths import ROOT

PAGES = sorted([*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SKILL.md")), *(ROOT / "docs").glob("*.md")])
COMMANDS = {words for words in commands_on(*commands.PAGES) if verb_of(words) and words not in CANNOT}
TYPED = {words for words in commands.of_the_others() if commands.is_typed(words)}
"""Of them those that tests/docs/test_commands.py types in each run of the tests."""
NEED_NO_CONFIG = ("help", "version", "completion")


def test_links_lead_somewhere_and_no_page_holds_a_merge_conflict() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
    for page in (*PAGES, ROOT / "CHANGELOG.md"):
        assert not re.findall(r"^(?:<{7}|>{7}|={7})(?: .*)?$", page.read_text(), re.MULTILINE), page.name


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `slipway init` has written cloud=mine and tpu=mine, and the reader the files of the pages."""
    project = tmp_path_factory.mktemp("project")
    for group, base in (("cloud", "gcp"), ("tpu", "v5litepod_16")):
        file = project / "slipway" / group / "mine.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(f"defaults: [{base}, _self_]\n")
    for step in (step for page in commands.PAGES for step in commands.steps_on(page)):
        if step.file:
            (file := project / step.file).parent.mkdir(parents=True, exist_ok=True)
            file.write_text(step.words)
    (project / "train.py").write_text("print()\n")
    return project


@pytest.mark.parametrize("are_sweeps", [False, *deep(True)])
def test_commands_are_understood(are_sweeps: bool, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "a-project")
    monkeypatch.setenv("SLACK_WEBHOOK", "https://hooks.slack.com/services/T/B/X")
    whole = {meant_by(words).replace("my-bucket", "lab-data") for words in COMMANDS - TYPED}
    meant = sorted(words for words in whole if ("-m " in words) == are_sweeps)
    assert len(meant) >= (12 if are_sweeps else 120)
    known: dict[object, list[str]] = {}
    for words in meant:
        command = main.parse(shlex.split(words)[1:])
        key = (command.verb in ("rehearse", "fit") and command.verb, command.overrides, command.remainder)
        if key not in known:
            known[key] = what_is_wrong(command)
    assert [found for found in known.values() if found] == []


def what_is_wrong(command: main.Command) -> list[str]:
    """Compose what a command means, and return the errors."""
    if command.remainder:
        command = main.with_program(command)
    if command.verb == "rehearse":
        command = replace(command, overrides=(*command.overrides, "cloud=local"))
    if not any(word.startswith(("+experiment=", "program=")) for word in command.overrides):
        assert command.verb in NEED_NO_CONFIG or command.options.cloud_config()
        return []
    if getattr(command.flags, "multirun", False):
        found = define_sweep(command.overrides, ROOT)
        return [] if found.jobs or found.space else [f"{command.overrides}: no runs"]  # a search draws its runs later
    _, findings = command.options.config(resolve=False)  # run:ID is a run of the reader's
    asked = "fit" if command.verb == "fit" else ""  # the verb asks what the check says
    return [f"{command.overrides}: {one}" for one in findings if one.severity == "error" and one.check != asked]


def test_every_experiment_says_command_time_and_result() -> None:
    for name in config_groups()["experiment"]:
        header = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()
        assert header.startswith("# @package _global_\n")
        for word in ("command:", "time:", "result:"):
            assert word in header, name


def test_the_number_of_failures_is_that_of_the_policy() -> None:
    pages = [(ROOT / page).read_text() for page in ("README.md", "docs/comparison.md")]
    numbers = [number for page in pages for number in re.findall(r"(\d+) kinds of failure", page)]
    assert numbers == [str(len(RecoveryPolicy.model_fields))] * 2


def test_help_and_readme_name_the_same_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split()).partition("exit codes ")[2]
    page = " ".join((ROOT / "README.md").read_text().split()).partition("Exit codes: ")[2].partition(" ## ")[0]
    said = [re.findall(r"(?:^|[,·] )(\d+) [\w`]", words) for words in (text, page)]
    assert said[0] == said[1] == [*map(str, range(10)), "130"]


EXTEND = (ROOT / "docs" / "extend.md").read_text()
EXAMPLES = sorted((ROOT / "docs" / "extend").glob("*.py"))
TESTED = (
    "tests/trainer/test_extension.py",
    "tests/controller/checks/test_input_extensions.py",
    "tests/controller/plan/test_project_steps.py",
)


def test_the_page_of_extensions_has_every_kind_and_its_examples_are_short_and_run() -> None:
    tests = "".join((ROOT / test).read_text() for test in TESTED)
    for file in EXAMPLES:
        text = file.read_text()
        shown = f"```python\n# ./slipway/{file.name}\n{text}```\n" in EXTEND
        assert shown != (f"[{file.name}](extend/{file.name})" in EXTEND), file.name
        assert len(text.splitlines()) <= 40
        assert f"{file.stem}:" in tests
    named = re.findall(r"# \./slipway/(\w+)\.py\n|\(extend/(\w+)\.py\)", EXTEND)
    assert sorted(shown or linked for shown, linked in named) == [file.stem for file in EXAMPLES]
    headings = {heading.lower() for heading in re.findall(r"^## (.+)$", EXTEND, re.MULTILINE)}
    assert {"loss" if " loss" in kind else kind for kind in PROTOCOLS} == headings - {"what is not open"}


NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def test_every_cell_is_python_nothing_is_stored_and_the_first_installs_what_the_others_import() -> None:
    import nbformat

    read: Any = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(read)
    assert not any(cell.get("outputs") for cell in read.cells)
    code = [cell.source for cell in read.cells if cell.cell_type == "code"]
    [install] = [source for source in code if source.startswith("%pip")]
    imported = set[str]()
    for source in code:
        if not source.startswith("%"):
            compile(source, str(NOTEBOOK), "exec")
            imported |= set(re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE))
    assert imported - {"slipway"} == set(install.removeprefix("%pip install -q .. ").split())


LEARNED = re.compile(r"\('finished', ([\d.]+), ([\d.]+)\)")


@pytest.mark.e2e
@pytest.mark.deep
def test_the_notebook_ends_with_a_curve(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    read: Any = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(read, timeout=1500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=as_a_user(tmp_path / "state"))
    outputs = [output for cell in read.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no curve"
    shown = [str(output.get("data", {}).get("text/plain", "")) for output in outputs]
    [(before, after)] = [found.groups() for text in shown if (found := LEARNED.fullmatch(text))]
    assert float(before) < float(after), "it learns"
    assert any(re.fullmatch(r"\[\('quickstart-\w+', 'finished', [\d.]+\)\]", text) for text in shown), shown


PICTURES = ROOT / "docs" / "pictures"
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


def test_every_picture_is_shown_has_80_columns_and_needs_no_network() -> None:
    shown = {name for page in PAGES for name in SHOWN.findall(page.read_text())}
    assert shown == {file.stem for file in PICTURES.iterdir()} == {"plan", "status", "sweep", "up"}
    for name in shown:
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
