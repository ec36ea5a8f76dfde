"""A calculator between the turns of the policy, written with the classes of verifiers."""

import random
import re

import verifiers as vf
from datasets import Dataset


class CalculatorEnv(vf.MultiTurnEnv):
    @vf.stop
    async def answered(self, state):
        turns = state["trajectory"]
        return bool(turns) and not turns[-1]["completion"][-1].content.endswith("=")

    async def env_response(self, messages, state, **kwargs):
        found = re.search(r"(\d+)\*(\d+)=$", messages[-1].content)
        return [{"role": "user", "content": f"{int(found[1]) * int(found[2]):04}" if found else "?"}]


def correct(completion, answer):
    return float(completion[-1].content == answer)


def load_environment():
    numbers = range(10, 100)
    pairs = [(a, b) for a in numbers for b in numbers if a <= b]
    held_out = {*random.Random(0).sample(pairs, len(pairs) // 5)}
    sets = {"dataset": [], "eval_dataset": []}
    for a in numbers:
        for b in numbers:
            row = {"question": f"{a}*{b}?", "answer": f"{a * b:04}", "solution": f"{a}*{b}={a * b:04}"}
            sets["eval_dataset" if (min(a, b), max(a, b)) in held_out else "dataset"].append(row)
    rubric = vf.Rubric(funcs=[correct])
    return CalculatorEnv(rubric=rubric, max_turns=4, **{name: Dataset.from_list(rows) for name, rows in sets.items()})
