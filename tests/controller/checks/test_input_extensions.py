"""What a config names of the user's own is found, or is a finding, before anything is billed."""

import shutil
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from controller.checks import input_extensions
from controller.checks.preflight import preflight
from controller.inputs.code import CodeSnapshot
from controller.inputs.modules import OTHER_NAMES, locked_packages, references
from controller.plan.build import build_plan
from tests.composed import config_of as config
from tests.controller.checks.plans import context
from tests.paths import ROOT

GRPO = ["+experiment=quickstart"]
LM = ["data=text", "data.path=/etc/hostname", "model=tiny", "loop=lm", "optimizer=adamw", "cloud=local"]
PUZZLE = ["data=puzzles", "data.path=/tmp", "model=trm", "loop=puzzle", "optimizer=adam_atan2", "cloud=local"]
OWN = ["program=command", "program.command=[python, -V]", "cloud=local"]
OWN_MODEL = "model.implementation=my_model:GatedAverage"
EVERYTHING = [
    *("data=questions", "data.source=my_questions:products", "data.options={largest: 7}", "model=tiny", "cloud=local"),
    *("loop=grpo", r"loop.rewards={my_reward\:brief: 1.0}", "loop.loss_type=my_losses:cispo"),
    *("loop.environment.name=my_environment:HigherLower", "loop.environment.options={bonus: 0.5}"),
    *("loop.evaluations={style: my_evaluation:style}", "data.prompt.formatter=my_prompt:terse"),
    *("optimizer=custom", "optimizer.rule=my_optimizer:signs", "notify.notifier=my_notifier:to_file"),
    "logging.trackers=[my_tracker:ToCsv]",
]
LANGUAGE = [
    *("data=documents", "data.source=my_documents:counting", "model=tiny", "loop=lm", "optimizer=adamw", "cloud=local"),
    *("loop.loss=my_losses:focal", "loop.loss_options={gamma: 1.0}", "model.implementation=my_model:GatedAverage"),
    *("code.checks=[my_check:runs_have_owners]", "run.name=ada-lm"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project outside the repository, with the examples of docs/extend.md."""
    shutil.copytree(ROOT / "docs" / "extend", tmp_path / "slipway")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "slipway"


def words(*overrides: str) -> list[str]:
    return [f"{f.check}: {f}" for f in preflight(config(*overrides)) if f.severity == "error"]


@pytest.mark.parametrize("overrides", [EVERYTHING, LANGUAGE])
def test_the_examples_have_no_findings_and_are_not_imported(overrides: list[str]) -> None:
    before = {*sys.modules}
    used = references(config(*overrides))
    assert len(used) == (9 if overrides is EVERYTHING else 4)
    assert words(*overrides) == []
    assert {name for name in {*sys.modules} - before if name.startswith("my_")} <= {"my_check"}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([*GRPO, r"loop.rewards={my_rewards\:brief: 1.0}"], "extension: loop.rewards: reward my_rewards:brief: no"),
        ([*GRPO, r"loop.rewards={my_rewards\:brief: 1.0}"], "code.modules; did you mean my_reward:NAME?"),
        ([*GRPO, r"loop.rewards={my_reward\:breif: 1.0}"], "it defines brief"),
        ([*GRPO, r"loop.rewards={my_reward.py\:brief: 1.0}"], "code.modules; did you mean my_reward:NAME?"),
        ([*GRPO, r"loop.rewards={My_Loss\:f: 1.0}"], "code.modules; did you mean sub.my_loss:NAME?"),
        ([*GRPO, r"loop.rewards={My_Loss\:f: 1.0}", "env.packages=lock"], "shipped; did you mean sub.my_loss:NAME?"),
        ([*GRPO, r"loop.rewards={lab.mine\:f: 1.0}"], "lab/mine.py lies outside of code.modules; move it to slipway/"),
        (
            [*GRPO, r"loop.rewards={my_reward\:brief: 1.0}", "code.exclude=['my_*.py']"],
            "slipway/my_reward.py is not among them: code.exclude leaves it out, or code.modules lacks slipway",
        ),
        (
            [*GRPO, r"loop.rewards={my_reward\:brief: 1.0}", "code.modules=[lab]"],
            "slipway/my_reward.py is not among th",
        ),
        ([*GRPO, r"loop.rewards={random\:random: 1.0}"], "reward random:random takes (), but is called as (response, "),
        ([*GRPO, r"loop.rewards={math\:sqr: 1.0}"], "reward math:sqr: the module has no sqr; it has "),
        ([*OWN, "code.modules=[nowhere]"], "modules: code.modules: there is no folder"),
        ([*GRPO, "loop.loss_type=my_losses:focal"], "policy loss my_losses:focal takes (logprobs, entropy, *, gamma="),
        ([*GRPO, "loop.evaluations={e: my_reward:brief}"], "loop.evaluations.e: evaluation my_reward:brief takes"),
        ([*GRPO, "loop.evaluations={e: my_evaluation:styles}"], "defines style, counting, solved"),
        ([*LM, "loop.evaluations={e: my_evaluation:style}"], "loop.evaluations.e: my_evaluation:style: only the grpo"),
        ([*LM, "loop.evaluations={e: core}"], "argument: 'path'"),
        ([*LM, "loop.evaluations={e: {run: core, options: {path: x, most: 5}}}"], "loop.evaluations.e: evaluation"),
        ([*LM, "loop.evaluations={e: {run: code, options: {path: x}}}", OWN_MODEL], "evaluation: loop.evaluations.e:"),
        ([*PUZZLE, "loop.evaluations={e: {run: core, options: {path: x}}}"], "core is for language models"),
        ([*GRPO, "loop.environment.name=my_environment:Higher"], "extension: loop.environment.name: environment"),
        (
            [*GRPO, "loop.environment.name=my_environment:HigherLower", "loop.environment.options={bonos: 1}"],
            "takes (bonus=…), but is called as (bonos=…): got an unexpected keyword argument 'bonos'",
        ),
        ([*GRPO, "loop.environment.name=calculator", "loop.environment.options={digit: 1}"], "takes (*, digits=…"),
        ([*GRPO, "loop.environment.name=word_game", "loop.environment.options={letters: ab}"], "takes (), but is call"),
        ([*GRPO, "data.prompt.formatter=my_prompt:no"], "data.prompt.formatter: prompt my_prompt:no:"),
        ([*LM, "loop.loss=my_losses:focal", "loop.loss_options={gama: 1}"], "unexpected keyword argument 'gama'"),
        ([*LM, "optimizer=custom", "optimizer.rule=my_optimizer:sign"], "optimizer.rule: optimizer rule"),
        ([*LM, "loop=custom", "loop.run=my_loop:train"], "loop.run: loop my_loop:train:"),
        ([*OWN, "logging.trackers=[my_tracker:ToCvs]"], "extension: logging.trackers: tracker my_tracker:ToCvs:"),
        ([*OWN, "logging.trackers=[my_notifier:to_file]"], "is called as (run, config, folder): too many positional"),
        ([*OWN, "logging.trackers=[my_tracker:ToCsv]", "code.modules=[nowhere]"], "modules: code.modules: there is no"),
        ([*LM, "notify.notifier=my_notifier:to_fiel"], "notify.notifier: notifier my_notifier:to_fiel:"),
        ([*LM, "loop.loss=my_losses:focal", "code.modules=[nowhere]"], "modules: code.modules: there is no folder"),
        ([*GRPO, "model.implementation=my_model:GatedAverage"], "implementation: model.implementation: the grpo loop"),
        ([*LM, "model.implementation=my_model:GatedAverage", "loop.text_samples.interval=5"], "implementation: model."),
    ],
)
def test_what_is_missing_or_wrong_is_found(overrides: list[str], said: str, folder: Path) -> None:
    for name in ("slipway/sub/my_loss.py", "lab/mine.py"):
        (folder.parent / name).parent.mkdir()
        (folder.parent / name).touch()
    found = words(*overrides)
    assert any(said in line for line in found), found


@pytest.mark.parametrize("run", ["core", "lm_eval", "code"])
def test_evaluations_that_are_shipped_need_no_modules(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_extensions, "find_spec", lambda name: None)
    given = "tasks: [arc_easy]" if run == "lm_eval" else "path: x"
    overrides = [*LM, f"loop.evaluations={{e: {{run: {run}, options: {{{given}}}}}}}"]
    assert references(config(*overrides)) == []
    missing = ["evaluation: loop.evaluations.e: the emulated workers use this machine's packages, which lack lm_eval: "]
    said = words(*overrides, "env.packages=image")
    assert [line.partition("pip install")[0] for line in said] == (missing if run == "lm_eval" else [])
    assert words(*overrides, "env.packages=lock") == []


@pytest.mark.parametrize(("text", "found"), [("jax==0.10\n", 1), ("jax==0.10\nlm_eval>=0.4.10\n", 0), ("", 0)])
def test_requirements_must_name_the_harness(tmp_path: Path, text: str, found: int) -> None:
    """An empty venv is filled by commands, which only the workers know."""
    (tmp_path / "own.txt").write_text(text)
    packages = ["env.packages=requirements", "env.requirements=own.txt"]
    made = config(*LM, "loop.evaluations={e: {run: lm_eval, options: {tasks: [a]}}}", *packages)
    plan = build_plan(made, "acme", tmp_path, CodeSnapshot(tmp_path, ("own.txt",)))
    said = [str(issue.message) for issue in input_extensions.lm_eval_is_installed.function(plan, context())]
    assert said == ["lm_eval is not in env.requirements; add it, or use env.packages=lock, which has it"] * found


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([*GRPO, r"loop.rewards={slipway.my_reward\:brief: 1.0}"], "are no packages; use my_reward:NAME"),
        ([*GRPO, "loop.environment.name=my_reward:brief"], "takes (response, answer)"),
        ([*GRPO, r"loop.rewards={trainer.rewards.nothing\:brief: 1.0}"], "trainer has no module rewards.nothing"),
        *(
            ([*LM, "optimizer=custom", f"optimizer.rule=optax:{name}"], "takes a learning_rate, so it is a whole")
            for name in ("adamw", "adam", "sgd", "lion")
        ),
        ([*LM, "optimizer=custom", "optimizer.rule=optax:addamm"], "defines no addamm; it defines "),
        ([*LM, "optimizer=custom", "optimizer.rule=optax:scale_by_adam", "optimizer.options={b3: 1}"], "takes (b1="),
    ],
)
def test_a_name_is_looked_for_where_the_workers_look(overrides: list[str], said: str) -> None:
    [found] = words(*overrides)
    assert said in found


def test_a_module_that_another_hides_is_found(folder: Path) -> None:
    (folder / "json.py").write_text("")
    said = words(*GRPO, r"loop.rewards={my_reward\:brief: 1.0}")
    assert len(said) == 1
    assert said[0].startswith("modules: code.modules: ")
    assert "json.py has a name of Python's standard library" in said[0]


def test_rules_of_ones_own_are_checks(folder: Path) -> None:
    (folder / "my_bad_checks.py").write_text(
        "import sys\ndef raises(config): raise KeyError('x')\ndef text(config): return ['no']\ndef none(): ...\n"
        "def three(config): return 3\n"
        "def ends(config): sys.exit(0)\ndef nothing(config): pass\ndef word(config): return 'no'\n"
    )
    own = ["program=command", "program.command=[python, -V]", "cloud.project=acme", "run.name=lm"]
    assert words(*own, "code.checks=[my_check:runs_have_owners]") == [
        "own_check: run.name: lm does not begin with its owner; use OWNER-lm",
        "own_check: budget.max_usd: our lab requires a budget; set it, e.g. 20",
    ]
    assert "own_check: code.checks: my_bad_checks:raises raised KeyError('x')" in words(
        *own, "code.checks=[my_bad_checks:raises]"
    )
    assert any(
        "must yield (key, message), not 'no'" in line for line in words(*own, "code.checks=[my_bad_checks:text]")
    )
    for reference, said in {"my_bad_checks:none": "takes ()", "nowhere:f": "no package nowhere is installed"}.items():
        [line] = words(*own, f"code.checks=[{reference}]")
        assert line.startswith(f"extension: code.checks: check {reference}")
        assert said in line
    for name, said in {
        "ends": "raised SystemExit(0)",
        "nothing": "must yield (key, message), and returned None",
        "word": "must yield (key, message), and returned 'no'",
        "three": "must yield (key, message), and returned 3",
    }.items():
        found = [line for line in words(*own, f"code.checks=[my_bad_checks:{name}]") if "my_bad_checks" in line]
        assert found == [f"own_check: code.checks: my_bad_checks:{name} {said}"]
    assert not [entry for entry in sys.path if entry == str(folder)]


QUESTIONS = ["data=verifiers", "model=tiny", "loop=grpo", "optimizer=adamw", "cloud=local"]
GAME = ["loop.environment.name=verifiers:my_game"]


def test_an_environment_of_verifiers_needs_its_data_and_the_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_image(*overrides: str) -> list[str]:
        return words(*QUESTIONS, *overrides, "env.packages=image")

    (folder / "my_game.py").write_text("def load_environment(rounds=3):\n    raise OSError\n")
    monkeypatch.setattr(input_extensions, "find_spec", lambda name: None)
    lacks = "verifiers: loop.environment.name: the emulated workers use this machine's packages, which lack verifiers: "
    assert on_image(*GAME) == [f"{lacks}pip install 'slipway-tpu[verifiers]'"]
    monkeypatch.setattr(input_extensions, "find_spec", lambda name: ModuleSpec(name, None, origin="/x/__init__.py"))
    assert on_image(*GAME, "loop.environment.options={rounds: 4}") == []
    (said,) = on_image(*GAME, "loop.environment.options={turns: 4}")
    assert "my_game:load_environment takes (rounds=" in said
    (said,) = words(*QUESTIONS, "data=arithmetic", GAME[0], "env.packages=image")
    assert said.endswith("an environment of verifiers asks the questions of its own data set; set data=verifiers")
    (said,) = on_image()
    assert "data=verifiers needs an environment of verifiers" in said
    (said,) = on_image("loop.environment.name=verifiers:her_game")
    assert "her_game" in said
    (folder / "my_tasks.py").write_text("__all__ = ['Mine']\nclass Mine: ...\n")
    assert on_image("loop.environment.name=verifiers:my_tasks") == []
    (folder / "v1" / "tasksets" / "hangman").mkdir(parents=True)
    library = ModuleSpec("verifiers", None, origin=str(folder / "__init__.py"))
    monkeypatch.setattr(input_extensions, "find_spec", lambda name: library)
    assert on_image("loop.environment.name=verifiers:hangman") == []
    (said,) = on_image("loop.environment.name=verifiers:chess")
    assert said.startswith("extension: loop.environment.name: environment chess:load_environment")
    assert "my_game" not in {*sys.modules}


@pytest.mark.parametrize(
    ("packages", "text", "said"),
    [
        ("lock", "jax==0.10.0", ["the lock has no verifiers; set env.packages=requirements"]),
        ("requirements", "my-verifiers==1", ["env.requirements lacks verifiers; write verifiers>=0.1.14,<0.5"]),
        ("requirements", "verifiers-monitor==1", ["env.requirements lacks verifiers; write verifiers>=0.1.14,<0.5"]),
        ("requirements", "jax\nverifiers==0.3.1", []),
        ("requirements", "jax\nverifiers[ta]==0.4.0 \\\n    --hash=sha256:00", []),
        ("requirements", "verifiers", []),
        (
            "requirements",
            "verifiers==0.5.1",
            ["verifiers==0.5.1 in env.requirements is unknown here; write verifiers>=0.1.14,<0.5"],
        ),
        ("image", "", []),
    ],
)
def test_verifiers_is_among_the_packages(packages: str, text: str, said: list[str], folder: Path) -> None:
    """An environment may be a package that the requirements name: its module is not looked for here."""
    (folder.parent / "own.txt").write_text(text)
    own = [f"env.packages={packages}", *(["env.requirements=own.txt"] if packages == "requirements" else [])]
    game = ["loop.environment.name=verifiers:her_game", "data=verifiers"]
    made = config(*QUESTIONS, *game, *own)
    plan = build_plan(made, "acme", folder.parent, CodeSnapshot(folder.parent, ("own.txt",)))
    found = [str(issue.message) for issue in input_extensions.verifiers_is_installed.function(plan, context())]
    assert found == said
    if packages == "requirements":
        assert words(*QUESTIONS, *game, *own) == []


LOCKED = (*GRPO, r"loop.rewards={mine\:close: 1.0}", "cloud=gcp", "cloud.project=acme", "env.packages=lock")
EMULATED = (*GRPO, r"loop.rewards={mine\:close: 1.0}")
CLOSE = "def close(response, answer, **columns):\n    return float(response == answer)\n"


def test_a_method_is_told_once(folder: Path) -> None:
    (folder / "mine.py").write_text(CLOSE.replace("(response", "(self, response"))
    [line] = words(*EMULATED)
    assert line.endswith("reward mine:close takes self, which is for methods; remove it")


@pytest.mark.parametrize(
    ("code", "overrides", "said"),
    [
        ("import nosuchpkg\n", EMULATED, "slipway/mine.py, line 1: imports nosuchpkg, and this machine has no such"),
        ("import json, nosuch.inner\n", LOCKED, "line 1: imports nosuch, and env.packages=lock does not install it;"),
        ("from pytest import raises\n", LOCKED, "line 1: imports pytest, and env.packages=lock does not install it;"),
        ("import helper\n", EMULATED, "helper.py, line 2: imports nosuchpkg, and this machine has"),
        (
            "import outside\n",
            EMULATED,
            "line 1: imports outside, and outside.py lies outside of code.modules; m",
        ),
        (
            "from parts.a import b\n",
            LOCKED,
            "imports parts, and parts/ lies outside of code.modules; move it",
        ),
        ("import numpyy\n", EMULATED, "imports numpyy, and this machine has no such package; did you mean numpy?"),
        ("import numpyy\n", LOCKED, "imports numpyy, and env.packages=lock does not install it; did you mean numpy?"),
        ("import helpr\n", EMULATED, "imports helpr, and this machine has no such package; did you mean helper?"),
        ("import __main__\n", EMULATED, ""),
        ("import yaml, jax.numpy as jnp, PIL, helper.x, os.path\nfrom helper import x\n", LOCKED, ""),
        ("try:\n    import nosuchpkg\nexcept ImportError:\n    pass\n", EMULATED, ""),
        ("import nosuchpkg\n", (*LOCKED[:-1], "env.packages=requirements", "env.requirements=r.txt"), ""),
    ],
)
def test_what_modules_import_is_on_the_workers(code: str, overrides: list[str], said: str, folder: Path) -> None:
    """Where the packages of the workers are known."""
    Path("outside.py").touch()
    Path("parts").mkdir()
    Path("parts/a.py").touch()
    Path("r.txt").write_text("whatever\n")
    (folder / "mine.py").write_text(code + CLOSE)
    if "helper.x" in code:
        (folder / "helper").mkdir()
        (folder / "helper" / "x.py").touch()
    else:
        (folder / "helper.py").write_text("import json\nimport nosuchpkg\n")
    found = [line for line in words(*overrides) if line.startswith("extension")]
    assert len(found) == bool(said), found
    assert said in "".join(found)


def test_the_names_of_the_locked_packages_are_those_by_which_they_are_imported() -> None:
    names = locked_packages()
    for top, packages in packages_distributions().items():
        if {package.replace("-", "_").lower() for package in packages} & (names - OTHER_NAMES) and top[0] != "_":
            assert {top, top.lower()} & names or top in ("isympy", "pkg_resources") or "/" in top, top
