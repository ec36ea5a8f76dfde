"""Estimate of a run's hours and price before it starts.

It is the forecast of `slipway fit`, if that has compiled the run; else the speed that somebody measured of
the same run; else the model's arithmetic, as an interval between the utilizations that others reached.
Nothing here has been measured on this user's pod. `max_cost` says what a budget enforces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conf.schema.config import Config
from conf.schema.topology import tpu_type_table
from conf.schema.training.layer_kinds import attended_entries
from conf.schema.training.loop import CustomLoop, GrpoLoop, LmLoop, PuzzleLoop
from conf.schema.training.loop_parts import Trm
from conf.schema.training.model import AnyModel, Model
from controller.checks.fit import estimate_num_params, matrix_weights
from controller.checks.fit import load as load_fit
from controller.core.text import plural
from controller.gcp.prices import HOURS_PER_MONTH, HourlyPrice, load_prices

SETUP_HOURS = 0.25
"""From the request for a pod to the first step, compilation included."""
DECODE_UTILIZATION = (0.03, 0.05, 0.07)
"""Of peak FLOP/s while sampling, which waits for memory: least, usual, most. vLLM on v6e-8, Llama 3.3 70B: 5% at 64
requests, 7% at 128; the least is assumed."""
PUZZLE_UTILIZATION = (0.05, 0.1, 0.2)
"""Of peak FLOP/s while solving puzzles, whose short sequences pad badly. The TRM study assumed the middle one; the
others are half and twice that."""
CHECKPOINT_BYTES = 12
"""Per weight: float32, and two moments of Adam."""
WEIGHT_BYTES = 4
PACKAGES_GB = 3.0
"""What a worker downloads through the NAT: Python packages."""
TEST_PROMPTS = 1319
"""GSM8K's, where loop.test_prompts is null."""
TEST_PUZZLES = 422_786
"""Those of Sudoku-Extreme, where loop.eval_puzzles is null."""
GB = 1e9
TIMED_PARTS = ("TPUs", "network")
"""Parts of a price that grow with the hours."""


@dataclass(frozen=True)
class RunEstimate:
    """Hours of the pod and USD of a run without preemptions; `usd` is None if the pod's price is unknown.

    Attributes:
        source: "a forecast" of the compiler, or "an estimate" by arithmetic.
        spread: how many times as long it may take, from least to most; None where the speed was measured.
    """

    hours: float
    usd: float | None
    parts: tuple[tuple[str, float], ...]
    basis: str
    source: str = "an estimate"
    spread: tuple[float, float] | None = None

    def __str__(self) -> str:
        return f"about {self.summary} ({self.source}: {self.basis})"

    @property
    def summary(self) -> str:
        low, high = self.spread or (1.0, 1.0)
        hours = with_interval(low * self.hours, self.hours, high * self.hours, _format_hours)
        if self.usd is None:
            return f"{hours} at an unknown price"
        timed = sum(usd for what, usd in self.parts if what in TIMED_PARTS)
        usd = with_interval(self.usd + (low - 1) * timed, self.usd, self.usd + (high - 1) * timed, "${:.2f}".format)
        shown = [f"${usd:.2f} for {what}" for what, usd in self.parts if usd >= 0.005]
        return f"{hours} and {usd}" + (f" ({', '.join(shown)})" if len(shown) > 1 else "")


def with_interval(low: float, value: float, high: float, form: Callable[[float], str]) -> str:
    """Return a value and its interval, if that shows when rounded."""
    ends = form(low), form(high)
    return form(value) if ends[0] == ends[1] else f"{form(value)} ({ends[0]} to {ends[1]})"


def _format_hours(hours: float) -> str:
    return f"{hours:.1f} h" if hours < 100 else f"{hours:.0f} h"


def estimate_run(config: Config, price: HourlyPrice) -> RunEstimate | None:
    """Estimate the whole run on one pod; None if only its program knows how long it takes, or nothing is billed."""
    if config.program.kind != "trainer" or config.model is None or config.loop is None:
        return None
    if isinstance(config.loop, CustomLoop):
        return None
    facts = tpu_type_table()["generations"].get(config.topology.generation, {})
    if (config.cloud.kind == "local" and price.tpu is None) or None in (
        config.topology.bf16_flops_per_chip, facts.get("utilization")):  # fmt: skip
        return None
    if (found := _forecast(config, config.model, price)) is not None:
        return found
    measured = _measured(config, config.model, config.loop)
    if measured is not None:
        hours, basis, spread = *measured, None
    else:
        hours, basis, spread = _by_arithmetic(config, config.model, config.loop)
    parts = _parts(config, config.model, price, hours)
    basis += f", and {SETUP_HOURS * 60:.0f} minutes of setup; not measured with this trainer; preemptions not counted"
    if isinstance(config.loop, LmLoop):
        basis += "; `slipway fit` makes a forecast"
    usd = None if price.tpu is None else sum(usd for _, usd in parts)
    return RunEstimate(hours, usd, parts, basis, spread=spread)


def _measured(config: Config, model: AnyModel, loop: LmLoop | GrpoLoop | PuzzleLoop) -> tuple[float, str] | None:
    """Return hours and basis by the speed of the same run with another program; None if nobody reports one."""
    if not isinstance(loop, LmLoop):
        return None
    this = (config.topology.accelerator_type, estimate_num_params(model), loop.seq_len)
    for row in tpu_type_table()["measured"]:
        if (row["type"], row["weights"], row["seq_len"]) == this:
            evaluated = -(-loop.steps // loop.eval_interval) * loop.eval_batches / 3  # a forward pass is a third
            tokens = (loop.steps + evaluated) * loop.total_batch_tokens
            basis = f"{tokens:.1e} tokens at the {row['tokens_per_second']:,} per second of {row['program']}"
            return SETUP_HOURS + tokens / row["tokens_per_second"] / 3600, basis.replace("e+", "e")
    return None


def _by_arithmetic(
    config: Config, model: AnyModel, loop: LmLoop | GrpoLoop | PuzzleLoop
) -> tuple[float, str, tuple[float, float]]:
    """Return hours, basis and spread by FLOPs and the utilization that is assumed."""
    slice_ = config.topology
    usual: list[float] = tpu_type_table()["generations"][slice_.generation]["utilization"]
    utilization = PUZZLE_UTILIZATION if isinstance(loop, PuzzleLoop) else usual
    peak = slice_.chips * (slice_.bf16_flops_per_chip or 0.0)
    flops, sampled = _loop_flops(config, model, loop)
    most, hours, least = (
        SETUP_HOURS + (flops / share + sampled / decode) / peak / 3600
        for share, decode in zip(utilization, DECODE_UTILIZATION, strict=True)
    )
    basis = f"{flops + sampled:.1e} FLOPs at {_shares(utilization)} of the chips' peak".replace("e+", "e")
    if isinstance(loop, PuzzleLoop):
        basis += ", which is assumed"
    if sampled:
        basis += f", {_shares(DECODE_UTILIZATION)} while sampling, with prompts and answers of half their limits"
    return hours, basis, (least / hours, most / hours)


def _shares(utilization: Sequence[float]) -> str:
    least, usual, most = utilization
    return f"{usual:.0%} ({least:.0%} to {most:.0%})"


def estimate_flops(config: Config) -> float | None:
    """Return the FLOPs of the whole run without recomputation; None if only its program knows."""
    if config.program.kind != "trainer" or config.model is None or config.loop is None:
        return None
    return None if isinstance(config.loop, CustomLoop) else sum(_loop_flops(config, config.model, config.loop))


def _forecast(config: Config, model: AnyModel, price: HourlyPrice) -> RunEstimate | None:
    """Return what `slipway fit` says of this run; None if it has not compiled it, or cannot tell."""
    known, loop = (load_fit(config) or {}).get("forecast"), config.loop
    if not known or not isinstance(loop, LmLoop):
        return None
    evaluations = -(-loop.steps // loop.eval_interval) * loop.eval_batches
    seconds = loop.steps * known["update_seconds"] + evaluations * known["eval_seconds"]
    hours = SETUP_HOURS + seconds / 3600
    parts = _parts(config, model, price, hours)
    basis = (
        f"{known['update_seconds']:.3g} s per update, from the program that `slipway fit` compiled, and "
        f"{SETUP_HOURS * 60:.0f} minutes of setup; published runs took {known['low']:.2f} to {known['high']:.2f} times "
        "their forecasts; preemptions not counted"
    )
    usd = None if price.tpu is None else sum(usd for _, usd in parts)
    return RunEstimate(hours, usd, parts, basis, "a forecast", (known["low"], known["high"]))


def describe_estimate(config: Config, price: HourlyPrice) -> str:
    """Return the estimate in words, or why there is none and what an hour and a day cost."""
    found = estimate_run(config, price)
    if found is not None:
        return str(found)
    why = "none: only the program knows how long it runs"
    return why if price.total is None else f"{why}; ${price.total:.2f} per hour is ${24 * price.total:.2f} per day"


def _parts(config: Config, model: AnyModel, price: HourlyPrice, hours: float) -> tuple[tuple[str, float], ...]:
    """Return what is billed: the pod, and what goes into and out of the bucket."""
    table, size = load_prices(), estimate_num_params(model) / GB
    kept = config.checkpoint.max_to_keep + (config.checkpoint.best is not None)
    months = 1 + hours / HOURS_PER_MONTH
    out = size * WEIGHT_BYTES * table["egress"]["usd_per_gb"]
    if config.network.nat and not config.external_ip:
        out += config.topology.workers * PACKAGES_GB * table["nat"]["usd_per_gb"]
    return (
        ("TPUs", hours * (price.tpu or 0.0)),
        ("network", hours * price.network),
        (
            f"{plural(kept, 'checkpoint')} for a month",
            size * CHECKPOINT_BYTES * kept * months * load_prices()["storage"]["usd_per_gb_month"],
        ),
        ("egress", out),
    )


def _loop_flops(config: Config, model: AnyModel, loop: LmLoop | GrpoLoop | PuzzleLoop) -> tuple[float, float]:
    """Return the FLOPs of a run's updates and evaluations, and of its sampling."""
    if isinstance(loop, PuzzleLoop):
        return (_puzzle_flops(config, model, loop) if isinstance(model, Trm) else 0.0), 0.0
    assert isinstance(model, Model), "a check has found another kind"
    if isinstance(loop, LmLoop):
        update = _counted_flops(config) or loop.total_batch_tokens * token_flops(model, loop.seq_len)
        evaluations = -(-loop.steps // loop.eval_interval)
        evaluation = loop.eval_batches * loop.total_batch_tokens * token_flops(model, loop.seq_len) / 3
        return loop.steps * update + evaluations * evaluation, 0.0
    width = max(1, (loop.max_prompt_length + loop.max_new_tokens) // 2)
    each = token_flops(model, width)  # of forward and backward pass; a forward pass is a third
    update = loop.rows * width * each
    scored = (not loop.on_policy and loop.old_logprobs == "trainer") + loop.scores_reference
    answers = loop.rows * (loop.max_new_tokens / 2)
    tests = 2 * (loop.test_samples_per_prompt or 0) * (loop.test_prompts or TEST_PROMPTS)
    evaluated = -(-loop.steps // loop.eval_interval) * loop.eval_prompts + tests
    sampled = (loop.steps * answers + evaluated * loop.max_new_tokens / 2) * each / 3
    training = loop.steps * (update + scored * loop.rows * width * each / 3)
    return training + loop.warm_start_steps * update, sampled


def _puzzle_flops(config: Config, model: Trm, loop: PuzzleLoop) -> float:
    """Return the FLOPs of updates and evaluations; an evaluation of all test puzzles counts those of Sudoku-Extreme."""
    update = _counted_flops(config) or loop.batch_size * model.update_flops
    solve = loop.supervision_steps * model.update_flops * model.h_cycles / (model.h_cycles + 2)
    evaluations = -(-loop.steps // loop.eval_interval) - 1
    solved = evaluations * (loop.eval_puzzles or TEST_PUZZLES) + (loop.eval_puzzles_final or TEST_PUZZLES)
    return loop.steps * update + (solved + (evaluations + 1) * loop.eval_train_puzzles) * solve


def _counted_flops(config: Config) -> float | None:
    """Return an update's FLOPs without recomputation as `slipway fit` counted them, if it did."""
    programs = (load_fit(config) or {}).get("programs", [])
    return next(
        (p["flops"] - p["recomputed_flops"] for p in programs if p["name"] == "update" and p["flops"] > 0), None
    )


def token_flops(model: Model, sequence: int) -> float:
    """Return the FLOPs of a token in an update: 6 per matrix weight that it takes, and attention to its row's tokens.

    https://arxiv.org/abs/2204.02311, appendix B, as `trainer.telemetry.throughput`, which reports utilization.
    """
    weights = matrix_weights(model, per_token=True) + model.vocab_size * model.dim
    return 6.0 * weights + 12.0 * attended_entries(model, sequence)
