"""CORE: the mean centred accuracy over 22 tasks of in-context learning (DCLM, https://arxiv.org/abs/2406.11794).

Tasks, shots and scoring are those of nanochat (https://github.com/karpathy/nanochat), whose `eval_bundle.zip` holds the
tasks: `core.yaml` lists them, `eval_meta_data.csv` has what guessing gives, `eval_data` the examples.
"""

import csv
import io
import math
import random
import zipfile
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import yaml
from etils import epath

from conf.extension import EvaluatedModel
from conf.json_lines import LineError, parse_json
from trainer.evaluation.statistics import Z_95

BUNDLE = "eval_bundle"
SHUFFLE_SEED, SHOTS_SEED = 1337, 1234
Example = Mapping[str, Any]


def core(model: EvaluatedModel, *, path: str, max_per_task: int | None = 500) -> dict[str, Any]:
    """Return the CORE metric and each task's accuracy.

    Args:
        model: the model.
        path: the bundle: eval_bundle.zip, or the folder that it holds.
        max_per_task: examples of each task, chosen as nanochat chooses them; None for all.
    """
    read = _open_bundle(path)
    chance = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(io.StringIO(read(METADATA)))}
    results, centred, variance = {}, [], 0.0
    tasks = yaml.safe_load(read(TASKS))["icl_tasks"]
    for task in tasks:
        examples = _examples(read, f"eval_data/{task['dataset_uri']}")
        random.Random(SHUFFLE_SEED).shuffle(examples)  # noqa: S311 - as nanochat does
        correct = grade(model, task, examples[:max_per_task])
        accuracy, guess = math.fsum(correct) / len(correct), 0.01 * chance[task["label"]]
        results[f"/{task['label']}"] = correct
        results[f"/{task['label']}_centered"] = (accuracy - guess) / (1 - guess)
        centred.append((accuracy - guess) / (1 - guess))
        variance += accuracy * (1 - accuracy) / len(correct) / (1 - guess) ** 2
    metric, error = math.fsum(centred) / len(centred), math.sqrt(variance) / len(centred)
    bounds = {"metric_low": metric - Z_95 * error, "metric_high": metric + Z_95 * error}
    return {"metric": metric, "metric_stderr": error, **bounds, **results}


def _examples(read: Callable[[str], str], name: str) -> list[Example]:
    """Return the rows of a file of the bundle. Raises ValueError naming a line that is none."""
    found = list[Example]()
    for number, line in enumerate(read(name).split("\n"), 1):
        try:
            found += [parse_json(line.encode())] if line.strip() else []
        except LineError as error:
            raise ValueError(f"{name}, line {number} {error}") from None
    return found


def grade(model: EvaluatedModel, task: Mapping[str, Any], examples: Sequence[Example]) -> list[bool]:
    """Return which examples of a task the model gets right."""
    kind, between = task["icl_task_type"], task.get("continuation_delimiter", " ")
    prompts = []
    for i, example in enumerate(examples):
        others = [*range(i), *range(i + 1, len(examples))]
        chosen = random.Random(SHOTS_SEED + i).sample(others, task["num_fewshot"][0])  # noqa: S311 - likewise
        shots = [examples[n] for n in chosen]
        prompts.append(PROMPTS[kind](example, shots, between))
    encoded = iter(model.encode([text for group in prompts for text in group]))
    rows = [[[model.prefix, *next(encoded)] for _ in group] for group in prompts]  # without a bos, nanochat takes eos
    spans = [_spans(kind, group) for group in rows]
    if kind == "language_modeling":  # the prompt without its continuation only says where that begins
        rows, spans = [group[1:] for group in rows], [group[1:] for group in spans]
    scored = iter(model.score([row for group in rows for row in group]))
    correct = []
    for example, group in zip(examples, spans, strict=True):
        options = [(logprobs[span], greedy[span]) for span, (logprobs, greedy) in zip(group, scored, strict=False)]
        if kind == "language_modeling":
            correct.append(bool(options[0][1].all()))
        else:
            means = [float(np.mean(logprobs)) if len(logprobs) else math.nan for logprobs, _ in options]
            known = [-math.inf if math.isnan(mean) else mean for mean in means]  # what it could not read is not chosen
            correct.append(known.index(max(known)) == example["gold"] and not math.isnan(means[example["gold"]]))
    return correct


def _spans(kind: str, group: Sequence[Sequence[int]]) -> list[slice]:
    """Return where the scored tokens of each row are among those that the row's other tokens predict."""
    if kind == "schema":  # the contexts differ, the end is shared
        shared = _common([row[::-1] for row in group])
        return [slice(len(row) - shared - 1, len(row) - 1) for row in group]
    shared = _common(group)
    return [slice(shared - 1, len(row) - 1) for row in group]


def _common(rows: Sequence[Sequence[int]]) -> int:
    """Return the length of the longest common prefix."""
    columns = zip(*rows, strict=False)
    return sum(1 for _ in takewhile(lambda column: len({*column}) == 1, columns))


def _multiple_choice(example: Example, shots: Sequence[Example], between: str) -> list[str]:
    head = "".join(f"{shot['query']}{between}{shot['choices'][shot['gold']]}\n\n" for shot in shots)
    return [f"{head}{example['query']}{between}{choice}" for choice in example["choices"]]


def _schema(example: Example, shots: Sequence[Example], between: str) -> list[str]:
    head = "".join(f"{s['context_options'][s['gold']]}{between}{s['continuation']}\n\n" for s in shots)
    return [f"{head}{context}{between}{example['continuation']}" for context in example["context_options"]]


def _language_modeling(example: Example, shots: Sequence[Example], between: str) -> list[str]:
    """Return the prompt without and with its continuation; a space between them belongs to the continuation."""
    head = "".join(f"{str(shot['context']).strip()}{between}{shot['continuation']}\n\n" for shot in shots)
    before = f"{head}{str(example['context']).strip()}{between}"
    return [before.strip(), f"{before}{example['continuation']}"]


PROMPTS: Mapping[str, Callable[[Example, Sequence[Example], str], list[str]]] = {
    "multiple_choice": _multiple_choice,
    "schema": _schema,
    "language_modeling": _language_modeling,
}
TASKS, METADATA = "core.yaml", "eval_meta_data.csv"


def _open_bundle(path: str) -> Callable[[str], str]:
    """Return a function that reads a file of the bundle. Raises FileNotFoundError."""
    place = epath.Path(path)
    if place.suffix == ".zip":
        archive = zipfile.ZipFile(io.BytesIO(place.read_bytes()))
        return lambda name: archive.read(f"{BUNDLE}/{name}").decode()
    folder = place if (place / TASKS).exists() else place / BUNDLE
    return lambda name: (folder / name).read_text()
