"""What the bench of recursive models says of its rounds, and of a peer that does not start."""

import sys

import pytest

from tests.bench.peers import trm

UPDATES = "import sys\nfor i, _ in enumerate(sys.stdin, 1): print(i, flush=True)"


def test_ratios_are_of_pairs():
    rounds = [
        {"slipway": {"seconds": 2.0 * k, "cpu": 4.0 * k}, "pytorch": {"seconds": 5.0 * k, "cpu": 6.0 * k}}
        for k in (1, 3, 2)
    ]
    assert trm.table(rounds, batch=8) == [
        "examples per second: slipway 2.000, pytorch 0.800; ratio 2.50 (95 %: 2.50 to 2.50)",
        "examples per CPU second: slipway 1.000, pytorch 0.667; ratio 1.50 (95 %: 1.50 to 1.50)",
    ]


def test_a_trainer_waits_for_its_turns_and_one_that_does_not_start_is_named(tmp_path):
    trainer = trm.Trainer([sys.executable, "-c", UPDATES], "0")
    assert [trainer.update(), trainer.update()] == [1, 2]
    trainer.end()
    broken = trm.Trainer([sys.executable, str(tmp_path / "missing.py")], "0")
    with pytest.raises(RuntimeError, match=r"missing\.py.* ended with exit code 2"):
        broken.update()
    broken.end()
