"""Environment: the policy guesses a number, and hears whether it is higher or lower."""

from collections.abc import Mapping
from typing import Any


class HigherLower:
    """One game; fewer guesses earn more."""

    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus, self.guesses, self.hint = bonus, 0, ""

    def reset(self, row: Mapping[str, Any]) -> str:
        """Return text after the question; `row` has the question's columns, and a `seed`."""
        self.number = int(row["answer"])
        return " Guess it: "

    def step(self, response: str) -> tuple[str, bool]:
        """Return what the policy reads next, and whether the episode is done."""
        self.guesses += 1
        guess = int(response) if response.strip().isdecimal() else 0
        self.hint = "yes" if guess == self.number else "higher" if guess < self.number else "lower"
        return f"\n{self.hint}\n", self.hint == "yes"

    def reward(self) -> float:
        """Return the reward; 1 or more counts as correct."""
        return float(self.hint == "yes") * (1 + self.bonus / self.guesses)

    def metrics(self) -> dict[str, float]:
        """Return numbers to log, or leave this method out."""
        return {"guesses": self.guesses}
