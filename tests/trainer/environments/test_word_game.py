"""The word game: the marks of a guess, and the games."""

import pytest

from trainer.environments.word_game import WordGame, marks, words


@pytest.mark.parametrize(
    ("guess", "word", "told"),
    [
        ("abc", "abc", "+++"),
        ("cab", "abc", "~~~"),
        ("add", "abc", "+--"),
        ("aab", "abb", "+-+"),
        ("bba", "abc", "-+~"),  # one b is right, so the other is nowhere else
        ("aa", "ab", "+-"),
        ("a", "ab", "+"),
        ("abcd", "ab", "++"),
        ("", "ab", ""),
    ],
)
def test_a_letter_is_misplaced_as_often_as_the_word_has_it_elsewhere(guess: str, word: str, told: str) -> None:
    assert marks(guess, word) == told


def test_a_game_ends_with_the_word() -> None:
    game = WordGame()
    assert game.reset({"answer": "ab"}) == ""
    assert [game.step(guess) for guess in ("ba!", "ba!", "abc")] == [("~~ ", False), ("~~ ", False), ("++ ", False)]
    assert game.reward() == 0
    assert game.step("ab!") == ("++ ", True)
    assert game.reward() == 1
    assert game.metrics() == {"repeated_guesses": 0.25, "unreadable_guesses": 0.25}


def test_every_word_is_asked_and_the_worked_guesses_end_with_it() -> None:
    rows = [*words("train", letters="abc")]
    assert {row["answer"] for row in rows} == {a + b for a in "abc" for b in "abc"}
    assert all(row["solution"].split("!")[-2] == row["answer"] for row in rows)
    assert {row["solution"].count("!") for row in rows} == {1, 2, 3}
    assert rows != [*words("test", letters="abc")]
