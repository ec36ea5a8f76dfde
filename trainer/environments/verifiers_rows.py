"""The questions of environments of the library verifiers: the rows of their own data sets, for data=verifiers.

They are read in a process of their own, since the library replaces signal handlers of its process.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conf.formats import RunFileError
from conf.schema.training.loop_parts import VERIFIERS
from trainer.environments.verifiers_env import COLUMN, as_turns, check_installed, load_environment
from trainer.extension import add_modules

SPLITS = ("train", "test")


def questions(path: str, *, environment: str, options: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the environment's training set if path is train, its evaluation set if path is test.

    environment, options: those of `loop.environment`. Raises RunFileError if it cannot be loaded.
    """
    module = environment.removeprefix(VERIFIERS)
    if path not in SPLITS:
        raise RunFileError(f"data.path: the data sets of verifiers are {' and '.join(SPLITS)}, not {path}")
    check_installed(module)
    words = (sys.executable, "-m", __name__, module, json.dumps(dict(options or {})), path)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(words, stdout=subprocess.PIPE, env=env, text=True, encoding="utf-8", check=False)
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    if not rows or ended.returncode or "error" in rows[-1]:
        told = rows[-1].get("error") if rows else f"its process ended with code {ended.returncode}"
        raise RunFileError(f"loop.environment.name: the data set of {module} cannot be read: {told}")
    yield from rows


def to_question(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of `data.source`. Its question is shown and measured; the episode begins with the whole prompt."""
    prompt = row["prompt"]
    turns = [("user", prompt)] if isinstance(prompt, str) else as_turns(prompt)
    answer, question = row.get("answer"), "\n".join(text for _, text in turns)
    is_missing = answer is None or (isinstance(answer, float) and math.isnan(answer))  # the environment may know it
    found = {"question": question, "answer": "" if is_missing else str(answer)}
    if isinstance(row.get("solution"), str):
        found["solution"] = row["solution"]
    return found | {COLUMN: json.dumps(row, default=str)}


def main(words: Sequence[str]) -> int:
    """Write the rows to standard output as JSON lines, or an error. words: module, options as JSON, and split."""
    module, options, split = words
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the environment prints is no row
    add_modules()
    try:
        environment = load_environment(module, json.loads(options))
        if split == "test" and environment.build_eval_dataset() is None:
            print(f"{module} has no evaluation set; its training set is tested", file=sys.stderr)
        rows = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
        for row in rows:
            lines.write(json.dumps(to_question(row)) + "\n")
    except Exception as error:
        lines.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}) + "\n")
        return 1
    finally:
        lines.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
