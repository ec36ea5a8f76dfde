"""The examples of docs/extend.md train: their folder is outside the repository, as the shipped modules are."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conf.formats import IMPORTS_VARIABLE, RunFileError
from conf.schema.training.data import ArithmeticData, CustomDocuments, CustomQuestions
from conf.schema.training.loop import GrpoLoop
from conf.schema.training.loop_parts import Environment
from conf.schema.training.run_yaml import RunFile
from tests.groups import load_group
from tests.paths import ROOT
from tests.trainer.lives import changed, lines_of, train
from trainer import extension
from trainer.data.prompting import Problem, PromptEncoder
from trainer.data.questions import QuestionSet
from trainer.data.streams import open_source
from trainer.environments.pool import EnvironmentPool
from trainer.loops import load_loop
from trainer.losses.policy import load_loss

EXAMPLES = ROOT / "docs" / "extend"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the examples, found as on a worker."""
    folder = tmp_path / "modules"
    shutil.copytree(EXAMPLES, folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    extension.add_modules(folder)
    yield folder
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]
    extension.model_family.cache_clear()


def test_grpo_with_data_prompt_reward_loss_evaluation_and_rule_of_ones_own(
    grpo_run: Any, modules: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (modules / "my_questions.py").open("a") as file:
        file.write("\n\ndef some_bad(path):\n    yield {'question': None}\n    yield from products(path)\n")
    prompt = load_group("data/questions")["prompt"] | {"formatter": "my_prompt:terse"}
    own = {"loss_type": "my_losses:cispo", "loss_options": {"cap": 1.5}, "max_prompt_length": 60}
    own |= {"rewards": {"my_reward:brief": 1.0, "my_reward:concise": 0.1}, "warm_start_steps": 0, "eval_prompts": 8}
    counting = {"run": "my_evaluation:counting", "options": {"upto": 8}, "interval": "end"}
    own |= {"evaluations": {"style": "my_evaluation:style", "counting": counting}, "test_samples_per_prompt": None}
    rule = {"rule": "my_optimizer:signs", "options": {"b1": 0.5}, "lr": 1e-3}
    data = load_group("data/questions") | {"source": "my_questions:some_bad", "prompt": prompt, "on_bad_line": "skip"}
    raw = changed(grpo_run, data=data, loop=own) | {"optimizer": load_group("optimizer/custom") | rule}
    lines = train(raw, tmp_path / "run")
    evaluated = next(line for line in lines if line.get("evaluation") == "style")
    assert evaluated["eval_style_characters"] > 0
    assert 0 <= evaluated["eval_style_empty"] <= 1
    trained = [line for line in lines if line["phase"] == "grpo"]
    assert len(trained) == 4
    assert all(line["loss"] is not None for line in trained)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval_style_characters"] > 0
    assert summary["eval_counting_successor_low"] <= summary["eval_counting_successor"]
    assert summary["bad_lines"] == 2  # in path and in eval_path
    skipped = "2 rows are skipped (data.on_bad_line); the first: my_questions:some_bad, row 0 of train has no text in"
    assert skipped in capfd.readouterr().out
    told = lines_of(tmp_path / "run", "transcripts.jsonl")[0]
    assert told["prompt"].startswith("Q: ")
    assert told["prompt"].endswith("Give only the result, after ####.\nA: ")


@pytest.mark.usefixtures("modules")
def test_grpo_with_a_loss_class_of_ones_own(grpo_run: Any) -> None:
    """It is loaded from a folder outside the repository; its formula is tested in losses/test_policy.py."""
    own = {"loss_type": "my_policy_loss:Sapo", "loss_options": {"tau_neg": 2.0}}
    made = load_loss(GrpoLoop(**grpo_run["loop"] | own))
    assert (type(made).__name__, made.tau_pos, made.tau_neg) == ("Sapo", 1.0, 2.0)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RunFileError, match=r"takes \(loop, \*, tau_pos"):
        load_loss(GrpoLoop(**grpo_run["loop"] | own | {"loss_options": {"tau": 1}}))


@pytest.mark.usefixtures("modules")
def test_grpo_with_an_environment_of_ones_own() -> None:
    own = {"name": "my_environment:HigherLower", "options": {"bonus": 1.0}, "timeout_seconds": 60.0}
    with EnvironmentPool(Environment(**load_group("loop/grpo")["environment"] | own)) as pool:
        said = [
            pool.submit("", 0, {"answer": "7"}, ["9", "seven", "7"][:turns], final=False).result() for turns in range(4)
        ]
    assert [step.text for step in said] == [" Guess it: ", "\nlower\n", "\nhigher\n", "\nyes\n"]
    assert [step.done for step in said] == [False, False, False, True]
    assert said[-1].reward == pytest.approx(1 + 1 / 3)
    assert said[-1].metrics == {"guesses": 3}


@pytest.mark.usefixtures("modules")
def test_language_models_with_data_loss_and_model_of_ones_own(lm_run: Any, tmp_path: Path) -> None:
    data = load_group("data/documents") | {"source": "my_documents:counting", "options": {"size": 40}}
    own = {"loss": "my_losses:focal", "loss_options": {"gamma": 1.0}, "steps": 12}
    own |= {"evaluations": {"counting": "my_evaluation:counting"}}
    model = {"implementation": "my_model:GatedAverage", "vocab_size": 260}
    raw = changed(lm_run, data=data | {"eval_fraction": 0.2, "packing": "documents"}, model=model, loop=own)
    written = train(raw, tmp_path / "run")
    assert [line["step"] for line in written if "eval_counting_successor" in line] == [4, 8, 12]
    lines = [line for line in written if line["phase"] == "train"]
    assert all(line["loss"] < line["lm_loss"] for line in lines)  # a focal weight is below 1
    assert lines[-1]["lm_loss"] < lines[0]["lm_loss"]


@pytest.mark.usefixtures("modules")
def test_a_loop_of_ones_own_trains_and_resumes(lm_run: Any, tmp_path: Path) -> None:
    raw = lm_run | {"loop": load_group("loop/custom") | {"run": "my_loop:fit_line", "options": {"slope": 3.0}}}
    raw |= {"optimizer": lm_run["optimizer"] | {"lr": 0.01}, "checkpoint": lm_run["checkpoint"] | {"save_interval": 5}}
    train(raw | {"loop": raw["loop"] | {"steps": 5}}, tmp_path / "run")
    lines = train(raw | {"loop": raw["loop"] | {"steps": 60}}, tmp_path / "run")
    assert [line["step"] for line in lines] == [*range(1, 61)]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["slope"] == pytest.approx(3.0, abs=0.01)


def test_what_a_module_returns_is_checked(modules: Path) -> None:
    (modules / "my_wrong.py").write_text(
        "def rows(path): return [{'question': 'a', 'answer': None}]\n"
        "def none(path): return []\n"
        "def nothing(path): pass\n"
        "def worded(question): return [question]\n"
        "def texts(path): return (text for text in 'abc')\n"
        "def numbers(path): return [1, 2, 3]\n"
        "class Empty: pass\n"
    )

    def questions(name: str) -> None:
        data = CustomQuestions(**load_group("data/questions") | {"source": f"my_wrong:{name}"})
        QuestionSet(data, GrpoLoop(**load_group("loop/grpo")), seed=0)

    def prompts(name: str) -> None:
        group = load_group("data/arithmetic")
        wording = group["prompt"] | {"formatter": f"my_wrong:{name}"}
        PromptEncoder(ArithmeticData(**group | {"prompt": wording})).encode([Problem("a", "", "")])

    def documents(name: str) -> None:
        data = CustomDocuments(**load_group("data/documents") | {"source": f"my_wrong:{name}"})
        open_source(data, data.path, "data.path").read(0).take([0])

    for call, name, message in (
        (questions, "rows", r"data\.source: my_wrong:rows, row 0 of train has no text in column 'answer', but null"),
        (questions, "none", r"data\.path: my_wrong:none has no question for train"),
        (questions, "nothing", r"data\.source: my_wrong:nothing must return rows, not None"),
        (prompts, "worded", r"data\.prompt\.formatter: my_wrong:worded must return text, not \['a'\]"),
        (documents, "texts", r"data\.source: my_wrong:texts must return a sequence, with len and indexing, not gen"),
        (documents, "none", r"data\.source: my_wrong:none has no text for data\.path=train"),
        (documents, "numbers", r"data\.source: my_wrong:numbers\[0\] is no text, but int"),
        (extension.model_family, "Empty", "model family my_wrong:Empty has no method weights"),
    ):
        with pytest.raises(RunFileError, match=message):
            call(name if call is not extension.model_family else f"my_wrong:{name}")


@pytest.mark.usefixtures("modules")
def test_a_loop_that_is_not_there_is_named_and_fit_does_not_know_the_programs_of_another(lm_run: Any) -> None:
    raw = lm_run | {"model": lm_run["model"] | {"remat": "auto"}, "loop": load_group("loop/custom")}
    own = RunFile.model_validate(raw | {"loop": raw["loop"] | {"run": "my_loop:fit_line"}})
    with pytest.raises(RunFileError, match=r"loop\.run: what a loop of your own compiles is not known"):
        load_loop(own.loop).programs(None, None)
    absent = RunFile.model_validate(raw | {"loop": raw["loop"] | {"run": "nowhere:run"}})
    with pytest.raises(RunFileError, match=r"loop\.run: loop nowhere:run: cannot import nowhere: ModuleNotFoundError"):
        load_loop(absent.loop)


def test_on_a_laptop_only_what_a_trusted_record_names_is_imported(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (modules / "my_canary.py").write_text("raise SystemExit('imported')\n")
    for allowed in ("", "my_prompt:terse", "my_canary", "my_canary:Other,my_canary:fn:x"):
        monkeypatch.setenv(IMPORTS_VARIABLE, allowed)
        for kind, key in (("reward", "loop.rewards"), ("prompt", "data.prompt.formatter"), ("loop", "loop.run")):
            with pytest.raises(RunFileError, match=f"^{key}: my_canary:fn is not imported: "):
                extension.load_extension(kind, "my_canary:fn", key)
        with pytest.raises(RunFileError, match="is not imported"):
            extension.model_family("my_canary:fn")
    monkeypatch.setenv(IMPORTS_VARIABLE, "my_other:x,my_prompt:terse")
    assert callable(extension.load_extension("prompt", "my_prompt:terse", "data.prompt.formatter"))
