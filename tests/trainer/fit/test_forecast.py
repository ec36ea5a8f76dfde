"""The forecast's factors and interval are those of the recorded rows, and its errors are within the bars."""

from __future__ import annotations

import json
import statistics

import pytest

from conf.schema.infra.topology import find_topology
from conf.schema.training.run_yaml import RunFile
from tests.bench.forecast import rows as bench
from trainer.fit import forecast

ROWS = json.loads(bench.FIXTURE.read_text())


def test_factors_and_interval_are_those_of_the_rows():
    assert bench.factors(ROWS) == forecast.FACTORS
    judged = bench.ratios(ROWS, "judge").values()
    assert (round(min(judged), 2), round(max(judged), 2)) == forecast.INTERVAL


def test_errors_of_rows_that_were_not_calibrated_on():
    errors = [abs(1 / ratio - 1) for ratio in bench.ratios(ROWS, "judge").values()]
    assert len(errors) >= 15
    assert statistics.median(errors) <= 0.15
    assert max(errors) <= 0.40
    for right, pairs in (bench.ordered_pairs(ROWS), bench.ordered_pairs(ROWS, per_flop=True)):
        assert pairs >= 50
        assert right / pairs >= 0.85


def test_hours_and_dollars_of_a_run(lm_run):
    lm_run["loop"] |= {"steps": 1000, "eval_interval": 300, "eval_batches": 5}
    experiment, slice_ = RunFile.model_validate(lm_run), find_topology("v6e-8")
    found = forecast.predict(experiment, slice_, {"update": 2.0, "eval": 0.5}, "us-central1-a", spot=False)
    factor = forecast.FACTORS["v6e"]
    assert found.update_seconds == pytest.approx(2 * factor)
    assert found.tokens_per_second == pytest.approx(lm_run["loop"]["total_batch_tokens"] / (2 * factor))
    assert found.hours == pytest.approx((1000 * 2 + 4 * 5 * 0.5) * factor / 3600)
    assert (found.zone, found.usd_per_hour) == ("us-central1-a", pytest.approx(8 * 2.7))
    assert found.usd == pytest.approx(found.hours * 8 * 2.7)


def test_a_zone_without_a_price_gives_way_to_the_cheapest():
    slice_ = find_topology("v6e-8")
    assert forecast.find_price(slice_, "europe-west1-b", spot=False)[1] == pytest.approx(8 * 2.7)
    assert forecast.find_price(slice_, "us-east5-a", spot=True) == ("us-east5-a", pytest.approx(8 * 1.215))
    assert forecast.find_price(find_topology("tpu7x-8"), None, spot=False) == (None, None)


def test_what_cannot_be_told_has_a_reason(lm_run, grpo_run):
    assert forecast.why_none(RunFile.model_validate(lm_run), find_topology("v5litepod-8")) == ""
    assert "no published step time of v3" in forecast.why_none(RunFile.model_validate(lm_run), find_topology("v3-8"))
    grpo = forecast.why_none(RunFile.model_validate(grpo_run), find_topology("v5litepod-8"))
    assert grpo == "no forecast: how long answers of loop=grpo get is not known before the run"
