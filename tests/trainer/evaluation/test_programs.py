"""Programs that a model writes: compiled and run under limits, in processes of rewards."""

import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conf.formats import RunFileError
from tests.groups import load_yaml
from tests.paths import ROOT
from tests.trainer.evaluation.test_harness import ByteModel
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


class Author(ByteModel):
    """A model that writes these bodies, in order."""

    def __init__(self, bodies: Sequence[str]) -> None:
        self.bodies, self.prompts = bodies, list[dict[str, Any]]()

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: Sequence[str]) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.prompts = [{"prompt": bytes(prompt[1:]).decode(), "most": max_new_tokens} for prompt in prompts]
        return list(self.bodies)


def test_programs_compile_and_pass_as_they_should_if_their_compiler_is_there(tmp_path: Path) -> None:
    problem = {"prompt": "def square(x):\n", "test": TEST, "entry_point": "square"}
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(problem) + "\n" for _ in BODIES))
    author = Author([body for body, _ in BODIES.values()])
    found = programs.code(author, path=str(file), max_new_tokens=9, seconds=0.5, workers=2)  # pyright: ignore[reportArgumentType]
    assert author.prompts == [{"prompt": "def square(x):\n", "most": 9}] * len(BODIES)
    scores = [score for _, score in BODIES.values()]
    assert found == {"compiled": [s >= 0.5 for s in scores], "passed": [s == 1.0 for s in scores]}
    for how in ({"compile": ["g--"]}, {"command": ["g--"]}):
        with pytest.raises(FileNotFoundError, match=r"^g-- is not installed on this worker; program\.setup"):
            programs.code(author, path=str(file), **how)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', "is not JSON"),
        ("[1]", "is not an object"),
        ('{"prompt": "x"}', "has no text under 'test'"),
        ('{"prompt": null, "test": "x"}', "has no text under 'prompt'"),
        ('{"prompt": "x", "test": "y", "entry_point": 1}', "has no text under 'entry_point', but 1"),
        (json.dumps({"prompt": "x", "test": TEST}), "defines check, which nothing calls"),
        (json.dumps({"prompt": "x", "test": TEST, "entry_point": None}), "defines check, which nothing calls"),
    ],
)
def test_a_line_that_is_no_problem_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(f'{{"prompt": "x", "test": "y"}}\n\n{line}\n')
    with pytest.raises(RunFileError, match=rf"^path: {file}, line 3 {message}"):
        programs.code(Author([]), path=str(file))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("entry_point", [{}, {"entry_point": None}])
def test_a_test_without_entry_point_runs_as_it_is(entry_point: dict[str, None]) -> None:
    problem = {"prompt": "p\n", "test": "assert f(2) == 4", **entry_point}
    assert programs._program(problem, "a") == "p\na\nassert f(2) == 4\n"


def run(text: str, seconds: float = 60.0) -> float:
    how = {"file": "solution.py", "commands": [["true"], ["python", "solution.py"]], "seconds": seconds}
    return programs.compile_and_pass(text, json.dumps(how))


def test_a_program_sees_an_empty_folder_and_nothing_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run("import os\nassert os.listdir() == ['solution.py']\nassert 'HF_TOKEN' not in os.environ") == 1.0


def test_a_program_has_no_network_and_leaves_nothing_running(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    assert run("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)") == 0.5
    assert run("import os\nassert sum(name.isdigit() for name in os.listdir('/proc')) < 4") == 1.0
    later = f"import subprocess\nsubprocess.Popen(['sh', '-c', 'sleep 0.2; touch {mark}'], start_new_session=True)"
    assert run(later) == 1.0
    time.sleep(0.5)
    assert not mark.exists()


def test_without_a_box_no_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "why_not", lambda: "no namespaces")
    with pytest.raises(programs.RefusedError, match="no namespaces"):
        programs.code(Author([]), path="missing.jsonl")  # pyright: ignore[reportArgumentType]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_other_languages_are_commands(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(3 * (json.dumps({"prompt": "int f(int x) {", "test": "int main() { return f(3) != 9; }"}) + "\n"))
    how: dict[str, Any] = {"file": "a.c", "compile": ["cc", "-o", "a", "a.c"], "command": ["./a"], "path": str(file)}
    found = programs.code(Author(["return x * x; }", "return x; }", "return y; }"]), **how)  # pyright: ignore[reportArgumentType]
    assert found == {"compiled": [True, True, False], "passed": [True, False, False]}


SOLUTIONS = {
    "gcd": "while (b) { int r = a % b; a = b; b = r; } return a;",
    "is_prime": "for (int d = 2; d * d <= n; ++d) if (n % d == 0) return false; return n > 1;",
    "factorial": "return n ? n * factorial(n - 1) : 1;",
    "fibonacci": "long long a = 0, b = 1; while (n--) { b += a; a = b - a; } return a;",
    "digit_sum": "return n ? n % 10 + digit_sum(n / 10) : 0;",
    "power_mod": "auto half = exponent ? power_mod(base * base % modulus, exponent / 2, modulus) : 1 % modulus;"
    " return exponent % 2 ? half * base % modulus : half;",
    "is_palindrome": "return text == std::string(text.rbegin(), text.rend());",
    "count_vowels": 'int n = 0; for (char c : text) n += std::string("aeiouAEIOU").find(c) < 10; return n;',
    "count_words": "std::istringstream in(text); std::string word; int n = 0; while (in >> word) ++n; return n;",
    "to_upper": "for (char& c : text) c = std::toupper(c); return text;",
    "balanced": 'std::string open = "([{", close = ")]}"; std::stack<char> wanted; for (char c : text) {'
    " if (auto i = open.find(c); i < 3) wanted.push(close[i]);"
    " else if (close.find(c) < 3) { if (wanted.empty() || wanted.top() != c) return false; wanted.pop(); } }"
    " return wanted.empty();",
    "largest": "int best = values[0]; for (int value : values) if (value > best) best = value; return best;",
    "reversed": "return std::vector<int>(values.rbegin(), values.rend());",
    "find_sorted": "for (unsigned i = 0; i < values.size(); ++i) if (values[i] == wanted) return i; return -1;",
    "merged": "std::vector<int> all; unsigned i = 0, j = 0; while (i < a.size() || j < b.size())"
    " all.push_back(j == b.size() || (i < a.size() && a[i] < b[j]) ? a[i++] : b[j++]); return all;",
    "distinct": "std::sort(values.begin(), values.end());"
    " values.erase(std::unique(values.begin(), values.end()), values.end()); return values;",
    "transposed": "std::vector<std::vector<int>> made(rows[0].size());"
    " for (auto& row : rows) for (unsigned i = 0; i < row.size(); ++i) made[i].push_back(row[i]); return made;",
}
NOTHING = "return {};"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_each_problem_in_cpp_is_passed_by_a_solution_and_not_by_nothing(tmp_path: Path) -> None:
    """All programs as one, each in a namespace with a right and a wrong body, compiled by the experiment's command."""
    how = load_yaml(ROOT / "conf/experiment/nanochat_cpp.yaml")["loop"]["evaluations"]["cpp"]["options"]
    lines = (ROOT / "trainer/evaluation/problems" / Path(how["path"]).name).read_text().splitlines()
    problems = {line["name"]: line for line in map(json.loads, lines)}
    assert len(problems) == 17
    bodies = [(name, body) for name in problems for body in (SOLUTIONS[name], NOTHING)]
    includes, spaces = set[str](), ""
    for i, (name, body) in enumerate(bodies):
        program = programs._program(
            problems[name], f"    {body}\n}}\nint more() {{".partition(how["stop"][0])[0] + "\n"
        )
        own = [line for line in program.splitlines() if line.startswith("#include")]
        includes |= {*own}
        spaces += f"namespace p{i} {{\n{program.replace(''.join(f'{line}' + chr(10) for line in own), '')}\n}}\n"
    calls = " ".join(f'std::printf("%d\\n", p{i}::main());' for i in range(len(bodies)))
    whole = "\n".join([*sorted(includes), "#include <cstdio>", spaces, f"int main() {{ {calls} }}"])
    (tmp_path / how["file"]).write_text(whole)
    subprocess.run(how["compile"], cwd=tmp_path, check=True)
    told = subprocess.run(how["command"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split()
    assert dict(zip(bodies, told, strict=True)) == {
        (name, body): "1" if body == NOTHING else "0" for name, body in bodies
    }
