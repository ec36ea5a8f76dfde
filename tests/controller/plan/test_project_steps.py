"""Steps of the user's own in the plan, from a folder outside the repository: the example of the page, and mistakes."""

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.core.errors import CloudError, ConfigError
from controller.gcp.google_errors import NotFoundError
from controller.plan.build import build_plan, preview_resources
from controller.plan.project_steps import OwnResource, own_steps
from controller.reconcile import Absent, destroy, reconcile, topological_order
from controller.resources.services import Services
from tests.composed import config_of
from tests.fakes.context import make_context
from tests.paths import ROOT

COMMAND = ("program=command", "program.command=[ls]")
EXAMPLE = (*COMMAND, "code.resources=[my_secret:LabSecret]")
OTHERS = """
class Step:
    name, wanted = "step", {"size": 1}
    def __init__(self, config): pass
    def read(self, google, project): return google
    def create(self, google, project): raise OSError("no route")
    def delete(self, google, project): pass
class Same(Step): pass
class Raises(Step):
    def __init__(self, config): raise KeyError("x")
class Nameless(Step): name = ""
class Vague(Step): wanted = None
class Halved: name, wanted = "half", {}; read = print; __init__ = lambda self, config: None
def no_class(): pass
"""


class SecretManager:
    """Google's answers about secrets, as of the API's reference."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, Any]] = {}
        self.changes: list[str] = []

    def call(self, api: str, method: str, **parameters: Any) -> dict[str, Any]:
        assert api == "secretmanager"
        match method.removeprefix("projects.secrets."):
            case "create":
                name = f"{parameters['parent']}/secrets/{parameters['secretId']}"
                self.secrets[name] = parameters["body"]
                self.changes.append(f"create {name}")
                return self.secrets[name]
            case "delete":
                self.changes.append(f"delete {parameters['name']}")
                return self.secrets.pop(parameters["name"])
        if parameters["name"] not in self.secrets:
            raise NotFoundError("secretmanager", 404, "NOT_FOUND", "Secret not found")
        return self.secrets[parameters["name"]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(ROOT / "docs" / "extend", tmp_path / "slipway")
    (tmp_path / "slipway" / "own_kinds.py").write_text(OTHERS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("my_secret", "own_kinds"):
        sys.modules.pop(name, None)


def test_the_example_lives_like_the_other_resources(folder: Path) -> None:
    plan = build_plan(config_of(*EXAMPLE), "p", folder)
    step, services = plan.get(OwnResource), plan.get(Services)
    assert step.depends_on == (services.id,)
    assert step.id in plan.node.depends_on
    assert "secretmanager.googleapis.com" in services.apis
    order = topological_order(plan.resources)
    assert order.index(services) < order.index(step) < order.index(plan.node)

    google, alone = SecretManager(), replace(step, depends_on=())
    context = make_context(google)
    assert isinstance(preview_resources((alone,), context)[0].observed, Absent)
    reconcile([alone], context)
    reconcile([alone], context)
    [after] = preview_resources((alone,), context)
    assert isinstance(after.observed, OwnResource)
    assert after.observed.is_managed
    assert after.resource.scope == "shared", "`down` keeps it, `down --all` deletes it"
    destroy([alone], context)
    destroy([alone], context)
    assert google.changes == ["create projects/p/secrets/lab-key", "delete projects/p/secrets/lab-key"]
    here = build_plan(config_of("cloud=here", "cloud.backend=cpu", *EXAMPLE), "here", folder)
    assert not [r for r in here.resources if isinstance(r, OwnResource)], "this machine has no such steps"


def test_what_others_made_is_used_or_refused_and_never_deleted(folder: Path) -> None:
    google = SecretManager()
    [step] = own_steps(config_of(*EXAMPLE), (folder,), ())
    name = "projects/p/secrets/lab-key"
    google.secrets[name] = {"replication": {"automatic": {}}}
    reconcile([step], make_context(google))
    destroy([step], make_context(google))
    assert google.changes == []
    google.secrets[name] = {"replication": {"userManaged": {}}}
    with pytest.raises(CloudError, match=r"own step lab-key differs .* and was not created by Slipway"):
        reconcile([step], make_context(google))
    google.secrets[name]["labels"] = {"managed-by": "slipway"}
    reconcile([step], make_context(google))
    assert google.changes == [f"delete {name}", f"create {name}"]


def test_a_mistake_is_an_error_of_the_plan(folder: Path) -> None:
    for names, words in {
        "own_kinds:Absent": "the module has no Absent; it has Step, Same",
        "none_such:Step": "cannot import none_such",
        "own_kinds:Raises": "own_kinds:Raises raised KeyError",
        "own_kinds:Nameless": "own_kinds:Nameless must have a name, a text",
        "own_kinds:Vague": "own_kinds:Vague must have `wanted`, a mapping",
        "own_kinds:Halved": "own_kinds:Halved has no method create, delete",
        "own_kinds:no_class": r"takes \(\), but is called as \(config\)",
        "own_kinds:Step,own_kinds:Same": "own_kinds:Same and own_kinds:Step have the same name, step",
    }.items():
        with pytest.raises(ConfigError, match=f"^code.resources: .*{words}"):
            build_plan(config_of(*COMMAND, f"code.resources=[{names}]"), "p", folder)


@pytest.mark.parametrize(
    ("answer", "run", "words"),
    [
        ({"managed": True}, OwnResource.observe, "read must return a mapping with size"),
        ({"size": 1}, OwnResource.observe, r"read must return a mapping with managed \(true or false\)"),
        (None, OwnResource.observe, r"read must return a mapping with managed \(true or false\)"),
        ({}, lambda step, context, _: step.apply(context, {}, step.diff(Absent())), "create raised OSError"),
    ],
)
def test_a_mistake_of_a_method_names_it(folder: Path, answer: Any, run: Callable[..., Any], words: str) -> None:
    [step] = own_steps(config_of(*COMMAND, "code.resources=[own_kinds:Step]"), (folder,), ())
    with pytest.raises(CloudError, match=f"code.resources: own_kinds:Step.{words}"):
        run(step, make_context(answer), {})
