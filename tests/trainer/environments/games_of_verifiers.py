"""Environments written with the classes of the library verifiers alone, as their users write them."""

from typing import Any

import verifiers as vf
from datasets import Dataset


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


def right(parser: Any, completion: Any, answer: str) -> float:
    return float((parser.parse_answer(completion) or "").strip() == answer)


def brevity(completion: Any) -> float:
    return 1 / len(completion)


class Guess(vf.MultiTurnEnv):
    """The policy guesses a number, and hears whether it is higher or lower."""

    @vf.stop
    async def guessed(self, state: Any) -> bool:
        return state.get("guessed", False)

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        guess = int(messages[-1].content)
        if guess == int(state["answer"]):
            state["guessed"] = True
            state["final_env_response"] = [{"role": "user", "content": "yes"}]
            return state["final_env_response"]
        return [{"role": "user", "content": "higher" if guess < int(state["answer"]) else "lower"}]


class Ledger(vf.StatefulToolEnv):
    """A tool whose second argument the policy does not see."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_tool(self.add, args_to_skip=["total"])

    async def add(self, amount: int, total: int) -> str:
        """Add an amount.

        Args:
            amount: what is added
            total: what is there
        """
        return str(total + amount)

    def update_tool_args(self, tool_name: str, tool_args: dict, messages: Any, state: Any, **kwargs: Any) -> dict:
        return {**tool_args, "total": 40}


def raises(**kwargs: Any) -> Any:
    raise OSError("no such game")


KINDS = {
    "single": lambda **own: vf.SingleTurnEnv(system_prompt="Write a number.", **own),
    "guess": lambda **own: Guess(max_turns=4, **own),
    "tool": lambda **own: vf.ToolEnv(tools=[multiply], max_turns=5, **own),
    "ledger": lambda **own: Ledger(max_turns=3, **own),
    "raises": raises,
    "group": lambda **own: vf.SingleTurnEnv(**own | {"rubric": vf.Rubric(funcs=[lambda completions: [0.0]])}),
}


def load_environment(kind: str = "single") -> vf.Environment:
    rows = [{"question": f"What is {a}*{a + 1}?", "answer": str(a * (a + 1))} for a in range(6, 10)]
    rubric = vf.Rubric(funcs=[right, brevity], weights=[1.0, 0.25], parser=vf.Parser())
    return KINDS[kind](dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(rows[:1]), rubric=rubric)
