"""The command line: `slipway [VERB] [--flags] [+experiment=NAME] [key=value ...]`.

`key=value` is only ever config; options of a verb are flags. Flags never enter the config or a run's identity.
"""

from __future__ import annotations

import difflib
import importlib
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.cli import last_command
from controller.cli.flags import HELP, VERBS, module_of, parser
from controller.config.compose import OVERRIDE, compose, groups, laid_over
from controller.core.errors import ConfigError, SlipwayError
from controller.core.printable import only_showing

if TYPE_CHECKING:  # a verb that composes nothing need not wait for the schema
    from conf.schema.config import Config
    from conf.schema.validation import ConfigProblem
    from controller.core.finding import Finding

HELP_WORDS = {*HELP.names}


@dataclass(frozen=True)
class Command:
    """A parsed command line."""

    verb: str
    flags: Namespace
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
        from controller.checks.preflight import preflight

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

    def _judged(self) -> tuple[Config | None, list[ConfigProblem]]:
        """What the words mean; with --plan what the file says, with the words laid over it."""
        if file := getattr(self.flags, "plan", None):
            from conf.schema.validation import validate
            from controller.records.plan_file import planned

            return validate(laid_over(planned(Path(file)), self.overrides))
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


def parse(argv: Sequence[str]) -> Command:
    """Split a command line into verb, flags and overrides.

    Raises:
        ConfigError: an unknown verb or flag, with the nearest one.
    """
    argv, rest = _split(argv)
    are = [_is_override(word, before) for word, before in zip(argv, ["", *argv], strict=False)]
    overrides = tuple(word for word, is_override in zip(argv, are, strict=True) if is_override)
    words = [word for word, is_override in zip(argv, are, strict=True) if not is_override]
    verb = words.pop(0) if words and not words[0].startswith("-") else ""
    if HELP_WORDS & set(words):
        return Command("help", Namespace(topic=_known(verb) if verb else None, json="--json" in words), ())
    verb = _known(verb or "up")
    if rest and verb not in ("ssh", "exec"):
        raise ConfigError(f"{verb} takes nothing behind --; only ssh and exec run a command")
    if overrides and not VERBS[verb].config:
        raise ConfigError(f"{verb} takes no config words; see slipway {verb} --help")
    return Command(verb, parser(verb).parse_args(words), overrides, rest)


def _known(verb: str) -> str:
    """The verb, if it is one."""
    if verb in VERBS:
        return verb
    near = difflib.get_close_matches(verb, VERBS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    if verb in groups(Path.cwd() / "slipway")["experiment"]:
        hint = f"did you mean +experiment={verb}? "
    raise ConfigError(f"{verb!r} is no verb; {hint}verbs: {', '.join(VERBS)} (config is key=value)")


def _is_override(word: str, before: str) -> bool:
    """Is it `key=value` or `~key` of the config? Behind --where it is a condition, behind --baseline a setting."""
    looks = not word.startswith("-") and OVERRIDE.match(word) is not None and ("=" in word or word[0] == "~")
    return looks and before not in ("--where", "--baseline")


def _split(argv: Sequence[str]) -> tuple[Sequence[str], tuple[str, ...]]:
    """What is ours, and what stands behind `--`."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    return argv[:at], tuple(argv[at + 1 :])


def _with_recalled(command: Command) -> Command:
    """A verb that looks at a run means, without config words, the one last started from this folder."""
    if (
        command.overrides
        or command.run
        or getattr(command.flags, "sweep", None)
        or command.verb not in last_command.VERBS
    ):
        return command
    words, run = last_command.recall(Path.cwd())
    if not words and not run and command.verb in last_command.OF_THE_PROJECT:
        return command
    if not words and not run:
        raise ConfigError(
            f"no run was started from this folder; {command.verb} needs its words: +experiment=NAME key=value ..."
        )
    print(f"({shlex.join([*(['--run', run] if run else []), *words])})", file=sys.stderr)
    if run and command.verb in last_command.OF_A_RUN:
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
            return importlib.import_module("controller.cli.verbs.run.sweep").VERBS[command.verb](command)
        verb: Any = importlib.import_module(module_of(command.verb))  # only this verb's imports are paid for
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
