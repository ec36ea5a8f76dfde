"""What a module defines, judged by the protocol of what the config takes it for."""

from pathlib import Path

import pytest

from controller.inputs.definitions import DefinitionError, find_definition
from controller.inputs.protocols import caution, misfit

GOOD_GAME = (
    "def reset(self, row): return ''\n def step(self, response): return '', True\n def reward(self): return 1.0\n"
)


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        ("async def f(response, answer): return 1.0", "reward", "is async, and nobody awaits it"),
        ("def f(response, answer): yield 1.0", "reward", "yields; it must return a number"),
        ("f = 3", "reward", "is 3, which cannot be called"),
        ("f = lambda response: 1.0", "reward", "takes (response), but is called as (response, answer)"),
        ("class f: pass", "reward", "is a class; it must be a function"),
        (
            "def f(response, answer) -> str: return g(answer)",
            "reward",
            "says that it returns str; it must return a num",
        ),
        ("def f(response, answer) -> 'list[float]': return g(answer)", "reward", "says that it returns 'list[float]'"),
        (
            "def f(response, answer): return [1.0 for _ in response]",
            "reward",
            "returns a list in line 1; it must return",
        ),
        ("def f(response, answer):\n if response: return 1.0\n return None", "reward", "returns nothing in line 3"),
        ("def f(response, answer): return str(answer)", "reward", "returns a str in line 1; it must return a number"),
        ("def f(response, answer): return g.str(answer)", "reward", ""),
        ("def f(self, response, answer): return 1.0", "reward", "takes self, which is for methods; remove it"),
        ("def f(response, answer): return 'a' if response else 'b'", "reward", "returns a str in line 1"),
        ("def f(response, answer): return 1.0 if response else None", "reward", "returns nothing in line 1"),
        ("def f(response, answer): return response and 'b'", "reward", "returns a str in line 1"),
        ("def f(response, answer): return 'a' + response", "reward", "returns a str in line 1"),
        ("def f(response, answer): return '{}'.format(answer)", "reward", "returns a str in line 1"),
        ("def f(response, answer):\n x = 'a'\n if answer: x = 'b'\n return x", "reward", "returns a str in line 4"),
        ("def f(response, answer):\n x = 'a'\n if answer: x = 1.0\n return x", "reward", ""),
        ("def f(response, answer):\n x = ''\n x += g(x)\n return x", "reward", ""),
        ("def f(response, answer):\n response = 'a'\n return response", "reward", ""),
        ("def f(response, answer):\n x = y = 'a'\n return x", "reward", "returns a str in line 3"),
        ("def f(response, answer): return len('a' + answer) / 2 if response else 0", "reward", ""),
        ("def f(response, answer): print(response)", "reward", "returns nothing; it must return a number"),
        ("import math as f", "reward", "is a module, which cannot be called"),
        (
            "from .helpers import f",
            "reward",
            "line 1: `from .helpers import …` needs a package around m, which has none",
        ),
        ("from helpers import f", "reward", ""),
        ("from helpers import g as f", "reward", "line 1: helpers defines no g"),
        ("from helpers import h as f", "reward", "takes (a), but is called as (response, answer)"),
        ("from helpers import *", "reward", ""),
        ("from helpers import *\ng = f", "reward", ""),
        ("from helpers import *\ng = f\ndel f", "reward", ""),
        (
            "def f(prompts, completions, **kw): return g()",
            "reward",
            "is called with (response, answer)",
        ),
        (
            "def f(data_source, solution_str, ground_truth, extra_info=None): return g()",
            "reward",
            "each a text, not with verl's (data_source, solution_str, ground_truth, extra_info)",
        ),
        (
            "def f(queries, prompts, labels, **kw): return g()",
            "reward",
            "not with OpenRLHF's (queries, prompts, labels",
        ),
        ("def f(task_info, action): return g()", "reward", "not with rLLM's (task_info, action)"),
        ("def f(solution_str, ground_truth, extra_info=None): return g()", "reward", ""),
        ("def f(completions, answer): return g()", "reward", "not with TRL's lists"),
        ("def f(solution, text): return g()", "reward", "in this order, and calls them (solution, text)"),
        ("def f(response, answer): raise NotImplementedError", "reward", ""),
        ("f = functools.partial(g)", "reward", ""),
        ("@cached\ndef f(response, answer): yield", "reward", ""),
        ("def f(response, answer):\n def inner(): yield 1\n return sum(inner())", "reward", ""),
        ("class f: pass", "environment", "has no reset, step, reward"),
        (f"class f:\n {GOOD_GAME}", "environment", ""),
        (f"class B:\n {GOOD_GAME}class f(B): pass", "environment", ""),
        ("import gym\nclass f(gym.Env): pass", "environment", ""),
        (
            "class f:\n def step(self, response): return '', True\n def reward(self): return 1.0",
            "environment",
            "no reset",
        ),
        (
            f"class f:\n {GOOD_GAME.replace('(self, row)', '(self)')}",
            "environment",
            "has reset(), which is called as (row)",
        ),
        (
            f"class f:\n {GOOD_GAME.replace(chr(39) * 2 + ', True', '1')}",
            "environment",
            "has step, which returns a int",
        ),
        (f"class f:\n {GOOD_GAME.replace('return 1.0', 'pass')}", "environment", "has reward, which returns nothing"),
        (f"class f:\n {GOOD_GAME.replace('def step', 'async def step')}", "environment", "has step, which is async"),
        ("def f(question): return 3", "prompt", "returns a int in line 1; it must return a text"),
        ("def f(**options): pass", "optimizer rule", "returns nothing; it must return an array or another object"),
        ("def f(learning_rate=1e-3): return g()", "optimizer rule", ""),
        ("class f:\n def weights(self, cfg): return {}", "model family", "has no forward"),
        ("def f(cfg): return cfg", "model family", "is a function; it must be a class without arguments"),
        (
            "class f:\n def __init__(self, n): pass\n def weights(self, c): return {}\n forward = weights",
            "model family",
            "takes (n)",
        ),
        ("def f(path): yield 'a'", "documents", "yields; it must return a sequence"),
        ("class f:\n def __init__(self, path): ...\n __getitem__ = __len__ = len", "documents", ""),
        ("def f(path): yield {}", "questions", ""),
        (
            "def f(response, answer): return float(re.match(answer, response) is not None)",
            "reward",
            "uses re in line 1, which is defined nowhere; import re",
        ),
        (
            "import numpy\n\ndef f(response, answer):\n    return np.mean([1.0])",
            "reward",
            "uses np in line 4, which is defined nowhere; import or define it",
        ),
        (
            "def f(response, answer):\n    return float(respnse == answer)",
            "reward",
            "uses respnse in line 2, which is defined nowhere; did you mean response?",
        ),
        (
            "def f(response, answer):\n    return help_it(answer)\n\ndef help_it(a):\n    return json.loads(a)",
            "reward",
            "uses json in line 5, which is defined nowhere; import json",
        ),
        (f"class f:\n {GOOD_GAME.replace('return 1.0', 'return score(self)')}", "environment", "uses score in line "),
        ("def f(path):\n    for line in open(path): yield json.loads(line)", "questions", "uses json in line 2"),
        ("from helpers import *\n\ndef f(response, answer): return whatever(answer)", "reward", ""),
        ("def f(response, answer): return globals()['g'](answer) + late", "reward", ""),
        (
            "def f(response, answer):\n    global count\n    count = 1\n    return count * float(__name__ != '')",
            "reward",
            "",
        ),
        (
            "import os.path\nwith open('x') as file, g() as (one, two): pass\nfor each in (): pass\n"
            "def f(response, answer): return sum(len(part) for part in (os, file, one, two, each))",
            "reward",
            "",
        ),
        (
            "try:\n    import fast\nexcept ImportError:\n    fast = None\nif (found := g()): pass\n"
            "def f(response, answer): return (fast, found) and (lambda text: len(text))(answer)",
            "reward",
            "",
        ),
        ("globals().update(zz=3)\ndef f(response, answer): return zz", "reward", ""),
        ("exec('zz = 3')\ndef f(response, answer): return zz", "reward", ""),
        ("def f(response, answer): return zz\ndef h(): exec('global zz; zz = 3')", "reward", ""),
        (
            "import sys\nsetattr(sys.modules[__name__], 'zz', 3)\ndef f(response, answer): return zz",
            "reward",
            "",
        ),
        ("import builtins\nbuiltins.zz = 3\ndef f(response, answer): return zz", "reward", ""),
        ("def f(response, answer): return float(len(__path__ or __annotations__))", "reward", ""),
        (f"class f:\n at = __module__ + __qualname__\n {GOOD_GAME}", "environment", ""),
        ("[y := i for i in range(3)]\ndef f(response, answer): return y", "reward", ""),
        (
            "def f(response, answer):\n    try:\n        return zz\n    except (KeyError, NameError): return 0.0",
            "reward",
            "",
        ),
        (
            "def f(response, answer):\n    try:\n        return zz\n    except Exception:\n        return 0.0",
            "reward",
            "",
        ),
        ("def f(response, answer):\n    try:\n        return zz\n    except:\n        return 0.0", "reward", ""),
        (
            "from contextlib import suppress\ndef f(response, answer):\n    with suppress(NameError):\n"
            "        print(zz)\n    return 0.0",
            "reward",
            "",
        ),
        (
            "def f(response, answer):\n    try:\n        return json.loads(answer)\n    except ValueError: return 0.0",
            "reward",
            "uses json in line 3, which is defined nowhere; import json",
        ),
        (
            "def f(response, answer):\n    y: Tensor = 1.0\n    def h(a: Tensor) -> Tensor: return a\n    return h(y)",
            "reward",
            "",
        ),
        (
            "import sys\ndef f(response, answer):\n    if sys.version_info < (3,):\n"
            "        return unicode(answer)\n    return 0.0",
            "reward",
            "",
        ),
        (
            "def f(response, answer):\n    match answer:\n        case {'a': a, **rest}: return float(a in rest)\n"
            "        case [b, *c] | (b, *c) as d: return float(b in c + d)\n    return 0.0",
            "reward",
            "",
        ),
        ("def f(response, response): return 1.0", "reward", "m.py, line 1: duplicate argument 'response'"),
        ("def f(response, answer):\n    nonlocal q\n    return q", "reward", "m.py, line 2: no binding for nonlocal"),
        ("def h(): pass\nreturn\ndef f(response, answer): return 1.0", "reward", "m.py, line 2: 'return' outside fun"),
        (
            "def f(response, answer):\n    if response == answer: return 1.0",
            "reward",
            "returns nothing where it gets to its end; it must return a number",
        ),
        (
            "def f(response, answer):\n    try:\n        return float(answer)\n    except ValueError:\n        pass",
            "reward",
            "returns nothing where it gets to its end",
        ),
        ("def f(response, answer):\n    for word in answer:\n        return 1.0", "reward", "returns nothing where"),
        (
            "def f(question):\n    if question:\n        return 'a'\n    print(question)",
            "prompt",
            "returns nothing where",
        ),
        (
            "def f(response, answer):\n    if answer:\n        return 1.0\n    else:\n        raise ValueError",
            "reward",
            "",
        ),
        ("def f(response, answer):\n    with open('x') as file:\n        return float(file.read())", "reward", ""),
        (
            "def f(response, answer):\n    try:\n        a = 1.0\n    except ValueError:\n        return 0.0\n"
            "    else:\n        return a",
            "reward",
            "",
        ),
        ("def f(response, answer):\n    while True:\n        return 1.0", "reward", ""),
    ],
)
def test_what_is_named_fits_the_protocol_of_its_kind(tmp_path: Path, code: str, kind: str, said: str) -> None:
    (tmp_path / "helpers.py").write_text("def f(response, answer): return 1.0\ndef h(a): return 1.0\n")
    (tmp_path / "m.py").write_text(f"{code}\ndef g(*_): return 1.0\n")
    files = {path.name: path for path in tmp_path.iterdir()}
    try:
        found = find_definition("m:f", files, installed=True)
        problem = misfit(found, kind, ()) if found is not None else ""
        problem = problem or (caution(found, kind) if found is not None else "")
    except DefinitionError as error:
        problem = str(error)
    assert (problem != "") == (said != ""), problem
    assert said in problem
