"""The run itself: its name, SSH, recovery and cleanup; alerts about it, and who is told; and sweeps of many runs."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator

from conf.reference import Reference
from conf.schema.base import VOLATILE, LocalPath, Strict
from conf.schema.program import SecretSource

CaseName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][-\w]{0,40}$")]


class Search(Strict):
    """Search that draws values one by one, in place of a grid."""

    method: Literal["random", "optuna"] = Field(description="random: independent draws. optuna: TPE, with pruning.")
    trials: int = Field(ge=1, le=100_000, description="Number of runs.")
    metric: str = Field(min_length=1, description="Metric to optimize, from summary.json or metrics.jsonl.")
    mode: Literal["min", "max"] = Field(description="Whether to minimize or maximize the metric.")
    prune: bool = Field(description="With optuna, stop runs worse than the median of the others at the same step.")
    seed: int = Field(ge=0, lt=2**31, description="Random seed of the draws.")


class Hypothesis(Strict):
    """What a sweep asks, and what its authors expect of it. Written before its runs; it changes nothing in them."""

    experiment: str = Field(min_length=1, description="Experiment that it is about, as in +experiment=NAME.")
    question: str = Field(min_length=1, description="What the sweep asks.")
    expected: str = Field(min_length=1, description="The answer that is expected.")
    decision: str = Field(min_length=1, description="What the result must show for the expectation to hold.")
    metric: str = Field(min_length=1, description="Metric that decides, from metrics.jsonl or summary.json.")
    baseline: str = Field(min_length=1, description="Setting that the others are compared with: a case, or overrides.")

    def misfit(self, runs: Iterable[Iterable[str]]) -> str:
        """Return how many of the runs, given by their overrides, are of another experiment; empty if none is."""
        found = [_experiment(overrides) for overrides in runs]
        others = [name for name in found if name != self.experiment]
        if not others:
            return ""
        names = " and ".join(f"+experiment={name}" if name else "no experiment" for name in dict.fromkeys(others))
        return f"{len(others)} of {len(found)} runs are of {names}, not of +experiment={self.experiment}"


class Sweep(Strict):
    """Runs that `-m` starts. No key here changes what a single run computes."""

    pods: int = Field(ge=1, le=1000, description="Runs at the same time, each on its own pod.")
    on_failure: Literal["retry", "skip", "stop"] = Field(
        description="After a failed run. retry: run it again up to `retries` times, then skip. skip: continue with "
        "the others. stop: start no more runs."
    )
    retries: int = Field(ge=0, le=100, description="Times that one run may be retried.")
    params: dict[str, str] = Field(description="Values by key, as on the command line, e.g. {run.seed: '0,1,2'}.")
    cases: dict[CaseName, tuple[str, ...]] = Field(
        description="Overrides by case name. Each case runs with all of params. {}: one case, no overrides."
    )
    search: Search | None = Field(description="Search for good values. null: run the whole grid.")
    hypothesis: Hypothesis | None = Field(
        default=None, description="What is asked and expected; `plan` and `report` print it. null: nothing was said."
    )


def _experiment(overrides: Iterable[str]) -> str:
    """Return the experiment that the last such override chooses; empty if none does."""
    pairs = (word.lstrip("+").partition("=") for word in overrides)
    return next(iter([value for key, _, value in pairs if key == "experiment"][::-1]), "")


class Ssh(Strict):
    user: Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")] = Field(
        description="User name on the workers. With OS Login, Google assigns another."
    )
    method: Literal["auto", "external", "iap", "internal"] = Field(
        description="How to reach the workers. auto: the external address if a firewall rule admits this machine, "
        "else Google's Identity-Aware Proxy if a rule admits it, else the internal address."
    )
    host_keys: Literal["guest_attributes", "follow_guest_attributes", "trust_on_first_use"] = Field(
        description="Accepted host key. guest_attributes: the one that Google publishes at the first connection, or "
        "after a repair that the controller saw. follow_guest_attributes: the one it publishes now. "
        "trust_on_first_use: the first."
    )
    os_login: Literal["auto"] | bool = Field(
        description="Put the key into your OS Login profile, not the metadata. auto: follow the project."
    )
    connect_timeout_seconds: float = Field(gt=0, description="Timeout of an SSH connection, in seconds.")
    ready_timeout_seconds: float = Field(gt=0, description="Seconds that a new worker may refuse SSH.")


class Run(Strict):
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-_a-z0-9]{0,40}[a-z0-9])?$")]
    seed: int = Field(ge=0, lt=2**31)
    compile_cache: Annotated[bool, VOLATILE] = Field(
        description="Keep the trainer's compiled programs with the run's results, for use on replacement VMs."
    )
    state_dir: Annotated[LocalPath, VOLATILE] = Field(
        description="Local folder for keys, events and the emulated cloud."
    )

    @field_validator("state_dir")
    @classmethod
    def _is_local(cls, value: str) -> str:
        if "://" in value:
            raise ValueError(f"{value} is no folder of this machine, where keys and events are kept; write a path")
        return value


ProgramResponse = Literal["restart_program", "restart_worker", "replace_node", "move_zone", "give_up"]
PodResponse = Literal["replace_node", "move_zone", "give_up"]


class RecoveryPolicy(Strict):
    """Response to each kind of failure. An impossible one is escalated: a program cannot start on a worker that does
    not respond, Google cannot restart one worker of several, and an adopted pod is not replaced.
    """

    preempted: PodResponse = Field(description="The pod was preempted.")
    maintenance: Literal["wait"] | ProgramResponse = Field(description="wait: up to tpu.create_timeout_minutes.")
    unhealthy_host: ProgramResponse = Field(description="Google, libtpu or a missing chip indicates an unhealthy host.")
    corruption: ProgramResponse = Field(
        description="Hardware changed bits on a worker. The second time on one pod, restart_program replaces it."
    )
    worker_lost: ProgramResponse = Field(description="A worker does not respond, or something else killed its program.")
    network_lost: Literal["wait", "give_up"] = Field(description="Neither the workers nor Google's API can be reached.")
    hung: ProgramResponse = Field(
        description="No step and no output for hang_timeout_seconds. All workers' stacks are saved first."
    )
    out_of_hbm: ProgramResponse = Field(description="The program ran out of TPU memory.")
    out_of_ram: ProgramResponse = Field(description="A host ran out of memory.")
    disk_full: ProgramResponse = Field(description="A worker's disk is full.")
    program_error: ProgramResponse = Field(description="The program ended with any other error.")
    device_mismatch: ProgramResponse = Field(description="All workers have other devices than planned.")
    workers_disagree: ProgramResponse = Field(description="Code, config or packages differ between workers.")
    setup_failure: ProgramResponse = Field(description="Setup of a worker failed.")


class Recovery(Strict):
    driver: Literal["laptop", "bastion"] = Field(
        description="Where the controller runs. laptop: this machine. bastion: a small VM that `up` creates."
    )
    lease_duration_seconds: float = Field(
        ge=15, description="Seconds without a lease renewal before another controller may take over the pod."
    )
    max_preemptions: int = Field(ge=0, description="Recoveries per run after the pod or a part of it was lost or hung.")
    max_create_attempts: int = Field(ge=1, description="Creation attempts that may fail for lack of capacity.")
    max_program_failures: int = Field(
        ge=0,
        description="Restarts after errors of the program itself. A newer checkpoint resets the count.",
    )
    max_without_progress: int = Field(
        ge=1, description="Failures in a row without a new checkpoint before giving up; preemptions do not count."
    )
    poll_seconds: float = Field(gt=0, description="Seconds between checks of the node's state during a run.")
    heartbeat_timeout_seconds: float = Field(
        gt=5, description="Silence after which a worker is lost while others respond. Heartbeats: every 5 s."
    )
    hang_timeout_seconds: float | None = Field(
        gt=0,
        description="Seconds without a step or output before the program counts as hung. null: ten times the longest "
        "step so far, at least 900.",
    )
    preemption_signal: Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"] | None = Field(
        description="Signal sent to all processes of your own program when Google announces a preemption. null: none. "
        "The bundled trainer gets SIGTERM."
    )
    exit_on_exception: bool = Field(
        description="End a process of your own JAX program at once after an uncaught exception or sys.exit with an "
        "error, instead of waiting five minutes for the other processes at exit."
    )
    policy: RecoveryPolicy


class Cleanup(Strict):
    on_success: Literal["delete", "keep"] = Field(description="What happens to the pod when the run has finished.")
    on_failure: Literal["delete", "keep"] = Field(description="What happens to the pod when the program has failed.")
    idle_minutes: float | None = Field(
        ge=0.5,
        description="Minutes without a program or login before the pod deletes itself, at least 0.5: in less, what "
        "guards the pod may not yet have seen that it is in use. null: never.",
    )
    heartbeat_timeout_hours: float | None = Field(
        gt=0,
        description="Hours without a heartbeat of Slipway or a login before the pod deletes itself, even if SSH never "
        "worked. Fixed when the pod is created. null: never.",
    )
    bastion_max_days: float | None = Field(
        gt=0,
        le=120,
        description="Days after which Compute Engine deletes the bastion, whatever it does. null: never.",
    )


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


Event = Literal["end", "failure", "preemption", "alert"]


class Notify(Strict):
    """Who is told about a run. A notification that fails is a warning, and never ends a run."""

    webhook: SecretSource | None = Field(
        description="Source of an HTTPS address that gets JSON such as Slack's: env:SLACK_WEBHOOK, file:PATH, or "
        "secretmanager:projects/P/secrets/S. null: none. The address itself is a secret, and never recorded."
    )
    notifier: Reference | None = Field(
        description="module:name of a function that gets the same event (docs/extend.md). null: none."
    )
    events: tuple[Event, ...] = Field(description="Events to notify of: end, failure, preemption, alert.")

    @field_validator("webhook")
    @classmethod
    def _names_a_variable(cls, value: str | None) -> str | None:
        if value == "env":
            raise ValueError("name the variable, e.g. env:SLACK_WEBHOOK")
        return value
