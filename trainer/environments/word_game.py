"""A word-guessing game: the policy guesses a word, and reads which of its letters are right, misplaced or wrong.

The rules are those of Mastermind and Wordle, with words of a few letters of a small alphabet.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

RIGHT, MISPLACED, WRONG = "+", "~", "-"
END = "!"
"""Ends a guess, by `loop.sampler.stop=["!"]`."""


class WordGame:
    """One game. The reward is 1 if a guess is the word; the number of guesses is `max_turns` of the environment."""

    def __init__(self) -> None:
        self.word, self.guesses, self.solved = "", list[str](), False

    def reset(self, row: Mapping[str, Any]) -> str:
        self.word = str(row["answer"])
        return ""

    def step(self, response: str) -> tuple[str, bool]:
        guess = response.strip().removesuffix(END)
        self.guesses.append(guess)
        self.solved = guess == self.word
        return f"{marks(guess, self.word)} ", self.solved

    def reward(self) -> float:
        return float(self.solved)

    def metrics(self) -> dict[str, float]:
        """Return the share of guesses that repeat an earlier one, and of those that are no words of its length."""
        count = max(1, len(self.guesses))
        wrong = sum(len(guess) != len(self.word) for guess in self.guesses)
        return {"repeated_guesses": 1 - len({*self.guesses}) / count, "unreadable_guesses": wrong / count}


def marks(guess: str, word: str) -> str:
    """Return a mark for each letter of a guess; a letter is misplaced as often as the word has it elsewhere."""
    left = Counter(want for said, want in itertools.zip_longest(guess[: len(word)], word) if said != want)
    found = ""
    for said, want in zip(guess, word, strict=False):
        is_elsewhere = said != want and left[said] > 0
        left[said] -= is_elsewhere
        found += RIGHT if said == want else MISPLACED if is_elsewhere else WRONG
    return found


def words(path: str, *, letters: str = "abcd", length: int = 2, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield every word as a game, with guesses at random and then the word as the worked response.

    The same words are in the test: what is learned is how to guess, since the question does not tell the word.
    """
    chance = random.Random(f"{seed} {path}")  # noqa: S311 - nothing here is secret
    every = ["".join(word) for word in itertools.product(letters, repeat=length)]
    for word in every:
        for _ in range(8):
            guesses = [*chance.sample([w for w in every if w != word], chance.randrange(3)), word]
            yield {"question": ">", "answer": word, "solution": "".join(f"{guess}{END}" for guess in guesses)}
