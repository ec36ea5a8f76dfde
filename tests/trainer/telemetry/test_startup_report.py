"""What is said at the start, and the warnings where something is not as it must be."""

import pytest

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.run_yaml import LocalRunFileError
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from trainer.telemetry import startup_report

WELL = {"kl": 1e-9, "ratio_min": 1.0, "ratio_max": 1.0, "truncated": 0.25, "zero_variance_groups": 0.5}
WELL |= {"sampler_trainer_logp_diff": 1e-6, "sampler_trainer_logp_diff_max": 1e-5}


def lines(loss: str = "trainer", **changes: float) -> list[str]:
    loop = GrpoLoop(**load_group("loop/grpo") | {"old_logprobs": loss})
    return startup_report.check_first_update(WELL | changes, loop)


def test_a_first_update_as_it_must_be_is_told_without_a_warning_and_a_kl_only_of_a_scored_reference() -> None:
    sampler = "ratio 1 to 1; sampler and trainer differ by 1e-06 nats per token, at most 1e-05"
    assert lines() == [f"update 1: KL 1e-09, {sampler}", "truncated 25.0%, groups of equal rewards 50.0%"]
    loop = GrpoLoop(**load_group("loop/grpo") | {"kl_coef": 0.0})
    known = {name: value for name, value in WELL.items() if name != "kl"}
    assert startup_report.check_first_update(known, loop)[0] == f"update 1: {sampler}"


@pytest.mark.parametrize(
    ("loss", "changes", "words"),
    [
        ("trainer", {"kl": 0.2}, "WARNING: the KL to the reference is 0.2, not 0"),
        ("trainer", {"ratio_min": 0.9}, "WARNING: ratios deviate from 1 by up to 0.1 before the first update: the"),
        ("sampler", {"ratio_max": 1.5}, "WARNING: ratios deviate from 1 by up to 0.5 before the first update: sam"),
        ("trainer", {"truncated": 0.75}, "WARNING: most responses were cut off"),
    ],
)
def test_what_is_wrong_is_said(loss, changes, words) -> None:
    (warning,) = lines(loss, **changes)[2:]
    assert warning.startswith(words)


def test_the_bucket_is_written_read_and_left_as_it_was(tmp_path, capfd) -> None:
    startup_report.probe_bucket(str(tmp_path / "run"), make_mesh(4, 1, 1))
    assert capfd.readouterr().out.startswith(f"bucket: written to and restored from {tmp_path / 'run'} in ")
    assert not (tmp_path / "run/probe").exists()
    (tmp_path / "file").write_text("a file")
    with pytest.raises(LocalRunFileError, match=r"^dir: cannot write and read .*/file: NotADirectoryError"):
        startup_report.probe_bucket(str(tmp_path / "file"), make_mesh(1, 1, 1))


def test_the_pace_says_where_the_time_goes_and_how_long_it_takes() -> None:
    times = {"rollout_time": 5.0, "reward_time": 0.0, "score_time": 1.0, "update_time": 3.0, "other_time": 1.0}
    rates = {"rollout_tokens_per_second": 1234.5, "train_tokens_per_second": 99.0}
    assert startup_report.time_report(times | rates | {"step_time": 10.0}, 366) == (
        "time per update: 10 s (rollout 50%, reward 0%, score 10%, update 30%, other 10%); 1,234 tokens/s sampled, "
        "99 tokens/s trained on; 366 updates to go: 1:01:00"
    )
