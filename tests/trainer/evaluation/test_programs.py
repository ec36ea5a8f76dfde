"""Programs that a model writes: compiled and run under limits, in processes of rewards."""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trainer.evaluation import programs

TEST = "def check(f):\n    assert f(2) == 4\n    assert f(-3) == 9"
ENDLESS = "    while True: pass\n"
BODIES = {
    "right": ("    return x * x\n", 1.0),
    "wrong": ("    return x + x\n", 0.5),
    "broken": ("    return x *\n", 0.0),
    "endless": (ENDLESS, 0.5),
    "big": ("    open('big', 'wb').write(bytes(70 << 20)); return x * x\n", 0.5),
}


class Author:
    """A model that writes these bodies, in order."""

    step, max_seq_len, bos, eos = 0, 4096, (257,), None

    def __init__(self, bodies: Sequence[str]) -> None:
        self.bodies, self.asked = bodies, list[dict[str, Any]]()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()

    def score(self, rows: Any) -> Any:
        raise AssertionError("nothing is scored")

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: Sequence[str]) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.asked = [{"prompt": bytes(prompt[1:]).decode(), "most": max_new_tokens} for prompt in prompts]
        return list(self.bodies)


def test_programs_compile_and_pass_as_they_should(tmp_path: Path) -> None:
    problem = {"prompt": "def square(x):\n", "test": TEST, "entry_point": "square"}
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(problem) + "\n" for _ in BODIES))
    author = Author([body for body, _ in BODIES.values()])
    found = programs.code(author, path=str(file), max_new_tokens=9, seconds=0.5, workers=2)  # pyright: ignore[reportArgumentType]
    assert author.asked == [{"prompt": "def square(x):\n", "most": 9}] * len(BODIES)
    scores = [score for _, score in BODIES.values()]
    assert found == {"compiled": [s >= 0.5 for s in scores], "passed": [s == 1.0 for s in scores]}


def run(text: str, seconds: float = 60.0) -> float:
    how = {"file": "solution.py", "commands": [["true"], ["python", "solution.py"]], "seconds": seconds}
    return programs.compile_and_pass(text, json.dumps(how))


def test_a_program_sees_an_empty_folder_and_nothing_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run("import os\nassert os.listdir() == ['solution.py']\nassert 'HF_TOKEN' not in os.environ") == 1.0


@pytest.mark.skipif(not programs._isolation(), reason="the kernel gives ordinary users no namespaces")
def test_a_program_has_no_network_and_leaves_nothing_running(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    assert run("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)") == 0.5
    assert run("import os\nassert sum(name.isdigit() for name in os.listdir('/proc')) < 4") == 1.0
    later = f"import subprocess\nsubprocess.Popen(['sh', '-c', 'sleep 1; touch {mark}'], start_new_session=True)"
    assert run(later) == 1.0
    time.sleep(1.5)
    assert not mark.exists()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_other_languages_are_commands(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps({"prompt": "int f(int x) {", "test": "int main() { return f(3) != 9; }"}) + "\n")
    how: dict[str, Any] = {"file": "a.c", "compile": ["cc", "-o", "a", "a.c"], "command": ["./a"], "path": str(file)}
    assert programs.code(Author(["return x * x; }"]), **how) == {"compiled": [True], "passed": [True]}  # pyright: ignore[reportArgumentType]
    assert programs.code(Author(["return x; }"]), **how) == {"compiled": [True], "passed": [False]}  # pyright: ignore[reportArgumentType]
    assert programs.code(Author(["return y; }"]), **how) == {"compiled": [False], "passed": [False]}  # pyright: ignore[reportArgumentType]
