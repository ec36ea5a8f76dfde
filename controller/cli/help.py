"""`slipway help`: print a page in color on a terminal, plain elsewhere, or JSON; open the documentation. `version`."""

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from conf.strict_json import dumps
from controller.cli.flags import COMPLETION_QUERY, GROUPS, HELP, VERBS, Flag, flags
from controller.cli.main import Command, resolve_verb
from controller.config.compose import CONFIG_DIR, config_groups
from controller.core.errors import ConfigError
from controller.core.text import unsanitized_stream, width_of, wrap

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
ELSEWHERE = "`python -m slipway` is the same in any folder, `python -m controller` in the clone alone"
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
SOURCE = CONFIG_DIR.parent
"""Folder of mkdocs.yml."""
PARTS = ("docs", "conf", "controller/cli", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml")
"""What the pages are made of."""


def print_help(verb: str | None, *, as_json: bool) -> None:
    """Print the page of a verb, or the overview (None)."""
    if as_json:
        print(dumps(_json_document(verb), indent=1))
        return
    sections = _verb_page(verb) if verb else _first_page(config_groups(Path.cwd() / "slipway"))
    _draw(sections)


def _first_page(choices: dict[str, list[str]]) -> list[tuple[str, str | Rows]]:
    usage = "slipway [VERB] [--flags] [+experiment=NAME] [group=choice …] [key.path=value …]"
    pages: list[tuple[str, str | Rows]] = [
        ("", "Launch JAX experiments on Cloud TPU pods from YAML."),
        ("usage", f"{usage}\nThe default VERB is `up`. {ELSEWHERE}."),
        ("first steps", FIRST_STEPS),
    ]
    for group, title in GROUPS.items():
        rows = [(name, verb.help) for name, verb in VERBS.items() if verb.group == group]
        pages.append((f"verbs: {title}", rows))
    in_order = [*(name for name in ABOUT if name in choices), *(name for name in choices if name not in ABOUT)]
    docs = f"{DOCS}" if DOCS.is_dir() else "docs/ in the repository"
    more = [
        ("slipway VERB --help", "flags and examples of a verb"),
        ("docs", f"{docs}: first-run.md, configuration.md, sweeps.md, recovery.md, …"),
        ("exit codes", "0 success, 1 a worker's setup failed, 2 config or preflight error, or the cloud refused, "
         "3 wrong or faulty devices, 4 workers disagree, 5 program failed, 6 retries exhausted, 7 budget exhausted, "
         "8 another controller took over, 9 the next verb retries a deletion, 130 interrupted"),
    ]  # fmt: skip
    pages += [
        ("config", CONFIG_ARGUMENTS),
        ("config groups and their choices", [(f"{name}=", _choices(name, choices[name])) for name in in_order]),
        ("more", more),
    ]
    return pages


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


def build_site(state_dir: Path) -> Path:
    """Build the site unless this version of it exists; return its folder.

    Raises:
        ConfigError: mkdocs is not installed, this Slipway has no docs/, or the build failed.
    """
    import hashlib
    import subprocess

    if not (SOURCE / "mkdocs.yml").is_file():
        raise ConfigError("the documentation is part of the repository, and this Slipway is installed without it")
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        raise ConfigError("the site is built with MkDocs: run `python -m pip install 'slipway-tpu[docs]'`")
    version_hash = hashlib.sha256()  # of the names, sizes and times of the files that the site is made of
    for path in (SOURCE / part for part in PARTS):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                version_hash.update(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}\n".encode())
    folder = state_dir / "site" / version_hash.hexdigest()[:12]
    if (folder / "index.html").is_file():
        return folder
    print("building the documentation, a few seconds", file=sys.stderr)
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=SOURCE, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"the documentation could not be built:\n{(done.stdout + done.stderr).strip()}")
    return folder


def show_site(state_dir: Path, verb: str | None, browse: Callable[[str], Any] | None = None) -> int:
    """Serve the site on loopback and open it in a browser, at the page of a verb or the first one, until Ctrl-C."""
    import webbrowser
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    folder = build_site(state_dir)

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, format: str, *args: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        page = f"reference/commands.html#slipway-{verb}" if verb else "index.html"
        address = f"http://127.0.0.1:{server.server_port}/{page}"
        print(f"{address}  (Ctrl-C ends it)", flush=True)
        threading.Thread(target=browse or webbrowser.open, args=(address,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def run_help(command: Command) -> int:
    """`slipway help [VERB|KEY]`: print what --help does, what a key is, or show the documentation in a browser."""
    topic = command.flags.topic
    if topic is not None and topic not in VERBS and not command.flags.web and _means_key(topic):
        from controller.cli.verbs.keys import print_key  # which imports the schema

        return print_key(command, topic)
    if command.overrides:
        raise ConfigError("help: overrides are for a key: slipway help optimizer.lr +experiment=NAME")
    if topic is not None and topic not in VERBS and (near := _near_topic(topic)):
        raise ConfigError(
            f"help: {topic!r} is neither a verb nor a key of the config; did you mean `slipway help {near}`?"
        )
    topic = None if topic is None else resolve_verb(topic)
    if command.flags.web:
        return show_site(command.options.state_dir, topic)
    print_help(topic, as_json=command.flags.json)
    return 0


def _near_topic(word: str) -> str:
    """Return the section or part of a key that a misspelled topic is nearest to; empty if it is nearer to a verb."""
    from conf.schema.forms import misspelled
    from controller.cli.keys import all_keys
    from controller.config.refusals import keys_called

    parts = {part for key in all_keys() for part in key.path.split(".")} - {"NAME"}
    if meant := keys_called(word):
        return meant[0].partition(" ")[0].partition("=")[0]
    near = misspelled(word.lower(), [*VERBS, *sorted(parts)])
    return near[0] if near and near[0] not in VERBS else ""


def _means_key(word: str) -> bool:
    """Return whether a word is a key of the config, a section, or the last part of a key."""
    from controller.cli.keys import all_keys

    return "." in word or any(key.path.startswith(f"{word}.") or key.path.endswith(f".{word}") for key in all_keys())


def run_version(command: Command) -> int:
    """`slipway version`, `slipway --version`: print which Slipway this is."""
    from importlib.metadata import version

    from controller.core.this_process import DISTRIBUTION

    installed = version(DISTRIBUTION)
    print(dumps({"version": installed}) if command.flags.json else f"slipway {installed}")
    return 0
