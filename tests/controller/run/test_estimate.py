"""Estimates against figures computed by hand, and what up asks before anything is billed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conf.schema.config import Config
from conf.schema.topology import tpu_type_table
from controller.checks.fit import cache_file
from controller.core.errors import ConfigError
from controller.core.finding import Finding
from controller.gcp.prices import HourlyPrice, hourly_price, max_cost
from controller.reconcile import Absent
from controller.run import preview
from controller.run.estimate import RunEstimate, describe_estimate, estimate_run, token_flops
from controller.run.preview import confirm_cost
from tests.composed import config_of as config
from tests.fakes.context import make_context

LM_3B = ("+experiment=lm_3b_v6e8", "cloud.project=acme", "tpu.zone=us-central1-a", "tpu.capacity=on_demand")


def as_fit_said(found: Config, programs: list[Any], **body: Any) -> RunEstimate:
    cache_file(found).parent.mkdir(exist_ok=True)
    cache_file(found).write_text(json.dumps({"format": 1, "programs": programs, **body}))
    return estimated(found)


def estimated(found: Config) -> RunEstimate:
    estimate = estimate_run(found, hourly_price(found, 0.0))
    assert estimate is not None
    return estimate


@pytest.mark.parametrize("key", ["utilization", "bf16_flops_per_chip"])
def test_of_a_generation_whose_speed_is_unknown_there_is_no_estimate(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tpu_type_table()["generations"]["v6e"], key, None)
    found = config(*LM_3B, f"run.state_dir={tmp_path}")
    assert estimate_run(found, hourly_price(found, 0.0)) is None


def test_the_arithmetic_of_a_3b_model_by_hand(tmp_path: Path) -> None:
    """28 layers of width 3072, 24 heads and 8 for keys of 128, feed-forward 8192, vocabulary 49,152, 4,096 tokens.

    Matrices of a layer: 2 x 3072 x 128 x 32 = 25,165,824, and 3 x 3072 x 8192 = 75,497,472. 28 of them and the product
    with the vocabulary, 150,994,944, are 2,969,567,232 weights. Attention: 12 x 24 x 128 x 28 x 4096 = 4,227,858,432.
    """
    found = config(*LM_3B, f"run.state_dir={tmp_path}")
    assert found.model is not None
    each = 6 * 2_969_567_232 + 4_227_858_432
    assert token_flops(found.model, 4096) == each
    local = config(*LM_3B, "model.attention_pattern=LG", "model.sliding_window=1024").model
    fewer = 12 * 24 * 128 * 14 * (4096 - 1024)  # half of the layers see their window only
    assert token_flops(cast(Any, local), 4096) == each - fewer
    training, evaluation = 100_000 * 131_072 * each, 100 * 8 * 131_072 * each / 3
    hours = 0.25 + (training + evaluation) / 0.30 / (8 * 920e12) / 3600  # 8 chips of 920 TFLOP/s
    guess = estimated(found)
    assert guess.hours == pytest.approx(hours)
    assert guess.hours == pytest.approx(36.7, abs=0.05)
    parts = dict(guess.parts)
    assert parts["TPUs"] == pytest.approx(hours * 8 * 2.7)
    # 3,120,562,176 weights with both tables: 12 bytes each in 3 checkpoints, at $0.02 per GB and month
    assert parts["3 checkpoints for a month"] == pytest.approx(3.120562176 * 12 * 3 * 0.02 * (1 + hours / 730))
    assert parts["egress"] == pytest.approx(3.120562176 * 4 * 0.12 + (0 if found.external_ip else 3 * 0.045))
    assert guess.usd == pytest.approx(sum(parts.values()))
    assert guess.spread is not None
    ends = [0.25 + (hours - 0.25) * 0.30 / share for share in (0.45, 0.18)]
    assert [end * hours for end in guess.spread] == pytest.approx(ends)
    assert str(guess).startswith(f"about 36.7 h ({ends[0]:.1f} h to {ends[1]:.1f} h) and ${guess.usd:.2f} ($")


@pytest.mark.parametrize(("experiment", "speed"), [("nanochat_d16", 175_000), ("nanochat_d16_jax_v6e4", 320_000)])
def test_the_speed_that_a_guide_measured_of_the_same_run_is_taken(experiment: str, speed: int) -> None:
    """50,000 updates of 524,288 tokens, and 200 evaluations of 20 batches, each a third of an update."""
    guess = estimated(config(f"+experiment={experiment}", "cloud.project=acme"))
    assert guess.hours == pytest.approx(0.25 + (50_000 + 200 * 20 / 3) * 524_288 / speed / 3600)
    assert guess.spread is None
    assert f"2.7e10 tokens at the {speed:,} per second of nanochat's port to torch_xla, and 15 min" in guess.basis


@pytest.mark.parametrize("other", ["loop.seq_len=512", "model.num_layers=15", "tpu.accelerator_type=v5litepod-16"])
def test_the_speed_of_another_run_is_not_taken(other: str, tmp_path: Path) -> None:
    guess = estimated(config("+experiment=nanochat_d16", "cloud.project=acme", f"run.state_dir={tmp_path}", other))
    assert "FLOPs at 30% (20% to 45%) of the chips' peak" in guess.basis
    assert guess.spread is not None


def test_grpo_samples_scores_and_updates() -> None:
    """16 prompts of 8 answers, half of 512 + 1536 tokens each; per token a forward pass is a third of an update.

    An update has the pass of the update, one of the old policy and one of the reference: 1 + 2/3.
    """
    found = config("+experiment=gemma2b_gsm8k", "cloud.project=acme", "loop.test_samples_per_prompt=null")
    assert found.model is not None
    each = token_flops(found.model, 1024)
    training = 2000 * 128 * 1024 * each * (1 + 2 / 3)
    sampling = (2000 * 128 + 20 * 256) * 768 * each / 3
    hours = 0.25 + (training / 0.30 + sampling / 0.05) / (16 * 197e12) / 3600
    assert estimated(found).hours == pytest.approx(hours)
    assert "5% (3% to 7%) while sampling" in str(estimated(found))
    shares = ((0.45, 0.07), (0.20, 0.03))
    ends = [0.25 + (training / share + sampling / decode) / (16 * 197e12) / 3600 for share, decode in shares]
    assert [end * hours for end in estimated(found).spread or ()] == pytest.approx(ends)


def test_flops_that_fit_counted_and_its_forecast_replace_the_arithmetic(tmp_path: Path) -> None:
    """100,000 updates of 0.5 s and 100 evaluations of 8 batches of 0.2 s, and 0.25 h of setup."""
    found = config(*LM_3B, f"run.state_dir={tmp_path}")
    assert "; `slipway fit` makes a forecast)" in str(estimated(found))
    short = config(*LM_3B, f"run.state_dir={tmp_path}", "loop.eval_batches=1", "loop.eval_interval=100000")
    counted = as_fit_said(short, [{"name": "update", "flops": 5e15, "recomputed_flops": 1e15}])
    assert counted.hours == pytest.approx(0.25 + 100_000 * 4e15 / 0.30 / (8 * 920e12) / 3600, rel=1e-3)
    without = as_fit_said(found, [], forecast=None)
    assert (without.source, "at 30% (18% to 45%) of the chips' peak" in without.basis) == ("an estimate", True)
    guess = as_fit_said(found, [], forecast={"update_seconds": 0.5, "eval_seconds": 0.2, "low": 0.8, "high": 1.1})
    hours = 0.25 + (100_000 * 0.5 + 100 * 8 * 0.2) / 3600
    assert guess.hours == pytest.approx(hours)
    assert guess.spread == (0.8, 1.1)
    parts = dict(guess.parts)
    assert parts["TPUs"] == pytest.approx(hours * 8 * 2.7)
    low, high = (guess.usd + share * (parts["TPUs"] + parts["network"]) for share in (-0.2, 0.1))
    said = str(guess)
    assert said.startswith(f"about 14.2 h (11.3 h to 15.6 h) and ${guess.usd:.2f} (${low:.2f} to ${high:.2f}) (")
    assert "(a forecast: 0.5 s per update, from the program that `slipway fit` compiled, and 15 minutes of" in said


def test_no_limit_is_never_the_only_word() -> None:
    command = config("program=command", "program.command=[a]", "cloud.project=acme", "budget.usd_per_hour=3")
    price = hourly_price(command, 0.0)
    said = "none: only the program knows how long it runs; $3.00 per hour is $72.00 per day"
    assert describe_estimate(command, price) == said
    assert max_cost(command, price).startswith("none: billed until the program ends; set budget.max_hours")
    unknown = config(*LM_3B, "tpu.zone=us-east5-z")
    said = describe_estimate(unknown, hourly_price(unknown, 0.0))
    assert "36.7 h (24.5 h to 61.0 h) at an unknown price (an estimate: 2.9e20 FLOPs at 30% (18% to 45%) of" in said
    assert estimate_run(config("+experiment=quickstart"), hourly_price(config("+experiment=quickstart"), 0.0)) is None


def test_puzzles_are_estimated_as_the_study_does(tmp_path: Path) -> None:
    """42.7 GFLOP per example and update, 65,104 updates of 768, at 10% of 16 chips of 197 TFLOP/s: 1.9 hours."""
    found = config("+experiment=trm_sudoku", "cloud.project=acme", f"run.state_dir={tmp_path}")
    guess = estimated(found)
    training = 42.7e9 * 65_104 * 768 / 0.1 / (16 * 197e12) / 3600
    assert training == pytest.approx(1.9, abs=0.05)
    assert training < guess.hours - 0.25 < 1.3 * training  # and evaluations, of which the last has all test puzzles
    assert "at 10% (5% to 20%) of the chips' peak, which is assumed" in guess.basis


CAUTION = "the original program never ends; native in its place: +experiment=trm_sudoku"


def planned(number: int = 0, exists: bool = True, caution: str | None = None, stand_in: bool = False) -> Any:
    program, code = SimpleNamespace(kind="command", caution=caution), SimpleNamespace(stand_in=stand_in)
    config = SimpleNamespace(program=program, code=code, budget=SimpleNamespace(max_usd=None, max_hours=3.0))
    node, pod = SimpleNamespace(title=f"TPU {number}", adopt=False), object() if exists else Absent()
    return SimpleNamespace(config=config, observe_pod=lambda _: pod, node=node, run_id=f"r-{number}")


def confirm(plan: Any, answer: bool = True, billed: bool = True, said: list[str] | None = None) -> list[str]:
    """Confirm the cost of a run; return what was asked."""
    asked: list[str] = []

    def ask(question: str, yes: bool) -> bool:
        asked.append(question)
        return answer

    context = make_context(SimpleNamespace(), notes=said)
    context.is_billed = billed
    confirm_cost(plan, context, cast(Any, SimpleNamespace(ask=ask)), yes=False)
    return asked


def test_a_program_that_is_known_not_to_finish_is_confirmed_even_on_a_pod_that_exists() -> None:
    assert confirm(planned(caution=CAUTION)) == [f"{CAUTION}. Start it all the same?"]
    with pytest.raises(ConfigError, match=r"program\.caution: .*nothing was created; pass --yes"):
        confirm(planned(caution=CAUTION), answer=False)


@pytest.mark.parametrize(
    ("caution", "billed", "stand_in"), [(None, True, False), (CAUTION, False, False), (CAUTION, True, True)]
)
def test_others_are_not_asked(caution: str | None, billed: bool, stand_in: bool) -> None:
    assert confirm(planned(caution=caution, stand_in=stand_in), billed=billed) == []


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    found: list[Finding] = []
    monkeypatch.setattr(preview, "probe_cloud", lambda *_: found)
    monkeypatch.setattr(preview, "probe_plan", lambda *_: [])
    return found


def test_a_warning_is_shown_before_the_pod_is_created_and_a_note_is_not(findings: list[Finding]) -> None:
    findings += [Finding("a", "note", "tpu.zone", "harmless"), Finding("b", "warning", "tpu.zone", "look here")]
    said: list[str] = []
    confirm(planned(exists=False), billed=False, said=said)
    assert said == ["warning: tpu.zone: look here"]


@pytest.mark.parametrize(
    ("absent", "said"),
    [((), ""), ((1,), "Create TPU 1 for $6.00 per hour"), ((0, 1, 2), "Create TPU 0 and 2 more pods for")],
)
@pytest.mark.usefixtures("findings")
def test_pods_of_samplers_are_confirmed_too(
    absent: tuple[int, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview, "price_of_pods", lambda *_: HourlyPrice(6.0, 0.0, "list price"))
    monkeypatch.setattr(preview, "dearest_pod", lambda *_: HourlyPrice(2.0, 0.0, "list price"))
    monkeypatch.setattr(preview, "describe_estimate", lambda *_: "an hour")
    plan, *others = (planned(number, exists=number not in absent) for number in range(3))
    monkeypatch.setattr(preview, "sampler_plans", lambda *_: tuple(others))
    asked = confirm(plan)
    assert len(asked) == bool(absent)
    assert all(question.startswith(said) and "at most $6.00 in 3 h" in question for question in asked)
