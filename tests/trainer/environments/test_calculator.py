"""The calculator: what it reads, what it answers, and which questions are held out."""

import pytest

from trainer.environments.calculator import Calculator, products
from trainer.environments.word_game import WordGame, marks, words


def play(*responses: str, answer: str = "3901") -> tuple[list[str], float, dict[str, float]]:
    game = Calculator(digits=4)
    game.reset({"answer": answer})
    said = [game.step(response)[0] for response in responses]
    return said, game.reward(), game.metrics()


def test_it_computes_and_the_policy_must_write_the_answer() -> None:
    assert play("47*83=", "3901") == (["3901", ""], 1, {"calls": 1, "unreadable_calls": 0})
    assert play("47*83=")[1] == 0  # what the calculator says is no answer
    assert play("3901")[1:] == (1, {"calls": 0, "unreadable_calls": 0})
    assert play("2*3=", "7-9=", "1+1=", "02", answer="2") == (
        ["0006", "-002", "0002", ""],
        1,
        {"calls": 3, "unreadable_calls": 0},
    )


@pytest.mark.parametrize("call", ["47*=", "=", "4/2=", "__import__('os')=", "9**9=", "1" * 13 + "*1=", "٣*٣="])
def test_what_it_cannot_read_is_counted(call: str) -> None:
    assert play(call, "3901") == (["?", ""], 1, {"calls": 1, "unreadable_calls": 1})


@pytest.mark.parametrize("said", ["", "39", "3901 3901", "-3901", "٣٩٠١", "3901=3901x"])
def test_a_wrong_answer_gets_nothing(said: str) -> None:
    assert play("47*83=", said)[1] == 0


def test_no_pair_of_numbers_is_in_training_and_test() -> None:
    train, test = ({frozenset(row["question"][:-1].split("*")) for row in products(path)} for path in ("train", "test"))
    assert not train & test
    assert len(test) / (len(train) + len(test)) == pytest.approx(0.2, abs=1e-3)
    row = next(iter(products("train")))
    assert row["solution"] == f"{row['question'][:-1]}={row['answer']}"
    assert int(row["answer"]) == eval(row["question"][:-1])


def test_a_letter_is_misplaced_as_often_as_the_word_has_it_elsewhere() -> None:
    told = {("abc", "abc"): "+++", ("cab", "abc"): "~~~", ("add", "abc"): "+--", ("aab", "abb"): "+-+"}
    told |= {("bba", "abc"): "-+~"}  # one b is right, so the other is nowhere else
    told |= {("aa", "ab"): "+-", ("a", "ab"): "+", ("abcd", "ab"): "++", ("", "ab"): ""}
    assert {pair: marks(*pair) for pair in told} == told


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
