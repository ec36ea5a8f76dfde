"""What may stand next, without a shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.cli import main
from controller.cli.completion.answers import complete
from controller.cli.flags import VERBS
from controller.records import index


def words(line: str, folder: Path) -> list[str]:
    return list(complete(line, folder))


@pytest.mark.parametrize(
    ("line", "some", "never"),
    [
        ("slipway ", [*VERBS, "+experiment="], ["loop.", "--json"]),
        ("slipway pla", ["plan"], ["up"]),
        ("slipway plan --s", ["--save"], ["--json"]),
        ("slipway up --", ["--run", "--yes", "--queue", "--json", "--help"], ["--save"]),
        ("slipway down --yes --", ["--all"], ["--yes"]),
        ("slipway +exp", ["+experiment="], []),
        ("slipway +experiment=quick", ["+experiment=quickstart"], []),
        ("slipway experiment=quick", ["experiment=quickstart"], []),
        ("slipway plan loop=gr", ["loop=grpo"], ["loop=lm"]),
        ("slipway +experiment=quickstart loop.st", ["loop.steps="], ["loop.prompts_per_step="]),
        ("slipway +experiment=lm_tinyshakespeare loop.seq", ["loop.seq_len="], []),
        ("slipway +experiment=quickstart optimizer.lr=", ["optimizer.lr=0.0007"], []),
        ("slipway plan cleanup.on_success=", ["cleanup.on_success=delete", "cleanup.on_success=keep"], []),
        ("slipway plan cleanup.on_success=k", ["cleanup.on_success=keep"], ["cleanup.on_success=delete"]),
        ("slipway loop=grpo loop.filter_zero_variance_groups=t", ["loop.filter_zero_variance_groups=true"], []),
        ("slipway plan recovery.policy.hung=give", ["recovery.policy.hung=give_up"], []),
        ("slipway plan recovery.no_such=", [], ["recovery.no_such=null"]),
        ("slipway -m +experiment=quickstart optimizer=adamw,mu", ["optimizer=adamw,muon"], []),
        ("slipway -m loop=grpo,dapo loop.kl_e", ["loop.kl_estimator="], []),
        ("slipway 'env.vars={a: b}' tpu.zone", ["tpu.zone="], []),
        ("slipway plan 'env.vars={a: b", [], ["tpu.zone="]),
        ("slipway wrong=thing loop.k", [], []),
        ("slipway localcloud ", ["start", "wipe"], []),
        ("slipway help ru", ["runs"], []),
        ("slipway completion ", ["install", "fish"], ["query"]),
        ("slipway exec --worker all -- l", [], ["logs", "loop."]),
        ("slipway", [], []),
        ("", [], []),
    ],
)
def test_lines(line: str, some: list[str], never: list[str], tmp_path: Path) -> None:
    found = words(line, tmp_path)
    assert set(some) <= set(found)
    assert not set(never) & set(found)
    assert not any(word.startswith("hydra") for word in found)


def test_files_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "slipway" / "experiment" / "of mine" / "x.yaml"
    file.parent.mkdir(parents=True)
    (tmp_path / "slipway" / "experiment" / "mine.yaml").write_text("# @package _global_\nloop: {my_key: 1}\n")
    assert words("slipway +experiment=mi", tmp_path) == ["+experiment=mine"]
    assert words("slipway +experiment=mine loop.my", tmp_path) == ["loop.my_key="]


def test_ids_of_runs_and_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path))
    assert words("slipway up --run ", tmp_path) == []
    index.append_rows(
        tmp_path, [{"run": "q-1", "sweep": "s-1"}, {"run": "q-2", "sweep": "s-1"}, {"run": "r-3", "sweep": ""}]
    )
    assert words("slipway up --run ", tmp_path) == ["r-3", "q-2", "q-1"]
    assert words("slipway logs --run q", tmp_path) == ["q-2", "q-1"]
    assert words("slipway runs --diff q-1 r", tmp_path) == ["r-3"]
    assert "r-3" not in words("slipway runs --diff q-1 q-2 ", tmp_path)


def test_the_verb_says_it_as_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", "slipway orph")
    assert main.run(["completion", "query"]) == 0
    assert capsys.readouterr().out == f"orphans\t{VERBS['orphans'].help}\n"
