"""The world of one life: an emulated cloud, two laptops, a user who repeats `up` until the run has finished, and what
must be true afterwards."""

import contextlib
import json
import random
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from controller import emulator
from controller.config.compose import compose
from controller.core.errors import OverBudgetError
from controller.emulator import Emulator
from tests import planes
from tests.scenarios.chaos import counter
from tests.scenarios.chaos.harness import MAX_ATTEMPTS, assert_one_attempt_at_a_time, live_processes
from tests.soak.laptops import Laptop, Slipway
from tests.soak.lives import Disturbance, Life
from tests.soak.strikes import BUDGET, LAPTOP_CLOCK, STRIKES
from tests.trainer.processes import results

SECONDS_PER_STEP = 0.5
PATIENT = (
    "recovery.max_program_failures=8", "recovery.max_without_progress=8", "recovery.heartbeat_timeout_seconds=6",
    "recovery.lease_duration_seconds=15", "env.packages=image",
)  # fmt: skip
TRAINING = (
    "+experiment=lm_tinyshakespeare", "scale=tiny", "loop.steps=6", "loop.eval_interval=6",
    "loop.text_samples.interval=6", "logging.log_interval=1",
)  # fmt: skip
COUNTING = ("program=command", "program.command=[python,counting.py]")
TRAINING_POD = ("tpu.accelerator_type=v5p-16", "tpu.zone=us-east5-a")
"""Two workers of the same devices on either plane, so that one undisturbed run is there for both."""
LIMIT_HOURS, SPENT_HOURS = 1.0, 2 / 3600
LATE_SECONDS = 120.0
HANGS_SECONDS = {False: 600.0, True: 900.0}
"""Longer than any `up` takes, by whether it trains."""
REFUSED_SECONDS = 30.0
"""How long a request is tried again: the bucket takes one write a second of an object."""
POLL_SECONDS = 0.15
ENDED = re.compile(r"cancelled|deleted by|stopped by|released|took over|taken over|not running|has finished|ended ")


class BrokenInvariantError(AssertionError):
    """Something that must be true of every life is not."""


@dataclass
class Ending:
    """How a life ended: what is compared with an undisturbed one, and how it came to that."""

    weights: Any
    metrics: list[dict[str, Any]]
    struck: dict[str, str]
    ups: list[int]
    billed: float


@dataclass
class World:
    """Where a life takes place; everything is gone when it is closed."""

    folder: Path
    life: Life
    run_emulator_verb: Callable[..., tuple[int, str]]
    laptops: list[Laptop] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    struck: dict[str, str] = field(default_factory=dict)
    billed: float = 0.0
    _gone_by: float = 0.0
    _why_gone: str = ""
    _looked: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        repository = self.folder / "repository"
        repository.mkdir(parents=True)
        program = Path(counter.__file__).read_text()
        (repository / "counting.py").write_text(program.replace("time.sleep(0.03)", f"time.sleep({SECONDS_PER_STEP})"))
        self.laptops = [Laptop(self.folder / f"laptop-{i + 1}", repository) for i in range(2)]
        for laptop in self.laptops:
            laptop.home.mkdir(mode=0o700)
        (self.laptops[1].home / "localcloud").symlink_to(self.laptops[0].home / "localcloud")
        state = emulator.state_folder(str(self.laptops[0].home))
        self._open = contextlib.ExitStack()
        self._open.enter_context(emulator.mark_in_use(state))
        self._open.callback(self.run_emulator_verb, ["wipe"], state)
        config = compose(["program=command", "program.command=[ls]", "cloud=local", *self._cloud_words()])[0]
        assert config is not None
        flags = [f"--operation-seconds={self.life.operation_seconds}"]
        assert self.run_emulator_verb(["start", *flags], state) == (0, "")
        self.cloud: Emulator = emulator.ensure_running(config.cloud, str(self.laptops[0].home))  # pyright: ignore[reportArgumentType]
        self.began = time.monotonic()

    def close(self) -> None:
        for one in self.alive():
            one.signal(9)
        self._open.close()

    def _cloud_words(self) -> tuple[str, ...]:
        return (f"cloud.operation_seconds={self.life.operation_seconds}",)

    @property
    def words(self) -> tuple[str, ...]:
        life = self.life
        if life.training:
            return (
                *TRAINING,
                *TRAINING_POD,
                f"tpu.plane={life.plane.name}",
                *PATIENT,
                "cloud=local",
                *self._cloud_words(),
            )
        pod = life.plane.two if life.workers == 2 else life.plane.one
        return (*COUNTING, *pod, *PATIENT, "cloud=local", *self._cloud_words())

    # What is there

    def alive(self) -> list[Slipway]:
        return [one for laptop in self.laptops for one in laptop.started if one.alive]

    def start(self, laptop: Laptop, *verb: str, hours: float = LIMIT_HOURS, jump: int = 0) -> Slipway:
        limit = [f"budget.max_hours={hours:.6f}"] if verb[0] == "up" else []
        self.say(f"{laptop.home.name}: slipway {' '.join(verb)} {' '.join(limit)}")
        return laptop.start(*verb, *self.words, *limit, jump=jump)

    def pods(self) -> dict[str, Any]:
        """What is billed."""
        return billed(self.cloud.get("state"))

    def objects(self) -> list[str]:
        return [name for names in self.cloud.get("state")["objects"].values() for name in names]

    def read(self, name: str) -> bytes:
        return self._request("GET", f"{self._place(name)}?alt=media")

    def write(self, name: str, content: bytes) -> None:
        bucket = self._bucket(name)
        self._request("POST", f"upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}", content)

    def delete(self, name: str) -> None:
        self._request("DELETE", self._place(name))

    def fault(self, spec: dict[str, Any]) -> None:
        """A fault of the emulated cloud strikes now, or as soon as there is a pod."""
        self.cloud.post("faults", {"key": f"{spec} {len(self.log)}", "faults": [{**spec, "after_seconds": 0.0}]})

    def say(self, words: str) -> None:
        self.log.append(f"{time.monotonic() - self.began:6.1f} s  {words}")

    def must_be_gone_within(self, seconds: float, why: str) -> None:
        self._gone_by, self._why_gone = time.monotonic() + seconds, why

    def _place(self, name: str) -> str:
        return f"storage/v1/b/{self._bucket(name)}/o/{quote(name, safe='')}"

    def _bucket(self, name: str) -> str:
        buckets = self.cloud.get("state")["objects"]
        return next((bucket for bucket, names in buckets.items() if name in names), next(iter(buckets)))

    def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        url, deadline = f"{self.cloud.url}/t/{self.cloud.token}/{path}", time.monotonic() + REFUSED_SECONDS
        while True:
            try:
                with urllib.request.urlopen(urllib.request.Request(url, data=body, method=method)) as answer:
                    return answer.read()
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return b""  # it has gone in the meantime
                if error.code != 429 or time.monotonic() > deadline:
                    raise
                time.sleep(0.3)

    # The life

    def live(self, undisturbed: Ending | None = None) -> Ending:
        """Return how it ended. Raises BrokenInvariantError with all that was said.

        `undisturbed`: how a run that trains ends if nothing befalls it; None: this is that run.
        """
        try:
            ending = self._live()
            self._compare(ending, undisturbed)
            return ending
        except BrokenInvariantError as error:
            said = "\n".join(f"=== {one.file.name}: {one.code}\n{one.said[-6000:]}" for one in self._all())
            raise BrokenInvariantError("\n".join([str(error), *self.log, said])) from None

    def _all(self) -> list[Slipway]:
        return [one for laptop in self.laptops for one in laptop.started]

    def _live(self) -> Ending:
        waiting, codes = [one for one in self.life.disturbances if STRIKES[one.what]], []
        self.struck |= {one.what: "from the begin" for one in self.life.disturbances if one not in waiting}
        hours = SPENT_HOURS if BUDGET in self.struck else LIMIT_HOURS
        jump = self.life.seed if LAPTOP_CLOCK in self.struck else 0
        while not codes or not self.finished():
            self._check(len(codes) < MAX_ATTEMPTS, f"`up` has not finished after {MAX_ATTEMPTS} times: {codes}")
            known = self._all()
            up = self.start(self.laptops[0], "up", hours=hours, jump=jump)
            self._follow(waiting)
            for one in self._all():
                if one not in known:
                    self._judge(one, hours)
                    self._obey(one)
            codes.append(up.code)
            hours = LIMIT_HOURS
        for missed in waiting:
            self.struck.setdefault(missed.what, "")
        if BUDGET in self.struck and OverBudgetError.exit_code not in codes:
            self.struck[BUDGET] = ""
        return self._end(codes)

    def _follow(self, waiting: list[Disturbance]) -> None:
        """Strike whatever is due until every `slipway` has ended, and the pod is gone if it must."""
        began, seen = time.monotonic(), {}
        while self.alive() or self._gone_by:
            now, state = time.monotonic(), self.cloud.get("state")
            there = bool(billed(state))
            self.billed += (now - self._looked) * there
            self._looked = now
            names = [name for names in state["objects"].values() for name in names]
            for one in list(waiting):
                if any(one.after in name for name in names) or not one.after:
                    seen.setdefault(one, now)
                if one in seen and now >= seen[one] + one.delay:
                    self._strike(one, waiting)
            if not there:
                self._gone_by = 0.0
            self._check(not self._gone_by or now < self._gone_by, f"the pod outlives its limit: {self._why_gone}")
            hangs = HANGS_SECONDS[self.life.training] + 60 * len(self.life.disturbances)
            self._check(now - began < hangs, "it hangs")
            time.sleep(POLL_SECONDS)
        self._looked = time.monotonic()

    def _strike(self, one: Disturbance, waiting: list[Disturbance]) -> None:
        strike = STRIKES[one.what]
        if strike and (did := strike(self, random.Random(one.seed))):
            waiting.remove(one)
            self.struck[one.what] = did
            self.say(f"{one.what}: {did}")

    def _down(self) -> Slipway:
        down = self.start(self.laptops[0], "down", "--all", "--yes")
        self._follow([])
        self._judge(down)
        return down

    def _obey(self, one: Slipway) -> bool:
        """Delete the damaged leases that an error tells the user to delete; return whether there were any."""
        told = re.findall(r"`gcloud storage rm gs://[^/]+/([^`]+)`", " ".join(one.said.split()))
        for name in told:
            self.say(f"as told: delete {name}")
            self.delete(name)
        return bool(told)

    # What must be true

    def _check(self, fact: object, otherwise: str) -> None:
        if not fact:
            raise BrokenInvariantError(otherwise)

    def finished(self) -> bool:
        found = [name for name in self.objects() if re.fullmatch(r"runs/[^/]+/result\.json", name)]
        with contextlib.suppress(ValueError):
            return bool(found) and bool(json.loads(self.read(found[0]))["outcome"])
        return False

    def _judge(self, one: Slipway, hours: float = LIMIT_HOURS) -> None:
        """Exit code and last line are true."""
        code, said, name = one.code, one.said, f"{one.file.name} ({one.words[0]})"
        self._check("Traceback (most recent call last)" not in said, f"{name}: a traceback")
        lines = [line for line in said.splitlines() if line.strip()]
        if code == -9:
            self._check(one.killed, f"{name} was killed by somebody else")
        elif code == 0 and one.words[0] == "up":
            ends = " ".join(lines[-4:])
            true = self.finished() if re.search(r"finished after|has already finished", ends) else ENDED.search(ends)
            self._check(true, f"{name} exits with 0, and says: {ends}")
        elif code == 0:
            if one.words[0] == "down":
                gone = not self.pods() or any(u.alive for u in self._all())
                self._check(gone, f"{name} exits with 0, and the pod is there")
        else:
            self._check(code in range(1, 10), f"{name} exits with {code}")
            self._check(any(line.startswith("error: ") and line[7:].strip() for line in lines), f"{name}: no reason")
        if code == OverBudgetError.exit_code:
            late = self.billed - hours * 3600
            self._check(late < LATE_SECONDS, f"the budget is exceeded by {late:.0f} s")
            self._check(not self.pods(), "a run over its budget leaves its pod")

    def _end(self, codes: list[int]) -> Ending:
        """What the run has left; then everything goes, and nothing is billed any more."""
        kept = {
            name: self.read(name) for name in self.objects() if re.search("/(final|checkpoints)/|/metrics.jsonl$", name)
        }
        metrics = next((content for name, content in kept.items() if name.endswith("/metrics.jsonl")), b"")
        requests = self.cloud.requests()
        try:
            assert_one_attempt_at_a_time(requests, "two attempts at a time")
        except AssertionError as error:
            raise BrokenInvariantError(str(error)) from None
        weights = self._weights(kept) if self.life.training else sorted(v for n, v in kept.items() if "/final/" in n)
        down = self._down()
        while down.code and self._obey(down):
            down = self._down()
        self._check(down.code == 0, "`down --all` fails")
        state = self.cloud.get("state")
        left = {kind: state[kind] for kind in ("node", "queued", "compute", "serviceAccount", "bucket") if state[kind]}
        self._check(not left, f"`down --all` leaves {left}")
        self._check(not live_processes(self.cloud.state), "processes of workers live on")
        self._check(not state["mistake"], f"the emulated cloud has made a mistake: {state['mistake']}")
        self._check(self.billed <= LIMIT_HOURS * 3600 + LATE_SECONDS, f"billed for {self.billed:.0f} s")
        return Ending(
            weights, results([json.loads(line) for line in metrics.splitlines()]), self.struck, codes, self.billed
        )

    def _compare(self, ending: Ending, undisturbed: Ending | None) -> None:
        """Weights and metrics are those of an undisturbed run, bit for bit."""
        if not self.life.training:
            expected = [expected_count()] * self.life.workers
            self._check(ending.weights == expected, f"it counted {ending.weights}, not {expected}")
        elif undisturbed is not None:
            self._check(ending.weights == undisturbed.weights, "the weights differ from those of an undisturbed run")
            self._check(ending.metrics == undisturbed.metrics, "the metrics differ from those of an undisturbed run")

    def _weights(self, kept: dict[str, bytes]) -> Any:
        """The last checkpoint's arrays, as bytes."""
        from tests.scenarios.experiments.test_quickstart import weights

        folder = self.folder / "results"
        for name, content in kept.items():
            file = folder / name.split("/", 2)[2]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        found = {name: array.tobytes() for name, array in weights(folder).items()}
        shutil.rmtree(folder)
        return found


def billed(state: dict[str, Any]) -> dict[str, Any]:
    """What of the pods is billed: no request in a queue, no group beside its VMs, and nothing taken away or stopped."""
    ended = ("PREEMPTED", "TERMINATED", "STOPPED")
    found = planes.pods(state).items()
    parts = {
        name: part for name, part in found if name not in state["queued"] and "/instanceGroupManagers/" not in name
    }
    return {name: part for name, part in parts.items() if not {part.get("state"), part.get("status")} & {*ended}}


def expected_count() -> bytes:
    """What the counting program has counted at its end."""
    value = 1
    for step in range(1, counter.STEPS + 1):
        value = (value * 6364136223846793005 + step) % 2**64
    return f"{value:016x}".encode()
