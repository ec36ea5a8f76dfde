"""Print `slipway --help` and `slipway VERB --help`: in color on a terminal, plain elsewhere, or JSON."""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from controller.cli.flags import COMPLETION_QUERY, GROUPS, HELP, VERBS, Flag, flags
from controller.config.compose import CONFIG_DIR, config_groups
from controller.core.layout import width_of, wrap
from controller.core.printable import unsanitized_stream

PLAIN_WIDTH = 110
"""Columns without a terminal."""
BOLD, CYAN, END = "\x1b[1m", "\x1b[36m", "\x1b[0m"
ABOUT = {
    "cloud": "Google Cloud (gcp), the emulated cloud (local), or this machine itself (here)",
    "tpu": "size and zone of the pod",
    "network": "addresses, NAT, firewall",
    "assets": "files to copy to the bucket",
    "program": "the bundled trainer, or your own command",
    "data": "training and evaluation data",
    "prompt": "format of the prompts",
    "model": "the decoder model",
    "loop": "language modeling, or GRPO and its variants",
    "optimizer": "optimizer and its schedules",
    "mesh": "how devices split the model and the batch",
    "experiment": "all of the above in one file; start here",
    "scale": "tiny: small enough for a laptop",
    "sweep": "runs that -m creates",
}
"""Description of each config group for newcomers."""
FIRST_STEPS = (
    ("slipway +experiment=quickstart", "train something on an emulated v5litepod-16: no account, 2 to 4 minutes"),
    ("slipway plan +experiment=gemma2b_gsm8k", "preview what a real run would create, its price and config errors"),
    ("slipway rehearse +experiment=gemma2b_gsm8k", "rehearse that run on this machine, scaled down, with a preemption"),
    ("slipway init", "set up Google Cloud: credentials, project, a zone with quota"),
)  # fmt: skip
CONFIG_ARGUMENTS = (
    ("+experiment=NAME", "use a file in conf/experiment/ or in your ./slipway/experiment/"),
    ("group=choice", "use another file for one section, such as tpu=v6e_8 or loop=dapo"),
    ("key.path=value", "set one value, such as optimizer.lr=3e-4; quote values with commas or brackets"),
)
SCALE_PREFIX = "tiny_"
"""Prefix of the variants that `scale=tiny` chooses itself."""
BEHIND = {
    "run": " -- PROGRAM …", "plan": " [-- PROGRAM …]", "rehearse": " [-- PROGRAM …]", "exec": " -- COMMAND",
    "ssh": " [-- COMMAND]",
}  # fmt: skip
"""What a verb takes after its overrides."""
DOCS = CONFIG_DIR.parent / "docs"

Rows = Iterable[tuple[str, str]]


def print_help(verb: str | None, *, as_json: bool) -> None:
    """Print the page of a verb, or the overview (None)."""
    if as_json:
        print(json.dumps(_json_document(verb), indent=1))
        return
    sections = _verb_page(verb) if verb else _first_page(config_groups(Path.cwd() / "slipway"))
    _draw(sections)


def _first_page(choices: dict[str, list[str]]) -> list[tuple[str, str | Rows]]:
    usage = "slipway [VERB] [--flags] [+experiment=NAME] [group=choice …] [key.path=value …]"
    pages: list[tuple[str, str | Rows]] = [
        ("", "Launch JAX experiments on Cloud TPU pods from YAML."),
        ("usage", f"{usage}\n`python -m controller` is the same as `slipway`; the default VERB is `up`."),
        ("first steps", FIRST_STEPS),
    ]
    for group, title in GROUPS.items():
        rows = [(name, verb.help) for name, verb in VERBS.items() if verb.group == group]
        pages.append((f"verbs: {title}", rows))
    in_order = [*(name for name in ABOUT if name in choices), *(name for name in choices if name not in ABOUT)]
    pages += [
        ("config", CONFIG_ARGUMENTS),
        ("config groups and their choices", [(f"{name}=", _choices(name, choices[name])) for name in in_order]),
        ("more", _more()),
    ]
    return pages


def _more() -> Rows:
    docs = f"{DOCS}" if DOCS.is_dir() else "docs/ in the repository"
    return [
        ("slipway VERB --help", "flags and examples of a verb"),
        ("docs", f"{docs}: first-run.md, configuration.md, sweeps.md, recovery.md, …"),
        ("exit codes", "0 success, 1 a worker's setup failed, 2 config or preflight error, or the cloud refused, "
         "3 wrong or faulty devices, 4 workers disagree, 5 program failed, 6 retries exhausted, 7 budget exhausted, "
         "8 another controller took over, 9 the next verb retries a deletion, 130 interrupted"),
    ]  # fmt: skip


def _verb_page(name: str) -> list[tuple[str, str | Rows]]:
    verb = VERBS[name]
    takes = " [+experiment=NAME] [key.path=value …]" if verb.config else ""
    behind = BEHIND.get(name, "")
    words = "".join(f" {_flag_usage(flag)}" for flag in verb.flags if not flag.names[0].startswith("-"))
    called = "[up]" if name == "up" else name
    page = f"{DOCS / verb.page}" if DOCS.is_dir() else f"docs/{verb.page}"
    return [
        ("", f"{verb.help[0].upper()}{verb.help[1:]}."),
        ("usage", f"slipway {called} [--flags]{words}{takes}{behind}"),
        ("flags", [(_flag_usage(flag), _flag_help(flag)) for flag in (*flags(name), HELP)]),
        ("examples", "\n".join(f"slipway {example}" for example in verb.examples)),
        ("more", [("docs", page), ("slipway --help", "all verbs, config groups and their choices")]),
    ]


def _flag_usage(flag: Flag) -> str:
    """Return the usage of a flag: `--run ID`, `-m, --multirun`, `[VERB]`."""
    metavar = flag.argparse_options.get("metavar")
    if not flag.names[0].startswith("-"):
        name = str(
            metavar
            or "|".join(each for each in flag.argparse_options.get("choices", ()) if each != COMPLETION_QUERY)
            or flag.names[0]
        )
        return {"?": f"[{name}]", "*": f"[{name} …]"}.get(str(flag.argparse_options.get("nargs")), name)
    takes = "" if flag.argparse_options.get("action") == "store_true" else metavar or flag.names[-1].lstrip("-").upper()
    return f"{', '.join(flag.names)} {' '.join(takes) if isinstance(takes, tuple) else takes}".rstrip()


def _flag_help(flag: Flag) -> str:
    return f"{flag.help}; can be repeated" if flag.argparse_options.get("action") == "append" else flag.help


def _choices(group: str, choices: Sequence[str]) -> str:
    about = f"{ABOUT[group]}: " if group in ABOUT else ""
    return f"{about}{', '.join(name for name in choices if not name.startswith(SCALE_PREFIX))}"


def _json_document(verb: str | None) -> dict[str, Any]:
    if verb:
        known = VERBS[verb]
        options = [{"names": flag.names, "words": flag.help, "shown": _flag_usage(flag)} for flag in flags(verb)]
        return {"verb": verb, "words": known.help, "page": f"docs/{known.page}", "flags": options,
                "examples": [f"slipway {example}" for example in known.examples]}  # fmt: skip
    return {
        "verbs": {name: known.help for name, known in VERBS.items()},
        "groups": config_groups(Path.cwd() / "slipway"),
    }


def _draw(sections: Iterable[tuple[str, str | Rows]]) -> None:
    """Print the sections: without rich, whose import takes longer than all the rest."""
    screen = unsanitized_stream(sys.stdout)
    is_terminal = screen.isatty()
    width = width_of(screen) if is_terminal else PLAIN_WIDTH
    colored = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")
    bold, cyan, end = (BOLD, CYAN, END) if colored else ("", "", "")
    lines: list[str] = []
    for title, content in sections:
        lines += ["", f"{bold}{title}{end}"] if title else []
        if isinstance(content, str):
            lines += [f"  {line}" if title else line for line in content.splitlines()]
            continue
        rows = list(content)
        indent = 4 + max(len(left) for left, _ in rows)
        for left, right in rows:
            row = wrap(f"  {left:<{indent - 2}}{right}", width, indent)
            lines.append(f"  {cyan}{row[2:indent]}{end}{row[indent:]}")
    print("\n".join(lines), file=screen)
