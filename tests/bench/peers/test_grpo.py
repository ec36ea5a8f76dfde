"""What the GRPO bench says of its rounds, and of libraries that are missing."""

import argparse
import sys
from pathlib import Path

from tests.bench.peers import grpo


def test_ratios_are_of_pairs():
    rounds = [
        {"slipway": {"seconds": 1.0 * k, "cpu": 2.0 * k}, "trl": {"seconds": 4.0 * k, "cpu": 5.0 * k}}
        for k in (1, 3, 2)
    ]
    lines = grpo.table(rounds)
    assert lines[0].split() == ["slipway,", "seconds", "of", "a", "step", "2.0000", "1.0000", "3.0000"]
    assert lines[-2:] == [
        "seconds of a step, of trl's: 0.250 (95 %: 0.250 to 0.250)",
        "CPU seconds of a step, of trl's: 0.400 (95 %: 0.400 to 0.400)",
    ]


def test_a_missing_library_is_left_out_with_a_line(capsys):
    assert grpo.usable("trl", None) is None
    assert grpo.usable("trl", Path("/no/such/python")) is None
    assert grpo.usable("no_such_library", Path(sys.executable)) is None
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "trl is left out: --trl names no Python"
    assert "No such file" in lines[1]
    assert lines[2] == f"no_such_library is left out: {sys.executable} has no module no_such_library"


def test_each_round_begins_with_another_program(monkeypatch, tmp_path):
    order = []
    monkeypatch.setattr(grpo, "ours", lambda options, folder: order.append("slipway") or {"seconds": 1.0})
    monkeypatch.setattr(grpo, "theirs", lambda options, name, python: order.append(name) or {"seconds": 2.0})
    peers = {name: Path(name) for name in grpo.PEERS}
    options = argparse.Namespace(loaded=True)
    found = [grpo.turn(options, peers, i, tmp_path) for i in range(3)]
    assert order[::3] == ["slipway", "trl", "tunix"]
    assert [list(each) for each in found] == [["slipway", "trl", "tunix"]] * 3
