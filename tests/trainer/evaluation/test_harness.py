"""The model as an LM of lm-evaluation-harness: requests and results; and the real library, where it is installed."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from trainer.evaluation import harness

TASK = {"dataset_path": "json", "test_split": "test"}
TASK |= {"dataset_kwargs": {"data_files": {"test": "{folder}/colours.jsonl"}}}
CHOICES = {"task": "colours", "output_type": "multiple_choice", "doc_to_text": "The {{thing}} is"}
CHOICES |= {"doc_to_choice": ["red", "blue"], "doc_to_target": "label"}
GENERATE = {"task": "copies", "output_type": "generate_until", "doc_to_text": "Copy: {{thing}}="}
GENERATE |= {"doc_to_target": "{{thing}}", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 7}}


class ByteModel:
    """Prefers the byte r to b, and repeats what stands between the last space and the equals sign."""

    step, max_seq_len, bos, eos, prefix = 0, 512, (257,), 258, 257

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()

    def score(self, rows: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        self.rows = rows
        costs = [np.array([-1.0 if token == ord("r") else -2.0 for token in row[1:]], np.float32) for row in rows]
        return [(cost, cost == -1) for cost in costs]

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: Sequence[str] = (), temperature: float = 0.0
    ) -> list[str]:
        self.asked = (len(prompts), max_new_tokens, list(stop), temperature)
        return [bytes(prompt[1:]).decode().split(" ")[-1].rstrip("=")[:max_new_tokens] for prompt in prompts]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    for task, metric in ((CHOICES, "acc"), (GENERATE, "exact_match")):
        metrics = [{"metric": metric, "aggregation": "mean", "higher_is_better": True}]
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(TASK | task | {"metric_list": metrics}))
    things = {"rose": 0, "sky": 1, "poppy": 0, "submarine": 1}
    rows = [{"thing": thing, "label": label} for thing, label in things.items()]
    (folder / "colours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_library_evaluates_the_model(tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four things two are red, and of four one is too long to be copied in 7 tokens."""
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    pytest.importorskip("lm_eval")
    found = harness.lm_eval(ByteModel(), tasks=["colours", "copies"], path=str(tasks), bootstrap_iters=10)
    assert found["colours_acc"] == 0.5
    assert found["colours_acc_stderr"] == pytest.approx(math.sqrt(0.25 / 3))
    assert found["colours_acc_low"] == pytest.approx(0.5 - 1.96 * found["colours_acc_stderr"], abs=1e-4)
    assert found["copies_exact_match"] == 0.75


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A library that records how it is called and returns results of a group with a subtask."""
    called: dict[str, Any] = {}

    def simple_evaluate(model: Any, **options: Any) -> dict[str, Any]:
        called.update(options, model=model)
        text = [file.read_text() for file in sorted(Path(options["task_manager"].include_path).glob("*.yaml"))]
        called["texts"] = text
        plain = {"alias": "x", "acc,none": 0.5, "acc_stderr,none": 0.1, "exact_match,strict-match": 0.25}
        sure = {"acc,none": 1.0, "acc_stderr,none": 0.0, "mean,none": 7.0, "mean_stderr,none": 0.0}
        results = {"mmlu": plain, "mmlu_law": {"acc,none": 1.0, "acc_stderr,none": "N/A"}, "sure": sure}
        return {"results": results, "n-samples": {"sure": {"original": 90, "effective": 20}}}

    managers = SimpleNamespace(TaskManager=lambda include_path: SimpleNamespace(include_path=include_path))
    modules: dict[str, Any] = {
        "lm_eval": SimpleNamespace(simple_evaluate=simple_evaluate),
        "lm_eval.tasks": managers,
        "lm_eval.api.model": SimpleNamespace(TemplateLM=object),
        "lm_eval.utils": SimpleNamespace(
            get_rolling_token_windows=lambda tokens, prefix, most, _: [([prefix, *tokens[:-1]], tokens)],
            make_disjoint_window=lambda pair: (pair[0][:1], pair[1]),
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return called


def test_results_are_metrics_and_subtasks_only_curves(library: dict[str, Any], tasks: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none is no folder of tasks"):
        harness.lm_eval(ByteModel(), tasks=["mmlu"], path=str(tasks / "none"))
    found = harness.lm_eval(ByteModel(), tasks=["mmlu"], path=str(tasks), limit=3, num_fewshot=2)
    assert (found.pop("/sure_acc_low"), found.pop("/sure_acc_high")) == pytest.approx((1 - 0.1611, 1), abs=1e-4)
    assert found.pop("/sure_mean_low") == found.pop("/sure_mean_high") == 7  # no share
    assert {name: found.pop(name) for name in [*found] if name.startswith("/sure")} == {
        "/sure_acc": 1, "/sure_acc_stderr": 0, "/sure_mean": 7, "/sure_mean_stderr": 0
    }  # fmt: skip
    assert found == {
        "mmlu_acc": 0.5,
        "mmlu_acc_low": pytest.approx(0.304, abs=1e-3),
        "mmlu_acc_high": pytest.approx(0.696, abs=1e-3),
        "mmlu_acc_stderr": 0.1,
        "mmlu_exact_match_strict_match": 0.25,
        "/mmlu_law_acc": 1.0,
    }
    assert (library["limit"], library["num_fewshot"], library["tasks"]) == (3, 2, ["mmlu"])
    assert "{folder}" not in library["texts"][0]
    assert "/colours.jsonl" in library["texts"][0]


@pytest.mark.usefixtures("library")
def test_requests_are_scored_and_continued(tasks: Path) -> None:
    assert isinstance(sys.modules["lm_eval"], SimpleNamespace | ModuleType)
    model = ByteModel()
    lm = harness._language_model(model)
    assert lm.tok_encode("ab") == [257, 97, 98]
    assert lm.tok_encode("ab", add_special_tokens=False) == [97, 98]
    assert (lm.eot_token_id, lm.prefix_token_id) == (258, 257)
    scored = lm._loglikelihood_tokens([(None, [257, 97], [114, 114]), (None, [257], [97, 114, 98])])
    assert scored == [(-2.0, True), (-5.0, False)]
    assert lm.loglikelihood_rolling([SimpleNamespace(args=("rar",))]) == [-4.0]
    greedy, drawn = {"until": "\n", "max_gen_toks": 3}, {"until": ["."], "do_sample": True, "temperature": 0.7}
    wanted = [SimpleNamespace(args=(text, how)) for text, how in (("a bc=", greedy), ("a d", drawn), ("x y=", greedy))]
    assert lm.generate_until(wanted) == ["bc", "d", "y"]
    assert model.asked == (1, 256, ["."], 0.7)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("bos", "prefix", "context", "asked", "row"),
    [
        ((257,), 257, [257, 97], [114], [257, 97, 114]),
        ((), 258, [97], [114], [97, 114]),  # without a bos nothing stands before a context
        ((), 258, [], [114, 98], [258, 114, 98]),  # as of white space alone
        ((257,), 257, [], [114], [257, 114]),
    ],
)
def test_a_context_begins_with_bos_if_there_is_one_and_an_empty_one_with_eos(bos, prefix, context, asked, row) -> None:
    model: Any = ByteModel()
    model.bos, model.prefix = bos, prefix
    lm = harness._language_model(model)
    assert lm.tok_encode("ab") == [*bos, 97, 98]
    assert (lm.prefix_token_id, lm.eot_token_id) == (prefix, 258)
    [(total, _)] = lm._loglikelihood_tokens([(None, context, asked)])
    assert model.rows == [row]
    assert total == sum(-1.0 if token == ord("r") else -2.0 for token in asked)  # every token of the answer counts
    lm.loglikelihood_rolling([SimpleNamespace(args=("rar",))])
    assert model.rows == [[prefix, 114, 97, 114]]


@pytest.mark.usefixtures("library")
def test_an_answer_that_the_model_cannot_read_is_refused() -> None:
    lm = harness._language_model(ByteModel())
    assert lm._loglikelihood_tokens([(None, [97] * 600, [114] * 511)]) == [(-511.0, True)]
    with pytest.raises(ValueError, match=r"model\.max_seq_len: 512 has no room for an answer of 512 tokens"):
        lm._loglikelihood_tokens([(None, [97], [114] * 512)])


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"max_new_tokens": 7}, 7),
        ({"max_tokens": 7, "temperature": 0}, 7),
        ({"max_gen_toks": 7, "max_new_tokens": 7}, 7),
        ({"max_gen_toks": 7, "max_new_tokens": 9}, "several lengths"),
        ({"max_length": 7}, "max_length=7"),
        ({"min_new_tokens": 7}, "min_new_tokens=7"),
        ({"num_beams": 4}, "num_beams=4 has no effect here; null takes back a task's$"),
        ({"num_beams": None}, 256),
        ({"do_sample": False, "top_p": 0.95}, 256),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.95}, "top_p=0.95"),
        ({"do_sample": True, "temperature": 0.7, "top_p": 1, "top_k": None}, 256),
    ],
)
def test_a_setting_of_generation_is_kept_or_refused(given: dict[str, Any], asked: int | str) -> None:
    model = ByteModel()
    lm, wanted = harness._language_model(model), [SimpleNamespace(args=("a b", {"until": ["."]} | given))]
    if isinstance(asked, str):
        with pytest.raises(ValueError, match=f"^gen_kwargs: .*{asked}"):
            lm.generate_until(wanted)
    else:
        lm.generate_until(wanted)
        assert model.asked[1] == asked
