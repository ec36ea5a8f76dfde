"""Programs that the model writes: how many compile, and how many pass their tests.

Each runs in a box of its own (trainer/sandbox), without network and without sight of this machine.
"""

import asyncio
import json
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from conf.extension import EvaluatedModel
from conf.formats import RunFileError
from trainer.corpus.rows import Row, read_rows
from trainer.rewards.pool import RewardPool, Submission
from trainer.sandbox.box import Box, Limits, RefusedError, why_not

PYTHON = "python"
"""In a command: this interpreter."""
MAX_FILE_BYTES, MAX_PROCESSES = 64 << 20, 64
CHECK, CALL = re.compile(r"^def check\(", re.MULTILINE), re.compile(r"\bcheck\(")
COMPILED, PASSED = 0.5, 1.0
"""Scores of a program; 0 is one that does not compile."""


def code(
    model: EvaluatedModel,
    *,
    path: str,
    max_new_tokens: int = 512,
    stop: Sequence[str] = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint("),
    file: str = "solution.py",
    compile: Sequence[str] = ("python", "-m", "py_compile", "solution.py"),
    command: Sequence[str] = ("python", "solution.py"),
    seconds: float = 10.0,
    workers: int = 4,
) -> dict[str, list[bool]]:
    """Return which problems' programs compile, and which pass.

    Args:
        model: the model, which continues each prompt greedily.
        path: JSON lines with `prompt` and `test`, and perhaps `entry_point`, as HumanEval has them: the program is the
            prompt, its continuation and the test, which is called with the entry point.
        max_new_tokens: maximum length of a continuation.
        stop: texts that end it, and are no part of it.
        file: name of the program's file.
        compile: words of the command that compiles it.
        command: words of the command that runs it; exit code 0 is a pass. `python` is this interpreter.
        seconds: CPU time of each command.
        workers: programs that run at the same time.
    """
    for program in (compile[0], command[0]):
        if "/" not in program and program != PYTHON and shutil.which(program) is None:
            raise FileNotFoundError(f"{program} is not installed on this worker; program.setup can install it")
    if reason := why_not():
        raise RefusedError(reason)
    problems = [_problem(row) for row in read_rows(path, "path")]
    prompts = [[*model.bos, *tokens] for tokens in model.encode([problem["prompt"] for problem in problems])]
    answers = model.generate(prompts, max_new_tokens, stop)
    how = json.dumps({"file": file, "commands": [list(compile), list(command)], "seconds": seconds})
    with RewardPool(workers, seconds) as pool:
        checks = [
            pool.submit([REWARD], Submission(_program(problem, answer), how))
            for problem, answer in zip(problems, answers, strict=True)
        ]
        scores = [check.result().scores[REWARD] for check in checks]
    return {"compiled": [s >= COMPILED for s in scores], "passed": [s >= PASSED for s in scores]}


def _problem(row: Row) -> dict[str, Any]:
    """Return the problem of a row. Raises RunFileError if it has no texts under `prompt` and `test`."""
    if not row.problem and not isinstance(row.value, dict):
        row = row._replace(problem="is not an object")
    missing = [name for name in ("prompt", "test") if not row.problem and not isinstance(row.value.get(name), str)]
    if row.problem or missing:
        raise RunFileError(f"path: {row.location} {row.problem or f'has no text under {missing[0]!r}'}")
    entry_point = row.value.get("entry_point")
    if entry_point is not None and not isinstance(entry_point, str):
        raise RunFileError(f"path: {row.location} has no text under 'entry_point', but {entry_point!r:.80}")
    if entry_point is None and CHECK.search(row.value["test"]) and len(CALL.findall(row.value["test"])) == 1:
        raise RunFileError(f"path: {row.location} defines check, which nothing calls: it has no 'entry_point'")
    return row.value


def compile_and_pass(response: str, answer: str) -> float:
    """Return how far a program comes. It runs in a process of rewards. answer: file, commands and seconds, as JSON."""
    return asyncio.run(_score(response, **json.loads(answer)))


async def _score(program: str, file: str, commands: Sequence[Sequence[str]], seconds: float) -> float:
    # a worker ends after 10 times the seconds and 30
    box = Box(Limits(seconds, 4 * seconds + 10, 4 << 30, MAX_FILE_BYTES, MAX_FILE_BYTES, MAX_PROCESSES))
    score = 0.0
    try:
        await box.start()
        await box.run(["sh", "-c", 'cat >"$0"', file], stdin=program.encode())
        for words, reached in zip(commands, (COMPILED, PASSED), strict=True):
            ended = await box.run([sys.executable if word == PYTHON else word for word in words])
            if ended.code:
                break
            score = reached
    finally:
        box.stop()
    return score


REWARD = f"{__name__}:{compile_and_pass.__name__}"


def _program(problem: dict[str, Any], answer: str) -> str:
    call = "" if problem.get("entry_point") is None else f"\ncheck({problem['entry_point']})"
    return f"{problem['prompt']}{answer}\n{problem['test']}{call}\n"
