"""Alerts about a run that goes on, but not as it should."""

from pydantic import Field

from conf.schema.base import Strict


class RunAlerts(Strict):
    """Thresholds of the alerts that the controller raises while it follows a run. null or false: off.

    They show in `status`, in the report and as event `alert` of `notify`, and never end a run (docs/alerts.md).
    """

    slow_fraction: float | None = Field(
        gt=0,
        lt=1,
        description="slow: the throughput is below this fraction of its median in the last 50 lines of metrics.",
    )
    min_tokens_per_second: float | None = Field(
        gt=0, description="below floor: the metric tokens_per_second is below this number. null: off."
    )
    data_wait_fraction: float | None = Field(
        gt=0, lt=1, description="data wait: more than this fraction of a step is spent waiting for data."
    )
    slow_worker_fraction: float | None = Field(
        gt=0,
        lt=1,
        description="slow worker: one worker delays the others by more than this fraction of a step of the bundled "
        "trainer's lm and puzzle loops.",
    )
    sustained_seconds: float = Field(
        ge=0,
        description="Seconds for which slow, below floor, data wait and slow worker must last before they are raised.",
    )
    loss_spike_factor: float | None = Field(
        gt=1, description="loss spike: the loss exceeds this multiple of the median of the last 20 metrics lines."
    )
    not_finite: bool = Field(
        description="not finite: the loss or the gradient norm is NaN or infinite, or an update was skipped."
    )
    silent_minutes: float | None = Field(
        gt=0, description="no output: no worker has printed a line or written a metric for this many minutes."
    )
    checkpoint_intervals: float | None = Field(
        gt=1,
        description="stale checkpoint: the newest one is older than this many intervals: checkpoint.save_interval for "
        "the bundled trainer, the longest interval so far for your own program; at least five minutes.",
    )
    checkpoint_minutes: float | None = Field(
        gt=0, description="stale checkpoint: the newest one is older than this. null: checkpoint_intervals decides."
    )
