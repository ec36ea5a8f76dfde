"""Tasks of rollouts: who draws them, and which samples count."""

import random

import pytest

from trainer.rl.remote.leases import MAX_LOSSES, Leases, Task, TaskLostError

SECONDS = 10.0


def opened(prompts: int = 4, prompts_per_task: int = 2) -> Leases[str]:
    leases = Leases[str](group_size=2, seconds=SECONDS)
    leases.open(0, prompts, prompts_per_task, version=7)
    return leases


def deliver(leases: Leases[str], task: Task, *, who: str = "") -> list[bool]:
    rows = range(task.first * leases.group_size, (task.first + task.count) * leases.group_size)
    return [leases.deliver(task.rollout, row, f"{who}{row}") for row in rows]


def test_each_sampler_gets_tasks_of_its_own_in_order() -> None:
    leases = opened(prompts=5)
    leases.open(0, 5, 2, version=9)  # twice, which offers it once
    tasks = [leases.take(name, 0.0) for name in "abcd"]
    assert tasks == [Task(0, 0, 2, 7), Task(0, 2, 2, 7), Task(0, 4, 1, 7), None]
    assert leases.samples(0) is None
    for task in tasks[:3]:
        assert task is not None
        assert all(deliver(leases, task))
    assert leases.samples(0) == [str(row) for row in range(10)]
    assert (leases.kept, leases.duplicates, leases.lost) == (10, 0, 0)


def test_a_dead_samplers_task_goes_to_another_and_what_it_delivered_stays() -> None:
    leases = opened(prompts=2)
    first = leases.take("a", 0.0)
    assert first is not None
    assert leases.deliver(0, 1, "a1")
    leases.release("a")
    assert leases.take("b", 1.0) == first
    assert deliver(leases, first, who="b") == [True, False, True, True]
    assert leases.samples(0) == ["b0", "a1", "b2", "b3"]
    assert (leases.kept, leases.duplicates, leases.lost) == (4, 1, 1)


def test_a_silent_sampler_loses_its_task_and_one_that_reports_keeps_it() -> None:
    leases = opened(prompts=2)
    task = leases.take("a", 0.0)
    assert leases.renew("a", SECONDS - 1) == {(0, 0)}
    assert leases.take("b", SECONDS) is None
    assert leases.take("b", 2 * SECONDS - 1) == task
    assert not leases.renew("a", 2 * SECONDS - 1)
    assert leases.renew("b", 2 * SECONDS)


def test_a_sampler_keeps_the_tasks_that_it_scores_and_no_other() -> None:
    leases = opened(prompts=6)
    first, second = leases.take("a", 0.0), leases.take("a", 0.0, [(0, 0)])
    assert [first, second] == [Task(0, 0, 2, 7), Task(0, 2, 2, 7)]
    assert leases.renew("a", 1.0) == {(0, 0), (0, 2)}
    assert leases.take("a", 2.0, [(0, 2)]) == first, "the oldest that nobody has"
    assert leases.lost == 1
    leases.release("a")
    assert leases.renew("a", 3.0) == set()


def test_a_late_sample_of_a_closed_rollout_is_dropped_and_so_is_one_that_nobody_asked_for() -> None:
    leases = opened(prompts=2)
    task = leases.take("a", 0.0)
    assert task is not None
    deliver(leases, task)
    leases.close(0)
    assert not leases.deliver(0, 0, "late")
    leases.open(1, 2, 2, version=8)
    assert not leases.deliver(1, 4, "no such row")
    assert not leases.deliver(1, -1, "no such row")
    assert leases.samples(1) is None


def test_a_task_that_kills_every_sampler_is_an_error() -> None:
    leases = opened(prompts=2)
    for _ in range(MAX_LOSSES - 1):
        assert leases.take("a", 0.0)
        leases.release("a")
    assert leases.take("a", 0.0)
    with pytest.raises(TaskLostError, match=f"prompts 0 to 1 of rollout 0 were lost {MAX_LOSSES} times"):
        leases.release("a")


@pytest.mark.parametrize("seed", range(8))
def test_whatever_dies_whenever_every_sample_counts_once(seed) -> None:
    """Samplers die, fall silent and deliver late at random; each rollout is complete, and each sample is the first."""
    chance, leases = random.Random(seed), Leases[str](group_size=3, seconds=SECONDS)
    for rollout in range(3):
        leases.open(rollout, 7, 2, version=rollout)
    clock, accepted = 0.0, list[tuple[int, int, str]]()
    holding: dict[str, tuple[Task, list[int]]] = {}
    while any(leases.samples(rollout) is None for rollout in range(3)):
        clock += chance.random()
        name = chance.choice("abcd")
        if name not in holding:
            if task := leases.take(name, clock):
                rows = list(range(task.first * 3, (task.first + task.count) * 3))
                chance.shuffle(rows)
                holding[name] = task, rows
            continue
        task, rows = holding[name]
        match chance.choices(["deliver", "die", "fall silent"], [20, 1, 1])[0]:
            case "deliver":
                leases.renew(name, clock)
                row, words = rows.pop(), f"{name} at {clock}"
                if leases.deliver(task.rollout, row, words):
                    accepted.append((task.rollout, row, words))
                if not rows:
                    del holding[name]
            case "die":
                leases.release(name)
                del holding[name]
            case _:
                clock += SECONDS
    assert len({(rollout, row) for rollout, row, _ in accepted}) == len(accepted) == 3 * 7 * 3
    for rollout in range(3):
        assert leases.samples(rollout) == [words for number, _, words in sorted(accepted) if number == rollout]
