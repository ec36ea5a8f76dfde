"""Generated questions: which are held out, and which worked responses fit."""

import re
from itertools import product

import pytest

from conf.formats import RunFileError
from conf.schema.training.data import ArithmeticData
from conf.schema.training.loop import GrpoLoop
from tests.groups import load_group
from trainer.data.prompting import Draw
from trainer.data.questions import ArithmeticProblems, QuestionSet
from trainer.rewards.functions import answer_match

PROMPT = re.compile(r"\w+ has \w+: (\d+), (gets|uses) (\d)\. $")


def problems_of(seed: int, **values: int) -> ArithmeticProblems:
    return ArithmeticProblems(ArithmeticData(**load_group("data/arithmetic") | values), seed)


def operands(prompt: str) -> tuple[int, int]:
    match = PROMPT.fullmatch(prompt)
    assert match, prompt
    left, right = int(match[1]), int(match[3])
    return min(left, right), max(left, right)


@pytest.mark.parametrize("seed", [0, 1])
def test_no_held_out_pair_is_ever_trained_on_in_either_order(seed: int) -> None:
    problems = problems_of(seed)
    trained = {operands(p.question) for step in range(200) for p in problems.train(Draw("rollout", step), 64)}
    asked = {operands(p.question) for p in problems.test(256)}
    assert asked
    assert not trained & asked
    assert asked <= problems.held_out_pairs
    assert len(trained | problems.held_out_pairs) == 35


def test_a_draw_that_replaces_another_has_problems_of_its_own() -> None:
    problems, draws = problems_of(0), [Draw(*d) for d in product(("warm_start", "rollout"), (0, 1), (0, 1, 2))]
    drawn = [tuple(problems.train(draw, 30)) for draw in draws]
    assert len({*drawn}) == len(draws)


def test_operands_go_as_far_as_asked() -> None:
    drawn = problems_of(0, largest_first=29, largest_second=5).train(Draw("rollout", 0), 5000)
    sums = {PROMPT.fullmatch(p.question).groups() for p in drawn}
    assert (max(int(x) for x, _, _ in sums), max(int(y) for _, _, y in sums)) == (29, 5)
    assert max(len(p.solution) for p in drawn) == 6 * len("+5:29")


def test_both_operators_and_orders_are_asked_and_the_worked_response_counts_to_the_answer() -> None:
    problems = problems_of(0)
    for drawn in (problems.train(Draw("rollout", 0), 2000), problems.test(800)):
        sums = {PROMPT.fullmatch(p.question).groups(): p for p in drawn}
        assert {(verb, (x > y) - (x < y)) for x, verb, y in sums} >= {("gets", 1), ("gets", -1), ("uses", 1)}
        for (left, verb, right), problem in sums.items():
            assert int(problem.answer) == int(left) + int(right) * (1 if verb == "gets" else -1) >= 0
            assert answer_match(problem.solution, problem.answer) == 1.0
            assert len(problem.question) + 1 <= 28  # fits the quick start
            assert len(problem.solution) + 1 <= 32
    worked = {PROMPT.fullmatch(p.question).groups(): p.solution for p in problems.train(Draw("rollout", 0), 2000)}
    assert worked["3", "gets", "2"] == "+2:03+1:04+0:05"
    assert worked["3", "uses", "2"] == "-2:03-1:02-0:01"


def test_held_out_prompts_are_distinct_and_the_same_every_time() -> None:
    first = problems_of(3).test(256)
    assert len({p.question for p in first}) == 256
    assert first == problems_of(3).test(256)
    with pytest.raises(RunFileError, match=r"loop\.eval_prompts: only \d+ held-out prompts exist, not 100000"):
        problems_of(3).test(100_000)


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    assert problems_of(1).train(Draw("rollout", 5), 8) == problems_of(1).train(Draw("rollout", 5), 8)
    assert problems_of(1).train(Draw("rollout", 5), 8) != problems_of(1).train(Draw("rollout", 6), 8)
    assert problems_of(1).train(Draw("rollout", 5), 8) != problems_of(2).train(Draw("rollout", 5), 8)


def test_generated_problems_whose_counting_does_not_fit_are_left_out() -> None:
    data, loop = ArithmeticData(**load_group("data/arithmetic")), load_group("loop/grpo") | {"max_new_tokens": 16}
    message = r"^loop\.max_new_tokens: \d+ of \d+ worked responses .*, of \d [+-] [3-5], has"
    with pytest.raises(RunFileError, match=message):
        QuestionSet(data, GrpoLoop(**loop | {"warm_start_steps": 1}), 0)
    found = QuestionSet(data, GrpoLoop(**loop | {"warm_start_steps": 1, "filter_overlong_solutions": True}), 0)
    assert found.left_out["solutions_left_out"] > 0
    for phase, longest in (("warm_start", 16), ("rollout", 31)):
        assert max(len(each.solution_tokens) for each in found.train(Draw(phase, 0), 200)) == longest
    with pytest.raises(RunFileError, match=r"loop\.loss_type: dpo reads the column 'rejected', which data=arithmetic"):
        QuestionSet(data, GrpoLoop(**loop | {"group_size": 2, "loss_type": "dpo", "kl_coef": 0.1}), 0)


def test_the_longest_question_is_the_longest():
    """`plan` holds it against loop.max_prompt_length."""
    data = ArithmeticData.model_validate(load_group("data/arithmetic") | {"largest_first": 12})
    problems = ArithmeticProblems(data, 0)
    every = [*problems.test(None), *problems.train(Draw("rollout", 0), 20_000)]
    assert data.question(7, 2) in {problem.question for problem in every}
    assert len(data.question(90, 9)) == max(len(problem.question) for problem in every)
