"""Tasks of lm-evaluation-harness, by its own library: https://github.com/EleutherAI/lm-evaluation-harness.

The package `lm_eval` is imported only when an evaluation names it.
"""

import json
import re
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from conf.extension import EvaluatedModel
from trainer.evaluation.statistics import Z_95, wilson_interval

DEFAULT_NEW_TOKENS = 256
"""The library's default."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks and `gen_kwargs` have for the longest answer."""
WITHOUT_EFFECT = {
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
}
"""Settings of generation that the model's sampler has not, with the values that change nothing."""
SAMPLED = ("top_p", "top_k", "min_p")
"""Those that mean something only where an answer is drawn."""
PLACE = "{folder}"
"""Stands for the folder of a task's YAML file, e.g. in `data_files: {folder}/questions.jsonl`."""


def lm_eval(
    model: EvaluatedModel,
    *,
    tasks: Sequence[str],
    path: str | None = None,
    num_fewshot: int | None = None,
    limit: float | None = None,
    gen_kwargs: dict[str, Any] | None = None,
    bootstrap_iters: int = 1000,
) -> dict[str, float]:
    """Return every metric of these tasks, with its standard error and interval.

    Args:
        model: the model.
        tasks: names of tasks, groups or tags.
        path: folder with YAML files of your own tasks.
        num_fewshot: shots, in place of the tasks' own.
        limit: examples of each task, or a fraction of them.
        gen_kwargs: settings of generation, in place of the tasks' own.
        bootstrap_iters: resamplings for standard errors that have no formula.
    """
    library, managers = import_module("lm_eval"), import_module("lm_eval.tasks")
    with tempfile.TemporaryDirectory() as folder:
        if path is not None:
            if not (place := epath.Path(path)).is_dir():
                raise FileNotFoundError(f"{path} is no folder of tasks")
            _copy(place, Path(folder))
        found = library.simple_evaluate(
            _language_model(model),
            tasks=list(tasks),
            task_manager=managers.TaskManager(include_path=folder if path is not None else None),
            num_fewshot=num_fewshot,
            limit=limit,
            gen_kwargs=gen_kwargs,
            bootstrap_iters=bootstrap_iters,
            log_samples=False,
        )
    metrics: dict[str, float] = {}
    for task, values in {**found["results"], **found.get("groups", {})}.items():
        asked = found.get("n-samples", {}).get(task, {}).get("effective", 0)
        metrics |= _metrics(task if task in tasks else f"/{task}", values, asked)
    return metrics


def _metrics(task: str, values: dict[str, Any], asked: int) -> dict[str, float]:
    """Return the metrics of a task. values: by `metric,filter`, where the filter may be `none`; asked: its examples."""
    metrics = {}
    for name, value in values.items():
        metric, comma, kind = name.partition(",")
        error = values.get(f"{metric}_stderr,{kind}")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        key = f"{task}_{re.sub('[^a-z0-9]+', '_', metric.lower() + (f' {kind}' if kind != 'none' else ''))}"
        metrics[key] = float(value)
        if isinstance(error, int | float):
            low, high = value - Z_95 * error, value + Z_95 * error
            if error == 0 and asked and 0 <= value <= 1:  # all examples alike, which is no certainty
                low, high = wilson_interval(value * asked, asked)
            bounds = {"_low": low, "_high": high, "_stderr": error}
            metrics |= {key + end: float(bound) for end, bound in bounds.items()}
    return metrics


def _copy(source: epath.Path, target: Path) -> None:
    """Copy a folder of tasks, which may be in a bucket, and fill in its place."""
    for file in source.iterdir():
        if file.is_dir():
            (target / file.name).mkdir()
            _copy(file, target / file.name)
        else:
            content = file.read_bytes()
            if file.suffix in (".yaml", ".yml"):
                content = content.replace(PLACE.encode(), str(target).encode())
            (target / file.name).write_bytes(content)


def _longest_answer(given: dict[str, Any], *, is_drawn: bool) -> int:
    """Return the tokens of the longest answer. Raises ValueError if settings would be left out, or contradict."""
    lengths = {name: int(given[name]) for name in LENGTHS if given.get(name) is not None}
    if len({*lengths.values()}) > 1:
        raise ValueError(f"gen_kwargs: {lengths} are several lengths; set max_gen_toks, as the task does")
    for name, value in given.items():
        is_other_length = name.startswith(("max_", "min_")) and name not in (*LENGTHS, "min_p")
        plain = WITHOUT_EFFECT.get(name, value) if is_drawn or name not in SAMPLED else value
        if value is not None and (is_other_length or value != plain):
            raise ValueError(f"gen_kwargs: {name}={value} has no effect here; null takes back a task's")
    return next(iter(lengths.values()), DEFAULT_NEW_TOKENS)


def _language_model(model: EvaluatedModel) -> Any:
    """Return the model as the library's LM. The class is made here because its base is in the library."""
    base: Any = import_module("lm_eval.api.model").TemplateLM
    utils = import_module("lm_eval.utils")

    class LanguageModel(base):
        eot_token_id = model.prefix if model.eos is None else model.eos
        prefix_token_id = model.prefix

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            begin = () if add_special_tokens is False else model.bos
            return [*begin, *model.encode([string])[0]]

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            scored = model.score([[*(context or [model.prefix]), *asked] for _, context, asked in requests])
            spans = [max(1, len(asked)) for _, _, asked in requests]
            if (longest := max(spans, default=0)) >= model.max_seq_len:
                raise ValueError(
                    f"model.max_seq_len: {model.max_seq_len} has no room for an answer of {longest} tokens"
                )
            return [
                (float(np.sum(logprobs[-n:])), bool(greedy[-n:].all()))
                for n, (logprobs, greedy) in zip(spans, scored, strict=True)
            ]

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            del disable_tqdm
            totals = []
            for request in requests:
                tokens = model.encode([request.args[0]])[0]
                windows = utils.get_rolling_token_windows(tokens, self.prefix_token_id, model.max_seq_len - 1, 1)
                pairs = [(None, *utils.make_disjoint_window(pair)) for pair in windows]
                totals.append(sum(total for total, _ in self._loglikelihood_tokens(pairs)))
            return totals

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            del disable_tqdm
            texts: list[str] = [""] * len(requests)
            alike: dict[str, list[int]] = {}
            for i, request in enumerate(requests):
                alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
            for numbers in alike.values():
                given = requests[numbers[0]].args[1]
                until = given.get("until") or []
                temperature = float(given.get("temperature", 0.0)) if given.get("do_sample") else 0.0
                made = model.generate(
                    [self.tok_encode(requests[i].args[0]) for i in numbers],
                    _longest_answer(given, is_drawn=temperature > 0),
                    [until] if isinstance(until, str) else until,
                    temperature,
                )
                for i, text in zip(numbers, made, strict=True):
                    texts[i] = text
            return texts

    return LanguageModel()
