"""Entry point of the command line: `slipway [VERB] [--flags] [+experiment=NAME] [key=value ...]`.

`key=value` always sets config; options of a verb are flags. Flags never enter the config or a run's identity.
"""

import errno
import importlib
import io
import os
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from controller.cli.flags import HELP, PROGRAM_VERBS, REMAINDER_VERBS, REPEAT, VERBS, flags, module_of, parser
from controller.config.compose import OVERRIDE, REPLACED, config_groups
from controller.config.grammar_errors import is_secret, typed_secrets
from controller.core.errors import ConfigError, SlipwayError
from controller.core.text import sanitized_output, width_of, wrap
from controller.records import index
from controller.run.options import RunOptions

HELP_FLAGS = {*HELP.names}
BAD_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
VERSION_FLAGS = ("--version", "-V")
KEYS_OF_FLAGS = {"--tpu": "tpu.accelerator_type", "--zone": "tpu.zone", "--name": "run.name"}
"""Flags for a program, and the keys that say the same of an experiment."""


@dataclass(frozen=True)
class Command:
    """A parsed command line."""

    verb: str
    flags: Namespace
    overrides: tuple[str, ...]
    remainder: tuple[str, ...] = ()
    """Everything after `--`: a command for the workers, or the program of a run."""

    @property
    def options(self) -> RunOptions:
        """Return which run is meant and how to drive it; a flag that the verb does not take has its default."""
        flags = vars(self.flags)

        def waiting() -> AbstractContextManager[Callable[[str], object]]:
            from controller.cli.view import Spinner  # most verbs that need no config show none

            return Spinner(quiet=bool(flags.get("json")))

        return RunOptions(
            overrides=self.overrides,
            run_id=flags.get("run") or "",
            meant=flags.get("meant", ""),
            plan_file=Path(flags["plan"]) if flags.get("plan") else None,
            waiting=waiting,
            **{name: flags.get(name, False) for name in ("yes", "detach", "queue", "take_over", "trust", "json")},
        )


def parse(argv: Sequence[str]) -> Command:
    """Split a command line into verb, flags and overrides. Raises ConfigError with the nearest known verb or flag."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    argv, rest = [*argv[:at]], tuple(argv[at + 1 :])  # Slipway's part, and the worker's command
    are = [_is_override(word, before) for word, before in zip(argv, ["", *argv], strict=False)]
    overrides = tuple(word for word, is_override in zip(argv, are, strict=True) if is_override)
    arguments = [word for word, is_override in zip(argv, are, strict=True) if not is_override]
    verb = arguments.pop(0) if arguments and not arguments[0].startswith("-") else ""
    if not argv and not rest:
        verb = "help"
    if not verb and not overrides and len(arguments) == 1 and arguments[0] in VERSION_FLAGS:
        return Command("version", Namespace(json=False), ())
    if HELP_FLAGS & set(arguments):
        topic = resolve_verb(verb) if verb else None
        return Command("help", Namespace(topic=topic, json="--json" in arguments, web=False), ())
    verb = resolve_verb(verb or "up", argv)
    if rest and verb not in REMAINDER_VERBS:
        hint = f"only {', '.join(REMAINDER_VERBS)} do{'; fit compiles +experiment=NAME' * (verb == 'fit')}"
        hint = "`slipway run` runs a program" if verb == "up" else hint
        raise ConfigError(f"{verb}: takes no command after --; {hint}")
    if overrides and not VERBS[verb].config:
        raise ConfigError(f"{verb}: takes no config overrides; see slipway {verb} --help")
    _tell_what_is_twice(overrides)
    _raise_if_experiment(verb, arguments)
    if verb in (*PROGRAM_VERBS, "up") and not rest:
        _raise_if_program(verb, argv[argv[:1] == [verb] :])
    if arguments or any(word.endswith(("=", "{", "[", ",")) for word in overrides):
        from controller.cli.words import raise_if_mistyped

        raise_if_mistyped(verb, argv[1:] if argv[0] == verb else argv, flags(verb))
    known, unknown = parser(verb, arguments).parse_known_args(arguments)
    if unknown:
        from controller.cli.words import unknown_words

        raise unknown_words(verb, unknown, arguments, flags(verb), overrides)
    sweep = next((word for word in overrides if word.lstrip("+").startswith("sweep=")), "")
    if sweep and getattr(known, "multirun", None) is False:
        raise ConfigError(f"{sweep}: is of a sweep; add -m, or leave it out")
    return Command(verb, known, overrides, rest)


def _raise_if_experiment(verb: str, arguments: Sequence[str]) -> None:
    """Raise ConfigError for `plan quickstart`: a word that no flag of the verb takes, but that names an experiment."""
    takes_words = any(not flag.names[0].startswith("-") and flag != REPEAT[0] for flag in VERBS[verb].flags)
    word = arguments[0] if arguments else ""
    if VERBS[verb].config and not takes_words and word in config_groups(Path.cwd() / "slipway")["experiment"]:
        raise ConfigError(f"{verb}: does not take {word!r}; did you mean +experiment={word}?")


def _raise_if_program(verb: str, words: Sequence[str]) -> None:
    """Raise ConfigError for `run python train.py`: the program's words are not separated from Slipway's."""
    from controller.cli.words import wrong_word
    from controller.inputs.program_words import begins_program

    takes_value = [name for flag in flags(verb) if "metavar" in flag.argparse_options for name in flag.names]
    for at, (before, word) in enumerate(zip(["", *words], words, strict=False)):
        if word.startswith("-") or before in takes_value or _is_override(word, before):
            continue
        if verb == "run" and word.endswith((".yaml", ".yml")):
            raise ConfigError(f"{verb}: {wrong_word(word)}")
        if verb == "run" or begins_program(word):
            called = "run" if verb == "up" else verb
            line = shlex.join(["slipway", called, *words[:at], "--", *words[at:]])
            raise ConfigError(f"{verb}: the program goes after --: {line}")


def _tell_what_is_twice(overrides: Sequence[str]) -> None:
    """Say which of two values of a key or group counts; raise ConfigError for two experiments, of which one would.

    Mappings are merged, so of those all count.
    """
    given: dict[str, str] = {}
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        first, given[key] = given.get(key, value), value
        if first == value or (first[:1] == value[:1] == "{" and f"{key}=" not in REPLACED):
            continue
        if key == "experiment":
            both = f"a file of your own can have both as bases: `defaults: [{first}, {value}, _self_]`"
            raise ConfigError(f"{key}: is given twice, with {first} and {value}; give one of them; {both}")
        counts = "the last counts" if is_secret(key) else f"{value} counts, not {first}"
        _note(f"note: {key} is given twice; {counts}")


def resolve_verb(verb: str, argv: Sequence[str] = ()) -> str:
    """Return the verb, or raise ConfigError if there is no such verb."""
    if verb in VERBS:
        return verb
    from controller.cli.words import unknown_verb

    raise unknown_verb(verb, [*VERBS], argv)


def _is_override(word: str, before: str) -> bool:
    """Return whether a word is an override, `key=value` or `~key`; not so after --where and --baseline."""
    looks = not word.startswith("-") and OVERRIDE.match(word) is not None and ("=" in word or word[0] == "~")
    return looks and before not in ("--where", "--baseline")


def with_runs(command: Command) -> Command:
    """Replace names of runs in the flags by ids. Raises ConfigError for a name that this machine does not know."""
    if vars(command.flags).keys() & {"named", "runs", "diff"}:
        from controller.cli.words import name_runs

        name_runs(command.flags, lambda: command.options.state_dir, command.verb)
    return command


def with_program(command: Command) -> Command:
    """Turn the program after `--` and its flags into overrides, and print these: with what was typed they select it.

    Raises:
        ConfigError: there is no program, or it is not in this folder.
    """
    if command.verb not in PROGRAM_VERBS:
        return command
    flags = command.flags
    if not command.remainder:
        needed = [f"--{name}" for name in ("tpu", "zone", "name") if getattr(flags, name)]
        if command.verb == "run" or needed:
            said = f"{needed[0] if needed else 'run'}: no program; add it: -- python train.py …"
            key = KEYS_OF_FLAGS.get(needed[0], "") if needed else ""
            raise ConfigError(f"{said}; for an experiment, set {key}=…" if command.overrides and key else said)
        return command
    from conf.schema.forms import LISTED
    from controller.cli.words import own_words
    from controller.inputs.own_program import PACKAGE_KEYS, OwnProgram

    program = OwnProgram(
        command.remainder, Path.cwd(), flags.tpu, flags.zone, flags.name, on_this_machine=command.verb == "rehearse"
    )
    overrides = program.overrides(command.overrides)
    _note(f"({shlex.join(word for word in overrides if word not in command.overrides)})")  # those may hold a secret
    listed = next((word for word in command.remainder if LISTED.fullmatch(word.rpartition("=")[2])), "")
    if listed and getattr(flags, "multirun", False):
        _note(f"note: {listed} goes to the program as it is, for -m varies keys, such as env.vars.NAME=1,2")
    if ours := own_words(command.remainder):
        _note(f"note: {ours} goes to the program, as it stands behind --; what is for Slipway stands before")
    if any(word.startswith("+experiment=") for word in overrides):
        _note("note: the program takes the place of the experiment's loop, model, data and optimizer")
    if not any(word.startswith((*PACKAGE_KEYS, "+experiment=")) for word in overrides):
        _note(
            "note: no uv.lock, requirements.txt or pyproject.toml here: the workers get Slipway's own packages, with "
            "JAX; env.requirements names others"
        )
    return replace(command, overrides=overrides)


def _note(text: str) -> None:
    print(wrap(text, width_of(sys.stderr), 2), file=sys.stderr)


def with_recalled(command: Command) -> Command:
    """Reuse the overrides of the last run started from this folder, for a verb on a run that is not named."""
    meant = command.overrides or command.options.run_id or getattr(command.flags, "sweep", None)
    if meant or command.verb not in index.RECALLING_VERBS:
        return command
    last = index.load_last_command(Path.cwd())
    if last == index.LastCommand():
        if command.verb in index.PROJECT_VERBS:
            return command
        raise ConfigError(
            f"no run was started from this folder; give {command.verb} its overrides, +experiment=NAME key=value …, or "
            f"name a run: {command.verb} RUN (`slipway runs` lists them)"
        )
    words = shlex.join([*(["--run", last.run] if last.run else []), *last.overrides])
    if last.sweep and command.verb in index.RUN_VERBS:
        return _with_recalled_sweep(command, last)
    _note(f"last run of this folder: {words}")
    if last.run and command.verb in index.RUN_VERBS:
        command.flags.run = last.run
    if command.verb != "down":  # which also deletes what the user's own steps made
        command.flags.meant = last.meant
    return replace(command, overrides=last.overrides)


def _with_recalled_sweep(command: Command, last: index.LastCommand) -> Command:
    """Let `status` mean the sweep that was started last; the other verbs need one of its runs, or its pods."""
    words = shlex.join(last.sweep_words)
    if command.verb == "status" and not command.flags.all:
        _note(f"last sweep of this folder: -m {words}")
        command.flags.sweep = last.sweep
        return command
    if command.verb == "status":
        return replace(command, overrides=last.overrides)
    pods = f"`slipway down -m {words}` deletes its pods, " if command.verb == "down" else ""
    raise ConfigError(
        f"the last command of this folder was the sweep {last.sweep}; {pods}{command.verb} RUN means one of "
        f"its runs, and `slipway status --sweep {last.sweep}` lists them"
    )


@sanitized_output()
def run(argv: Sequence[str]) -> int:
    """Parse and run a command line; returns the exit code. Expected errors go to stderr without a traceback."""
    try:
        command = with_recalled(with_program(with_runs(parse(argv))))
        of_sweep = getattr(command.flags, "multirun", False)
        if of_sweep and command.options.run_id:
            raise ConfigError("-m acts on a sweep and --run on one run: give one of them")
        name = module_of(command.verb, of_sweep=of_sweep)
        module = importlib.import_module(name)  # only this verb's imports are paid for
        code = getattr(module, f"run_{command.verb}")(command)
        sys.stdout.flush()
        return code
    except SlipwayError as error:
        width, secrets = width_of(sys.stderr), [*typed_secrets(argv)]
        for problem in error.problems if isinstance(error, ConfigError) else [str(error)]:
            said = f"error: {problem}"
            for secret in secrets:
                said = said.replace(secret, "…")
            for line in said.split("\n"):  # an indented line is of a log or a traceback
                print(line if line.startswith(" ") else wrap(line, width, 2), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; run the same command to resume", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `slipway logs | head`
        sys.stderr.close()
        _drop_output()
        return 0
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # a word that is looked up as a file, wherever that is
            word = max(Path(str(error.filename)).parts, key=len)
            print(f"error: {word:.60}… is too long for the name of a file", file=sys.stderr)
            return ConfigError.exit_code
        if not (message := _of_a_disk(error)):
            raise
        with suppress(OSError):
            print(f"error: {message}", file=sys.stderr)
        _drop_output()
        return 1


def _of_a_disk(error: OSError) -> str:
    """Say what is wrong with a full or read-only disk, or with a file of the state folder; "" for another error."""
    file, state = Path(str(error.filename or "/")), RunOptions().state_dir
    is_full = error.errno in BAD_DISK and state.is_dir() and not shutil.disk_usage(state).free
    if file.is_relative_to(state) or (is_full and not error.filename):
        return f"run.state_dir: cannot use {state if is_full else file}: {error.strerror}"
    return f"cannot write {error.filename or 'the output'}: {error.strerror}" if error.errno in BAD_DISK else ""


def _drop_output() -> None:
    """Let what is still in the buffer of stdout go nowhere: at the end of the process it would be an error again."""
    with suppress(io.UnsupportedOperation):  # a notebook's has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
