"""What users type in place of our words: the names of runs, other tools' verbs, other ways to write `key=value`."""

import difflib
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from conf.schema.foreign_keys import OTHER_FLAGS, SAME_FLAGS
from controller.cli.flags import VERBS, Flag
from controller.config.compose import config_groups
from controller.config.grammar_errors import torn
from controller.core.errors import ConfigError
from controller.records import index

RUN_ID = re.compile(r"-[0-9a-f]{8}(-r\d+)?$")
"""End of the id of a run."""
OTHER_VERBS = {
    **dict.fromkeys(("ls", "list", "history", "jobs", "experiments", "cost", "costs"), "runs"),
    **dict.fromkeys(("ps", "queue", "top", "pods", "nodes", "clusters", "squeue", "sinfo", "qstat"), "status --all"),
    **dict.fromkeys(("launch", "apply", "create", "start", "deploy", "train", "resume", "restart"), "up"),
    **dict.fromkeys(("submit", "job", "sbatch", "srun", "qsub", "torchrun", "accelerate"), "run -- PROGRAM"),
    **dict.fromkeys(("validate", "show", "diff", "preview", "dryrun", "dry-run", "lint", "config"), "plan"),
    **dict.fromkeys(("kill", "abort", "interrupt", "scancel", "qdel"), "cancel"),
    **dict.fromkeys(("rm", "delete", "destroy", "terminate", "remove", "teardown", "clean", "cleanup"), "down"),
    **dict.fromkeys(("tail", "log", "follow", "attach", "watch"), "logs --follow"),
    **dict.fromkeys(("download", "cp", "pull", "fetch", "rsync", "artifacts", "results"), "get"),
    **dict.fromkeys(("describe", "info", "inspect", "sstat"), "status"),
    **dict.fromkeys(("exec-cmd", "cmd"), "exec -- COMMAND"),
    **dict.fromkeys(("rename", "edit", "set"), "up"), **dict.fromkeys(("price", "prices", "billing"), "orphans"),
    **dict.fromkeys(("zones", "availability", "regions", "quotas"), "capacity"), "docs": "help --web", "man": "help",
    **dict.fromkeys(("shell", "connect", "login"), "ssh"),
    **dict.fromkeys(("check", "diagnose", "preflight", "quota", "auth", "permissions"), "doctor cloud=mine"),
    **dict.fromkeys(("setup", "configure", "bootstrap"), "init"),
    **dict.fromkeys(("sweep", "multirun", "grid"), "-m +experiment=NAME key=a,b"),
    **dict.fromkeys(("test", "simulate", "dry"), "rehearse"),
    **dict.fromkeys(("port-forward", "tunnel", "proxy"), "forward"),
    **dict.fromkeys(("tb", "curves"), "tensorboard"), "cloud": "localcloud",
    "emulator": "localcloud", **dict.fromkeys(("sample", "infer", "eval"), "generate"),
    **dict.fromkeys(("memory", "estimate", "compile"), "fit"),
}  # fmt: skip
"""Verbs of SkyPilot, dstack, gcluster, Kubernetes, Docker and Terraform, and what they are here."""
USES = ("chat", "generate", "export")
"""Verbs that use the weights of a run."""
WEIGHTS = ("--model", "--model-path", "--checkpoint", "--ckpt", "--weights", "--model-name-or-path", "-m")
"""Flags that name weights elsewhere."""
DASHES = ("\u2010", "\u2011", "\u2012", "\u2013", "\u2014", "\u2015", "\u2212")
"""What word processors make of - and --."""
EXPERIMENT = re.compile(r"\+*experiment=.")
WORKER = re.compile(r"(?:worker-?)?(\d{1,4})")
"""Ways to write the number of a worker."""
KEY = r"[A-Za-z_]\w*(?:[./]\w+)*"


def unknown_verb(word: str, verbs: Sequence[str], argv: Sequence[str]) -> ConfigError:
    """Return the error for a first word that is no verb, with what was probably meant.

    argv: all words of the line.
    """
    from conf.schema.forms import misspelled

    near = misspelled(word, verbs)
    hint = f"did you mean {near[0]!r}? " if near else ""
    if not near and (near := misspelled(word, config_groups(Path.cwd() / "slipway")["experiment"])):
        hint = f"did you mean +experiment={near[0]}? "
    if word.lower() in OTHER_VERBS:
        meant = OTHER_VERBS[word.lower()]
        if meant.endswith("PROGRAM") and (given := next((w for w in argv if EXPERIMENT.match(w)), "")):
            meant = f"up +{given.lstrip('+')}"
        hint = f"did you mean `slipway {meant}`? "
    elif chosen := _choice_called(word):
        hint = f"did you mean {chosen}? "
    elif RUN_ID.search(word):
        hint = f"did you mean `slipway status {word}`, or `slipway up --run {word}`? "
    elif meant := next(filter(None, (_problem_of_value(argv[at:]) for at in range(len(argv)))), ""):
        return ConfigError(meant)
    elif word.startswith("python") or "." in word:
        hint = f"did you mean `slipway run -- {word} …`? "
    return ConfigError(f"unknown verb {word!r}; {hint}verbs: {', '.join(verbs)} (config overrides are key=value)")


def raise_if_mistyped(verb: str, argv: Sequence[str], flags: Sequence[Flag]) -> None:
    """Raise ConfigError for words of other tools, and for `key = v`, `--key=v`, `key:v`, with what to write.

    flags: those of this verb.
    """
    taken = {name for flag in flags for name in flag.names}
    valued = {name for flag in flags if flag.argparse_options.get("action") != "store_true" for name in flag.names}
    positional = [flag for flag in flags if not flag.names[0].startswith("-")]
    takes_two = len(positional) > 1 or any(flag.argparse_options.get("nargs") == "*" for flag in positional)
    if whole := torn(argv):
        raise ConfigError(f"{verb}: a shell splits at spaces; put the override in quotes: '{whole}'")
    for at, word in enumerate(argv):
        flag, before = word.partition("=")[0], argv[at - 1] if at else ""
        if before in valued or flag in taken or ("=" in word[:-1] and word[0] != "-"):
            continue
        letter = [name for name in sorted(valued) if len(flag) == 2 and name.startswith(f"-{flag}")]
        same = [ours for ours, theirs in SAME_FLAGS.items() if flag in theirs and ours in taken]
        if meant := same or (letter if len(letter) < 4 and argv[at + 1 :] and "=" not in argv[at + 1] else []):
            raise ConfigError(f"{verb}: has no {flag}; did you mean {' or '.join(meant)}?")
        if verb in USES and flag in WEIGHTS:
            raise ConfigError(f"{verb}: has no {flag}; it takes a run, which `slipway runs` lists: slipway {verb} RUN")
        if flag in OTHER_FLAGS:
            raise ConfigError(f"{verb}: has no {flag}; {OTHER_FLAGS[flag]}")
        rest = argv[at : at + 1] if takes_two else argv[at:]  # `get data logs` names a run and a path
        if meant := _problem_of_value(rest):
            raise ConfigError(f"{verb}: {meant}")


SEPARATED = re.compile(rf"(?:--)?({KEY})(?: ?(=|:(?!/)) ?| )([^\s=:-][^\s=]*)")


def _problem_of_value(words: Sequence[str]) -> str:
    """Say that `key = v`, `key v`, `--key=v`, `--key v`, `key:v` or `key: v` is written `key=v`; "" for anything else.

    Without a sign of equality the key has a dot, or is a section of the config.
    """
    found = next((found for count in (1, 2, 3) if (found := SEPARATED.fullmatch(" ".join(words[:count])))), None)
    if not found or (found[2] != "=" and "." not in found[1] and found[1] not in config_groups(Path.cwd() / "slipway")):
        return ""
    if not found[2] and found[1] == "cloud" and found[3] not in config_groups(Path.cwd() / "slipway")["cloud"]:
        return ""  # `cloud start`, which is a verb
    sign = "+" if found[1] == "experiment" else ""
    meant = "" if _is_key(found[1]) else _key_called(found[1], found[3])
    return f"{found[0]!r} is not how a value is set; did you mean {meant or f'{sign}{found[1]}={found[3]}'}?"


def unknown_words(
    verb: str, unknown: Sequence[str], arguments: Sequence[str], flags: Sequence[Flag], overrides: Sequence[str]
) -> ConfigError:
    """Return the error for words that a verb does not take: each flag with the nearest one, or what has that name here.

    arguments: all words of the line that are no overrides. overrides: the others, whose config has the keys.
    """
    from conf.schema.forms import misspelled

    names = [name for flag in flags for name in flag.names if name.startswith("-")]
    known = [*names, "--help", *(["--version"] if verb == "up" else [])]
    problems = []
    command = " ".join(unknown[next((at for at, word in enumerate(unknown) if word[:1] != "-"), len(unknown)) :])
    if verb in ("exec", "ssh") and command and not WORKER.fullmatch(command):
        return ConfigError(f"{verb}: a command goes after --: slipway exec {arguments[0]} -- {command}")
    for word in (word for word in unknown if word.startswith("-")):
        flag, _, value = word.partition("=")
        behind = arguments[arguments.index(word) + 1 :][:1]
        value = value or next((each for each in behind if not each.startswith("-")), "…")
        near = [name for name in known if name.startswith(flag)]
        near = near or misspelled(flag, known, 0.7)
        key = _key_called(flag, value, overrides) if VERBS[verb].config else ""
        alone = any(each.names == (flag.lstrip("-"),) for each in flags)
        elsewhere = [name for name, each in VERBS.items() if any(flag in one.names for one in each.flags)]
        hint = f"write it alone: {value}" if alone else f"did you mean {near[0]}?" if near else ""
        is_sure = bool(misspelled(flag, near[:1], 0.9))
        hint = f"did you mean {key}?" if key and not alone and not is_sure else hint
        if elsewhere and not key and not alone:
            hint = f"it is a flag of {', '.join(elsewhere)}; flags: {', '.join(names)}"
        problems.append(f"{verb}: has no {flag}; {hint or 'flags: ' + ', '.join(names)}")
    if not problems:
        takes = [flag.names[0] for flag in flags if not flag.names[0].startswith("-")]
        hint = (
            f"takes {len(takes)} word{'s' * (len(takes) > 1)} at most" if takes else f"takes flags: {', '.join(names)}"
        )
        if worker := WORKER.fullmatch(unknown[0]) if "--worker" in names else None:
            return ConfigError(f"{verb}: {unknown[0]!r} is too much; did you mean --worker {worker[1]}?")
        before = ["", *arguments][arguments.index(unknown[0])].rstrip(":")
        if f"--{unknown[0]}" in names:
            return ConfigError(f"{verb}: did you mean --{unknown[0]}?")
        if key := _key_called(before, unknown[0], overrides):
            return ConfigError(f"{verb}: {before!r} is no name of a run; did you mean {key}?")
        problems = [f"{verb}: {wrong_word(unknown[0]) or f'{unknown[0]!r} is too much: {verb} {hint}'}"]
    called = "slipway" if verb == "up" else f"slipway {verb}"
    return ConfigError([f"{problem}; see {called} --help" for problem in problems])


def _key_called(word: str, value: str, overrides: Sequence[str] = ()) -> str:
    """Return `key=value` for the key that a flag or a word without a section means; empty if none does."""
    from controller.config.refusals import keys_meant

    found = keys_meant(word.lstrip("-").replace("-", "_"), value, overrides, Path.cwd() / "slipway")
    return found[0] if found else ""


def wrong_word(word: str) -> str:
    """Say what a word means that is no name of a run: a key, a file, or a program; empty if nothing is known."""
    from conf.schema.forms import program_line
    from controller.config.grammar_errors import malformed_key

    key, equals, value = word.partition("=")
    plain = key.lstrip("+~")
    if word.startswith(DASHES):
        return f"{word} begins with a typographic dash; type --{word.lstrip(''.join(DASHES) + '-')}"
    if "://" in word:
        run = next((part for part in word.split("/") if RUN_ID.search(part)), "")
        return f"{word} is an address; name the run: {run or 'its id, which `slipway runs` lists'}"
    if (pair := re.fullmatch(rf"({KEY}):=?(\S+)", word)) and (meant := _key_called(pair[1], pair[2])):
        return f"{word!r} is not how a value is set; did you mean {meant}?"
    if equals:
        return malformed_key(plain, value) or f"{key!r} is no key; write key=value without spaces around ="
    if re.search(r"\.ya?ml$", word, re.IGNORECASE):
        group = Path(word).parent.name
        group = group if group in config_groups(Path.cwd() / "slipway") else "experiment"
        return f"{word!r} is a file; did you mean {'+' * (group == 'experiment')}{group}={Path(word).stem}?"
    if line := program_line(word):
        return f"{word!r} is a program; did you mean `{line}`?"
    if re.fullmatch(rf"{KEY}(?:@\S*)?", plain) and _is_key(plain):
        return f"{word} is a key; write {word}=VALUE, or see `slipway help {plain}`"
    return ""


def _is_key(word: str) -> bool:
    """Return whether a word is a key of the config, or a group."""
    from conf.schema.text_keys import types_at

    group = word.partition("@")[0]
    return group in config_groups(Path.cwd() / "slipway") or bool(types_at((*word.split("."),)))


OURS = re.compile(
    r"(?:cloud|tpu|network|budget|recovery|cleanup|env)(?:\.[\w.]+)?=.+|--(?:detach|queue|tpu|zone)(?:=.*)?"
)
"""Words that hardly belong to a user's program."""


def own_words(program: Sequence[str]) -> str:
    """Return the first word of a program that is like Slipway's own, a key or a choice; empty if there is none."""
    groups = config_groups(Path.cwd() / "slipway")
    for word in filter(OURS.fullmatch, program):
        key, _, value = word.partition("=")
        if key.startswith("--") or (value in groups[key] if key in groups else "." in key and _is_key(key)):
            return word
    return ""


def name_runs(flags: Namespace, state: Callable[[], Path], verb: str = "") -> None:
    """Replace each name of a run in the flags by the id of its latest run, and `named` by `run`.

    state: returns the state folder, for which a config may have to be composed; not called for ids.

    Raises:
        ConfigError: nothing is called so, or it is a sweep, or two runs are named where one is meant.
    """
    known = vars(flags)
    if "runs" in known:  # of verbs that take several; a name may also be known to the bucket alone
        flags.runs = [_latest(word, state) or word for word in (*flags.runs, *known.pop("run"))]
    if known.get("diff"):
        flags.diff = [_latest(word, state) or word for word in flags.diff]
    if "named" not in known:
        return
    named = known.pop("named")
    if named and flags.run and named != flags.run:
        raise ConfigError(f"{named!r} and --run {flags.run} are two runs: give one of them")
    word = named or flags.run
    if "path" in known:  # `get` says itself that a run comes before a path
        if "://" in (word or ""):
            raise ConfigError(wrong_word(word))
        flags.run = (_latest(word, state) or word) if word else None
        return
    if word and "sweep" in known and not RUN_ID.search(word) and _is_sweep(word, state):
        flags.sweep, flags.run = word, None
        return
    flags.run = find_run(word, state, verb) if word else None


def find_run(word: str, state: Callable[[], Path], verb: str = "") -> str:
    """Return the id of the run that a word means: an id, or the name of runs, of which it is the latest.

    Raises:
        ConfigError: this machine knows no such run.
    """
    is_name = index.ID_PATTERN.fullmatch(word) is not None
    folder = Path(word).expanduser()
    if verb in USES and folder.is_dir() and not (is_name and _latest(word, state)):
        chat = (
            f"; an exported model is tried with `python -m trainer.chat {word}`"
            if (folder / "config.json").is_file()
            else ""
        )
        raise ConfigError(f"{word!r} is a folder, and {verb} takes a run, which `slipway runs` lists{chat}")
    if is_name and (latest := _latest(word, state)):
        return latest
    said = wrong_word(word)
    if said and not (verb in USES and " is a key; write " in said):  # a key would be no cure for those
        raise ConfigError(said)
    if not is_name:
        how = "write key=value without spaces, in quotes if the value has spaces, brackets or quotes"
        raise ConfigError(f"{word!r} is the name of no run; {how}")
    if _is_sweep(word, state):
        raise ConfigError(f"{word!r} is a sweep; `slipway status --sweep {word}` lists its runs")
    near = difflib.get_close_matches(word, {str(row.get("name")) for row in index.load_rows(state())}, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    hint = f"did you mean {chosen}? " if (chosen := _choice_called(word)) else hint
    hint = f"the verb comes first, and once: slipway {word} …; " if word in VERBS else hint
    takes_worker = verb in VERBS and any("--worker" in flag.names for flag in VERBS[verb].flags)
    if not hint and takes_worker and (worker := WORKER.fullmatch(word)):
        hint = f"did you mean --worker {worker[1]}? "
    elif verb in ("exec", "ssh") and not hint:
        hint = f"a command stands behind --: {verb} -- {word}; "
    raise ConfigError(
        f"no run has the id or name {word!r} on this machine; {hint}`slipway runs` lists them, with --refresh those of "
        "other machines too"
    )


def _choice_called(word: str) -> str:
    """Return the override that chooses a file of a group by its name alone: `quickstart`, `local`, `v6e-8`."""
    groups = config_groups(Path.cwd() / "slipway")
    for group in ("experiment", "cloud", "tpu", "model", "loop", "optimizer", "data"):
        if word.replace("-", "_") in groups[group]:
            return f"{'+' * (group == 'experiment')}{group}={word.replace('-', '_')}"
    return ""


def _latest(word: str, state: Callable[[], Path]) -> str:
    """Return an id as it is, and the latest run's of a name; "" for what this machine does not know."""
    if RUN_ID.search(word):  # another machine's run is known to the bucket alone
        return word
    rows = index.load_rows(state())
    if any(row["run"] == word for row in rows):
        return word
    return next((row["run"] for row in reversed(rows) if row.get("name") == word), "")


def _is_sweep(word: str, state: Callable[[], Path]) -> bool:
    return (state() / "sweeps" / f"{word}.json").is_file()
