"""How long the controller takes with a large pod of the emulated cloud; for docs/performance.md.

    python -m tests.bench.fleet [--type v5litepod-256] [--repeat 5]

Not run by pytest.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from controller.cli import main as cli
from controller.connect import open_context, project_of
from controller.emulator import run_emulator_verb, state_folder
from controller.plan.build import build_plan
from controller.reconcile import reconcile
from tests.bench.scale import command

QUOTA = "cloud.quotas={INSTANCES: 200, IN_USE_ADDRESSES: 200}"
ECHO = 'program.command=[sh,-c,"echo hello"]'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--type", default="v5litepod-256")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home, repository = Path(folder, "home"), Path(folder, "repository")
        repository.mkdir()
        (repository / "hello.txt").write_text("hello\n")
        os.chdir(repository)
        os.environ["SLIPWAY_HOME"] = str(home)
        words = ["cloud=local", "program=command", "env.packages=none", "cleanup.on_success=keep", QUOTA, ECHO]
        words.append(f"tpu.accelerator_type={options.type}")
        try:
            measure(words, options)
        finally:
            run_emulator_verb(["wipe"], state_folder(str(home)))


def measure(words: Sequence[str], options: argparse.Namespace) -> None:
    print(f"{options.type}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, median of {options.repeat}\n")
    first, memory = slipway("up", *words)
    again, memory_again = slipway("up", *words, "run.seed=1")
    rows = [("`up` from nothing, echo program", first), ("`up` again, another run on the same pod", again)]
    config = cli.parse(["up", *words]).options.checked_config()
    plan = build_plan(config, project_of(config), Path.cwd())
    rows.append(("reconcile with nothing to do", repeated(options.repeat, lambda: nothing_to_do(config, plan))))
    rows.append(("`slipway status`, whole command", repeated(options.repeat, lambda: slipway("status", *words)[0])))
    table(["what", "seconds"], [[what, f"{seconds:.2f}"] for what, seconds in rows])
    print(f"memory of the controller during `up`: {max(memory, memory_again):.0f} MB\n")
    with open_context(config) as (context, _):
        node: Any = plan.observe_pod(context)
        fan_out(context, node, words, options)


def nothing_to_do(config: Any, plan: Any) -> float:
    """Seconds to find that all is as wanted, opening the connections to the workers included."""
    with open_context(config) as (context, _):
        acts: list[str] = []
        context.events.add_listener(lambda e: acts.append(e.subject) if e.kind == "step_started" else None)
        began = time.perf_counter()
        reconcile(plan.resources, context)
        seconds = time.perf_counter() - began
    assert not acts, f"there was something to do: {acts}"
    return seconds


def fan_out(context: Any, node: Any, words: Sequence[str], options: argparse.Namespace) -> None:
    """`true` on all workers: a connection each, then again on the connections that are open."""
    rounds = [on_a_fleet(context, node) for _ in range(options.repeat)]
    rows = [
        (f"slipway, {kind}", statistics.median(each))
        for kind, each in zip(("cold", "warm"), zip(*rounds, strict=True), strict=True)
    ]
    whole = repeated(options.repeat, lambda: slipway("exec", *words, "--", "true")[0])
    rows.append(("`slipway exec -- true`, whole command", whole))
    table(["`true` on all workers", "seconds"], [[what, f"{seconds:.2f}"] for what, seconds in rows])


def on_a_fleet(context: Any, node: Any) -> tuple[float, float]:
    """What a call of the agent does: a channel of the worker's fabric connection, read by ourselves."""
    fleet = context.make_fleet(node.ssh_target(context))

    def run(i: int) -> None:
        link = fleet.connection(i)
        with link.channel() as channel:
            channel.exec_command("true")
            assert list(link.chunks(channel, 60)) == []
            assert link.exit_code(channel) == 0

    times = at_once(len(fleet), run), at_once(len(fleet), run)
    fleet.close()
    return times


def at_once(count: int, act: Callable[[int], None]) -> float:
    """Seconds until all of so many threads have done it."""
    threads = [threading.Thread(target=act, args=(i,)) for i in range(count)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def slipway(*words: str) -> tuple[float, float]:
    """Run a command; seconds, and the most memory it had, in MB."""
    done = command(words, Path.cwd(), Path(os.environ["SLIPWAY_HOME"]))
    return done.seconds, done.megabytes


def repeated(times: int, act: Callable[[], float]) -> float:
    return statistics.median(act() for _ in range(times))


def table(head: list[str], rows: list[list[str]]) -> None:
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")
    print()


if __name__ == "__main__":
    main()
