"""Judge the metrics, the output and the checkpoints of one attempt: which alerts begin, and which are over.

It reads no clock and no bucket; `controller.run.notifications` passes in what the controller sees. The trainer judges
what only it can see, such as the entropy of the policy, and writes lines `{"alert": name, "message": text}` into
metrics.jsonl, as a program of the user's own may do.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conf.schema.run_sections import RunAlerts
from controller.core.text import finite_number, format_duration, format_number, numeric, printable
from controller.records.ledger import Alert

LINES_TO_CHANGE = 2
"""Metrics lines in a row that begin or end an alert about the speed, and that end one about the loss."""
MAD_TO_SIGMA = 1.4826
"""The standard deviation of a normal distribution divided by its median absolute deviation."""
SPIKE_SIGMAS = 6.0
"""Distance from the median, in standard deviations, below which a loss is noise."""


@dataclass
class Sustained:
    """Whether a condition has lasted: it begins after `seconds` and `lines`, and is over after two good lines."""

    seconds: float = 0.0
    lines: int = 1
    """Metrics lines that must show it before it begins."""
    active: bool = False
    since: float | None = None
    """When the condition was first met, while it is."""
    _bad: int = 0
    _good: int = 0

    def update(self, bad: bool, now: float) -> bool:
        """Add a line; return whether the alert began or ended."""
        before = self.active
        if bad:
            self.since = now if self.since is None else self.since
            self._bad, self._good = self._bad + 1, 0
            self.active = before or (self._bad >= self.lines and now - self.since >= self.seconds)
        else:
            self._good += 1
            if not before or self._good >= LINES_TO_CHANGE:
                self.active, self.since, self._bad = False, None, 0
        return self.active != before


@dataclass
class History:
    """The last values of a metric in one phase of the program."""

    size: int
    enough: int
    """Number of values from which the median says something."""
    values: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.values = deque(maxlen=self.size)

    def median(self) -> float | None:
        return statistics.median(self.values) if len(self.values) >= self.enough else None

    def spike_limit(self, factor: float) -> float | None:
        """Return the value above which a loss is a spike; None while too little is known, or the median is not > 0.

        The median of negative numbers cannot be multiplied, and a loss that is noise around 0 has no spikes.
        """
        middle = self.median()
        if middle is None or middle <= 0:
            return None
        deviation = MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in self.values)
        return max(factor * middle, middle + SPIKE_SIGMAS * deviation)


SLOW, BELOW_FLOOR, DATA_WAIT, LOSS_SPIKE = "slow", "below floor", "data wait", "loss spike"
SLOW_WORKER = "slow worker"
NOT_FINITE, NO_OUTPUT, STALE_CHECKPOINT = "not finite", "no output", "stale checkpoint"
KEYS = {
    SLOW: "slow_fraction",
    BELOW_FLOOR: "min_tokens_per_second",
    DATA_WAIT: "data_wait_fraction",
    SLOW_WORKER: "slow_worker_fraction",
    LOSS_SPIKE: "loss_spike_factor",
    NOT_FINITE: "not_finite",
    NO_OUTPUT: "silent_minutes",
    STALE_CHECKPOINT: "checkpoint_intervals",
}
"""The key of `alerts` that sets the threshold of each."""
SPEED_LINES, ENOUGH_SPEEDS = 50, 5
LOSS_LINES, ENOUGH_LOSSES = 20, 10
"""Metrics lines that the medians are taken from, and from how many on."""
MIN_CHECKPOINT_AGE = 300.0
"""Age in seconds below which no checkpoint is stale: fast runs save their checkpoints while they go on."""
MAX_FROM_PROGRAM = 20
"""Number of different alerts that a program may raise in an attempt."""
MAX_NAME, MAX_MESSAGE = 40, 300
LOSSES = ("loss", "grad_norm")


class AlertJudge:
    """Judge of one attempt. Each alert is raised once, and again only if it comes back after it was over."""

    def __init__(
        self, settings: RunAlerts, began: float, save_interval: int | None = None, known: Sequence[Alert] = ()
    ) -> None:
        """Create a judge.

        Args:
            settings: the thresholds.
            began: when the attempt was launched.
            save_interval: updates between checkpoints; None for a program of the user's own.
            known: alerts that an earlier controller raised in this attempt.
        """
        self._settings, self._save_interval = settings, save_interval
        self._alerts = list(known)
        self._changes: list[Alert] = []
        self._histories: dict[tuple[str, str], History] = {}
        sustained = {SLOW, BELOW_FLOOR, DATA_WAIT, SLOW_WORKER}
        self._sustained = {
            name: Sustained(settings.sustained_seconds, LINES_TO_CHANGE) if name in sustained else Sustained()
            for name in KEYS
        }
        self._phase: dict[str, str | None] = {}
        """Phase of the program in which each alert was raised; None if an earlier controller raised it."""
        self._skipped: float | None = None
        """Updates that the trainer had skipped by the last line; a resumed run does not begin at 0."""
        self._step = 0.0
        self._reference = began
        """When the age of a checkpoint is counted from while there is none: the launch, then the first metrics."""
        self._has_metrics = False
        self._gaps: list[float] = []
        self._newest: tuple[int, float] | None = None
        for alert in known:
            if alert.ended is None and alert.name in KEYS:
                self._sustained[alert.name].active, self._sustained[alert.name].since = True, alert.since
                self._phase[alert.name] = None

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """All alerts of the attempt, oldest first."""
        return tuple(self._alerts)

    @property
    def step(self) -> float:
        """The last step that the program has reported."""
        return self._step

    def pop_changes(self) -> list[Alert]:
        """Return the alerts that have begun or ended since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def end_all(self, now: float) -> None:
        """End every alert: the attempt has ended."""
        for alert in self._alerts:
            if alert.ended is None:
                self._end(alert.name, now)

    def add_metrics(self, line: Mapping[str, Any], now: float) -> None:
        """Judge a line of worker 0's metrics.jsonl."""
        self.add_output(now)
        if isinstance(name := line.get("alert"), str):
            self._from_program(name, line, now)
            return
        if not self._has_metrics:
            self._has_metrics, self._reference = True, now  # compilation is over, so checkpoints are due from here
        self._step = max(self._step, numeric(line.get("step")) or 0.0)
        phase = str(line.get("phase", ""))
        self._judge_finite(line, phase, now)
        self._judge_loss(line, phase, now)
        self._judge_speed(line, phase, now)
        self._judge_workers(line, phase, now)

    def add_output(self, now: float) -> None:
        """Take note that some worker has printed something."""
        self._update(NO_OUTPUT, False, "", now)
        self._update(NO_OUTPUT, False, "", now)

    def add_silence(self, seconds: float, now: float) -> None:
        """Judge that no worker has printed or written anything for so long."""
        limit = self._settings.silent_minutes
        if limit is not None and seconds > 60 * limit and not self._sustained[NO_OUTPUT].active:
            text = (
                f"no worker has printed or logged anything for {format_duration(seconds)}; "
                "see `slipway logs --worker all`; recovery.hang_timeout_seconds ends a program that hangs"
            )
            self._update(NO_OUTPUT, True, text, now - seconds)

    def add_checkpoint(self, newest: tuple[int, float] | None, step: float, now: float) -> None:
        """Judge the newest checkpoint.

        Args:
            newest: its step, and when it was written; None if there is none.
            step: the last step that the program had reported when the bucket was asked.
            now: seconds since the epoch.
        """
        if newest is not None and self._newest is not None and newest[0] != self._newest[0]:
            self._gaps.append(newest[1] - self._newest[1])
        self._newest = newest or self._newest
        age = now - max(self._reference, newest[1] if newest else 0.0)
        wanted = self._stale_limit(newest, step, age)
        stale = bool(wanted)
        what = f"the newest checkpoint is of step {newest[0]}" if newest else "there is no checkpoint yet"
        text = (
            f"{what}, {format_duration(max(0.0, age))} old, {wanted}: a failure would cost that work; look for "
            "errors of saving in `slipway logs`{', or change checkpoint.save_interval' if self._is_trainer else ''}"
        )
        for _ in range(LINES_TO_CHANGE):  # one look at the bucket is certain
            self._update(STALE_CHECKPOINT, stale, text, now)

    def _stale_limit(self, newest: tuple[int, float] | None, step: float, age: float) -> str:
        """Return how the age of the newest checkpoint compares with what it should be; empty if it is not stale."""
        settings = self._settings
        if settings.checkpoint_minutes is not None:
            return f"more than {settings.checkpoint_minutes:g} min" if age > 60 * settings.checkpoint_minutes else ""
        factor = settings.checkpoint_intervals
        if factor is None or age <= MIN_CHECKPOINT_AGE:
            return ""
        if self._save_interval is not None:
            behind = step - (newest[0] if newest else 0)
            late = self._has_metrics and behind > factor * self._save_interval
            return f"and {behind:.0f} updates behind, with one due every {self._save_interval}" if late else ""
        usual = max(self._gaps, default=None)  # a program of the user's own need not save any
        late = usual is not None and age > factor * usual
        return f"while they came at most {format_duration(usual)} apart" if usual is not None and late else ""

    def _judge_finite(self, line: Mapping[str, Any], phase: str, now: float) -> None:
        if not self._settings.not_finite:
            return
        wrong = [name for name in LOSSES if name in line and finite_number(line[name]) is None]  # null stands for NaN
        skipped = numeric(line.get("skipped"))
        if line.get("finite") == 0 or (skipped is not None and self._skipped is not None and skipped > self._skipped):
            wrong = wrong or ["loss"]
        self._skipped = self._skipped if skipped is None else skipped
        if wrong or any(name in line for name in LOSSES):
            text = (
                f"{' and '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} NaN or infinite at {self._at(line)}; "
                + self._hint(
                    "lower optimizer.lr, or set optimizer.nan_policy", "lower the learning rate, or look at the data"
                )
            )
            self._update(NOT_FINITE, bool(wrong), text, now, phase)

    def _judge_loss(self, line: Mapping[str, Any], phase: str, now: float) -> None:
        """Compare the loss with its median. That of GRPO is noise around 0 and no measure of anything."""
        loss, factor = numeric(line.get("loss")), self._settings.loss_spike_factor
        if loss is None or factor is None or phase == "grpo":
            return
        history = self._history("loss", phase, LOSS_LINES, ENOUGH_LOSSES)
        limit, usual = self._limit(LOSS_SPIKE, phase, history.spike_limit(factor)), history.median()
        spike = limit is not None and loss > limit
        text = (
            f"the loss is {format_number(float(loss))} at {self._at(line)}, "
            f"{f'{loss / usual:.1f} times its recent median' if usual else 'above its usual values'}; if it does "
            "not return, "
            + self._hint(
                "lower optimizer.lr or optimizer.max_grad_norm", "lower the learning rate, or look at the data"
            )
        )
        self._update(LOSS_SPIKE, spike, text, now, phase, limit)
        if not spike:
            history.values.append(float(loss))

    def _judge_speed(self, line: Mapping[str, Any], phase: str, now: float) -> None:
        seconds, tokens = _positive(line.get("step_time")), _positive(line.get("tokens_per_second"))
        wait, settings = numeric(line.get("data_time")), self._settings
        if seconds and wait is not None and (most := settings.data_wait_fraction) is not None:
            text = f"{wait / seconds:.0%} of each step is spent waiting for data at {self._at(line)}; " + self._hint(
                "put the data into a bucket of the pod's region (docs/data.md)", "read ahead, in threads"
            )
            self._update(DATA_WAIT, wait > most * seconds, text, now, phase)
        if tokens and (floor := settings.min_tokens_per_second) is not None:
            text = f"{tokens:,.0f} tokens/s at {self._at(line)}, wanted are at least {floor:,.0f}"
            self._update(BELOW_FLOOR, tokens < floor, text, now, phase)
        speed, fraction = tokens or (1 / seconds if seconds else None), settings.slow_fraction
        if speed is None or fraction is None:
            return
        speeds = self._history("speed", phase, SPEED_LINES, ENOUGH_SPEEDS)
        times = self._history("step_time", phase, SPEED_LINES, ENOUGH_SPEEDS)
        usual, usual_time = speeds.median(), times.median()
        limit = self._limit(SLOW, phase, fraction * usual if usual else None)
        # shorter responses lower the tokens per second of GRPO although no step takes longer
        longer = seconds is None or usual_time is None or seconds * fraction > usual_time
        slow = limit is not None and speed < limit and longer
        unit = "tokens" if tokens else "steps"
        compared = f"{speed / usual:.0%} of the usual {format_number(float(usual))}" if usual else "slower than usual"
        text = (
            f"{format_number(float(speed))} {unit} per second at {self._at(line)}, {compared}; "
            "see where the time goes in `slipway report`, and look at the hosts with `slipway exec -- top -bn1`"
        )
        self._update(SLOW, slow, text, now, phase, limit)
        if not slow:
            speeds.values.append(speed)
            if seconds:
                times.values.append(seconds)

    def _judge_workers(self, line: Mapping[str, Any], phase: str, now: float) -> None:
        """Judge the share of each step by which one worker delays the others, as the bundled trainer measures it."""
        worker, share = numeric(line.get("slow_worker")), numeric(line.get("slow_worker_share"))
        most = self._settings.slow_worker_fraction
        if worker is None or share is None or most is None:
            return
        parts = {"its host": "slow_worker_host_time", "its chips": "slow_worker_device_time"}
        seconds = {what: numeric(line.get(name)) or 0.0 for what, name in parts.items()}
        causes = " and ".join(f"{format_number(float(value))} s by {what}" for what, value in seconds.items() if value)
        text = (
            f"worker {worker:.0f} delays the others by {share:.0%} of each step at {self._at(line)}"
            f"{f', {causes}' if causes else ''}; look at it with `slipway exec --worker {worker:.0f} -- top -bn1`"
        )
        self._update(SLOW_WORKER, share > most, text, now, phase)

    def _from_program(self, name: str, line: Mapping[str, Any], now: float) -> None:
        """Pass on an alert of the program, which decides itself when it is over."""
        name = " ".join(printable(name).split())[:MAX_NAME] or "alert"
        if name in KEYS:  # its own words for what is judged here
            name = f"{name} (program)"
        active = any(alert.name == name and alert.ended is None for alert in self._alerts)
        if line.get("over") is True:
            if active:
                self._end(name, now)
        elif not active and len({a.name for a in self._alerts if a.name not in KEYS} | {name}) <= MAX_FROM_PROGRAM:
            text = " ".join(printable(str(line.get("message", ""))).split())[:MAX_MESSAGE]
            self._begin(Alert(name, text or f"raised by the program at {self._at(line)}", now))

    def _update(self, name: str, bad: bool, text: str, now: float, phase: str = "", limit: float | None = None) -> None:
        watch = self._sustained[name]
        if not watch.update(bad, now):
            return
        if watch.active:
            self._phase[name] = phase
            since = now if watch.since is None else watch.since
            self._begin(Alert(name, f"{text} (alerts.{KEYS[name]})", since, limit=limit))
        else:
            self._end(name, now)

    def _limit(self, name: str, phase: str, fresh: float | None) -> float | None:
        """Return the limit at which the alert began while it lasts, and else the fresh one."""
        if self._sustained[name].active and self._phase.get(name) in (None, phase):
            for alert in reversed(self._alerts):
                if alert.name == name and alert.ended is None:
                    return alert.limit
        return fresh

    def _hint(self, trainer: str, own: str) -> str:
        return trainer if self._is_trainer else own

    @property
    def _is_trainer(self) -> bool:
        return self._save_interval is not None

    def _history(self, metric: str, phase: str, size: int, enough: int) -> History:
        return self._histories.setdefault((metric, phase), History(size, enough))

    def _begin(self, alert: Alert) -> None:
        self._alerts.append(alert)
        self._changes.append(alert)

    def _end(self, name: str, now: float) -> None:
        for i, alert in enumerate(self._alerts):
            if alert.name == name and alert.ended is None:
                self._alerts[i] = alert.over(now)
                self._changes.append(self._alerts[i])

    @staticmethod
    def _at(line: Mapping[str, Any]) -> str:
        step = numeric(line.get("step"))
        return "an unknown step" if step is None else f"step {step:.0f}"


def _positive(value: Any) -> float | None:
    number = numeric(value)
    return float(number) if number is not None and number > 0 else None
