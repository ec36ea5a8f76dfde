"""The command line: `slipway [VERB] [--flags] [+experiment=NAME] [key=value ...]`.

`key=value` is only ever config; options of a verb are flags. Flags never enter the config or a run's identity.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import shlex
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from controller import recall
from controller.compose import OVERRIDE, compose, groups, laid_over
from controller.errors import ConfigError, SlipwayError
from controller.printing import only_showing

if TYPE_CHECKING:  # a verb that composes nothing need not wait for the schema
    from conf.schema import Config, Problem
    from controller.finding import Finding

VERBS = {
    "up": "make the plan true, launch the program and follow it (the default)",
    "plan": "show what would change, what it costs and what is wrong; changes nothing",
    "fit": "does it fit? the TPU compiler on this machine, per program: memory, FLOPs",
    "rehearse": "the same plan, scaled down, on an emulated cloud of its own, a preemption included",
    "status": "the pod, the run and its workers",
    "runs": "the table of runs: filter, sort, export; what differs between two",
    "logs": "what the program prints",
    "ssh": "a shell on one worker",
    "exec": "run a command on one worker or all: slipway exec --worker all -- nproc",
    "forward": "reach a port of a worker on this machine: slipway forward 8888",
    "verify": "compare code, packages, config, devices and network of all workers",
    "cancel": "end the run; the pod stays",
    "stop": "stop a pod of one VM; the next up starts it",
    "down": "delete the pod; --all: the network, the bucket and the rest too",
    "orphans": "what of ours is billed and no run uses; --delete removes it",
    "init": "first use: find credentials, project and a zone with quota; write slipway/cloud/mine.yaml",
    "localcloud": "the emulated cloud by hand: start, stop, wipe, env, requests",
}
MULTIRUN = frozenset({"up", "plan", "status", "down"})
"""What can be done with all runs of a sweep."""
EXAMPLES = """examples:
  slipway +experiment=quickstart                       GRPO on an emulated v5litepod-16, on this machine
  slipway plan +experiment=gemma2b_gsm8k               what would be created, and its price
  slipway rehearse +experiment=gemma2b_gsm8k           all of it on this machine, scaled down, with a preemption
  slipway +experiment=gemma2b_gsm8k tpu.zone=us-west4-a optimizer.lr=1e-6
  slipway -m +experiment=quickstart optimizer.lr=1e-4,7e-4 run.seed=0,1,2 sweep.pods=2
  slipway logs --worker 3 --follow +experiment=gemma2b_gsm8k
  slipway exec --worker all -- free -g
  slipway down +experiment=gemma2b_gsm8k
  slipway runs --where state=finished --sort metrics.accuracy_after
"""


@dataclass(frozen=True)
class Command:
    """A parsed command line."""

    verb: str
    flags: argparse.Namespace
    overrides: tuple[str, ...]
    rest: tuple[str, ...] = ()
    """What stands behind `--`: a command for the workers."""

    @property
    def run(self) -> str:
        """The id that --run names, empty where the config words say what is meant."""
        return getattr(self.flags, "run", None) or ""

    def config(self) -> tuple[Config, list[Finding]]:
        """The composed config and the findings of preflight.

        Raises:
            ConfigError: the config is unusable; every problem at once, those between sections included.
        """
        from controller.preflight import preflight

        config, problems = self._judged()
        findings = preflight(config) if config else []
        if config is None or problems:
            raise ConfigError([*problems, *(f for f in findings if f.severity == "error")])
        return config, findings

    def bare_config(self) -> Config:
        """The config of a verb that needs the cloud and no program, so that a missing program is no error.

        Raises:
            ConfigError: what the schema finds.
        """
        config, problems = self._judged()
        if config is None or problems:
            raise ConfigError(problems)
        return config

    def _judged(self) -> tuple[Config | None, list[Problem]]:
        """What the words mean; with --plan what the file says, with the words laid over it."""
        if file := getattr(self.flags, "plan", None):
            from conf.schema import judge
            from controller.records.planfile import planned

            return judge(laid_over(planned(Path(file)), self.overrides))
        return compose(self.overrides, extra_dir=Path.cwd() / "slipway")

    def checked_config(self, without: Set[str] = frozenset()) -> Config:
        """The config for a verb that acts: an error finding stops it, others are printed.

        Args:
            without: checks that the verb does not wait for.

        Raises:
            ConfigError: every error finding.
        """
        config, findings = self.config()
        findings = [f for f in findings if f.check not in without]
        if errors := [f for f in findings if f.severity == "error"]:
            raise ConfigError(errors)
        for finding in findings:
            print(f"{finding.severity}: {finding}", file=sys.stderr)
        return config


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake is our kind of error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see slipway --help")


def parse(argv: Sequence[str]) -> Command:
    """Split a command line into verb, flags and overrides.

    Raises:
        ConfigError: an unknown verb or flag, with the nearest one.
    """
    argv, rest = _split(argv)
    are = [_is_override(word, before) for word, before in zip(argv, ["", *argv], strict=False)]
    overrides = tuple(word for word, is_override in zip(argv, are, strict=True) if is_override)
    words = [word for word, is_override in zip(argv, are, strict=True) if not is_override]
    verb = next((w for w in words if not w.startswith("-")), "up")
    if words and not words[0].startswith("-"):
        words = words[1:]
    else:
        verb = "up"
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        if verb in groups(Path.cwd() / "slipway")["experiment"]:
            hint = f"did you mean +experiment={verb}? "
        raise ConfigError(f"{verb!r} is no verb; {hint}verbs: {', '.join(VERBS)} (config is key=value)")
    if rest and verb not in ("ssh", "exec"):
        raise ConfigError(f"{verb} takes nothing behind --; only ssh and exec run a command")
    return Command(verb, _parser(verb).parse_args(words), overrides, rest)


def _is_override(word: str, before: str) -> bool:
    """Is it `key=value` or `~key` of the config? Behind --where it is a condition."""
    looks = not word.startswith("-") and OVERRIDE.match(word) is not None and ("=" in word or word[0] == "~")
    return looks and before != "--where"


def _split(argv: Sequence[str]) -> tuple[Sequence[str], tuple[str, ...]]:
    """What is ours, and what stands behind `--`."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    return argv[:at], tuple(argv[at + 1 :])


def _parser(verb: str) -> _Parser:
    listing = "\n".join(f"  {name:<12}{words}" for name, words in VERBS.items())
    parser = _Parser(
        prog=f"slipway {verb}" if verb != "up" else "slipway",
        usage=f"slipway {'[VERB]' if verb == 'up' else verb} [--flags] [+experiment=NAME] [key=value ...]",
        description=f"{VERBS[verb]}\n\nverbs:\n{listing}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON document (or JSON lines while following) on stdout"
    )
    if verb in MULTIRUN:
        parser.add_argument("-m", "--multirun", action="store_true", help="a sweep: all runs of a=1,2 b=range(0,3) …")
    if verb == "up" or verb in recall.OF_A_RUN:
        how = "repeat, or go on with," if verb == "up" else "mean"
        parser.add_argument("--run", metavar="ID", help=f"{how} the run of this id as it is on record, code included")
    if verb in ("up", "down", "cancel", "stop", "orphans", "init"):
        parser.add_argument("--yes", action="store_true", help="do not ask")
    if verb == "up":
        parser.add_argument("--detach", action="store_true", help="return once the program has started")
        parser.add_argument("--queue", action="store_true", help="wait while another run has the pod")
        parser.add_argument("--take-over", action="store_true", help="act in place of the controller that does")
    if verb in ("logs", "ssh", "forward"):
        parser.add_argument("--worker", default="0", metavar="N", help="which worker (default 0)")
    if verb == "exec":
        parser.add_argument("--worker", default="all", metavar="N|all", help="which worker (default all)")
    if verb == "forward":
        parser.add_argument("port", metavar="PORT[:REMOTE]", help="here, and on the worker if that is another")
    if verb == "logs":
        parser.add_argument("--follow", action="store_true", help="go on until the program ends")
    if verb in ("up", "plan"):
        parser.add_argument("--plan", metavar="FILE", help="the config of a file that plan --save has written")
    if verb == "plan":
        parser.add_argument("--save", action="store_true", help="write the config to plans/<run id>.yaml")
    if verb == "runs":
        parser.add_argument("--where", action="append", default=[], metavar="COND", help="such as metrics.loss<0.5")
        parser.add_argument("--sort", metavar="KEY", help="such as metrics.accuracy_after; the largest comes last")
        parser.add_argument("--last", type=int, metavar="N", help="only so many, from the end")
        parser.add_argument("--csv", action="store_true", help="comma-separated values, every key a column")
        parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="what differs between two runs")
        parser.add_argument("--refresh", action="store_true", help="read the bucket, for runs of other machines")
    if verb == "down":
        parser.add_argument("--all", action="store_true", help="also the network, the bucket and the service account")
    if verb == "orphans":
        parser.add_argument("--delete", action="store_true", help="delete them, after asking")
    if verb == "rehearse":
        parser.add_argument("--chaos", type=int, metavar="SEED", help="a schedule of misfortune drawn from a seed")
    if verb == "init":
        parser.add_argument("--zone", help="a zone from the list, instead of being asked")
        parser.add_argument("--no-bucket", action="store_true", help="do not make the bucket now")
    if verb == "localcloud":
        parser.add_argument("action", choices=["start", "stop", "wipe", "env", "requests"])
    return parser


def _with_recalled(command: Command) -> Command:
    """A verb that looks at a run means, without config words, the one last started from this folder."""
    if command.overrides or command.run or command.verb not in recall.VERBS:
        return command
    words, run = recall.recall(Path.cwd())
    if not words and not run and command.verb in recall.OF_THE_PROJECT:
        return command
    if not words and not run:
        raise ConfigError(
            f"no run was started from this folder; {command.verb} needs its words: +experiment=NAME key=value ..."
        )
    print(f"({shlex.join([*(['--run', run] if run else []), *words])})", file=sys.stderr)
    if run and command.verb in recall.OF_A_RUN:
        command.flags.run = run
    return replace(command, overrides=words)


def run(argv: Sequence[str]) -> int:
    """Parse and act; returns the exit code. Errors of ours are words on stderr, never a traceback."""
    with only_showing():
        return _run(argv)


def _run(argv: Sequence[str]) -> int:
    try:
        command = _with_recalled(parse(argv))
        if getattr(command.flags, "multirun", False):
            return importlib.import_module("controller.sweep.verbs").VERBS[command.verb](command)
        verb: Any = importlib.import_module(f"controller.verbs.{command.verb}")  # only this verb's imports are paid for
        return verb.run(command)
    except SlipwayError as error:
        for line in error.problems if isinstance(error, ConfigError) else [str(error)]:
            print(f"error: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `slipway logs | head`
        sys.stderr.close()
        return 0
