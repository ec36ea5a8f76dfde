"""Every verb of the command line with its flags, as data for the parser, the help and the completion.

This module imports nothing heavy: tab completion must be instant.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from controller.cli.values import ABOVE_0, COUNT, Number, html_file, local_path, ports
from controller.core.errors import ConfigError

GROUPS = {
    "run": "run",
    "look": "inspect and connect",
    "use": "use the weights",
    "end": "stop and clean up",
    "setup": "set up",
}
"""Headings under which the verbs are listed."""


@dataclass(frozen=True)
class Flag:
    """One flag of a verb, or a positional argument (`name` without dashes)."""

    names: tuple[str, ...]
    help: str
    argparse_options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for argparse; empty: a switch."""
    completion: str = ""
    """Kind of value for the completion: run, sweep, file, or a list of choices."""


@dataclass(frozen=True)
class Verb:
    """A subcommand."""

    help: str
    group: str
    page: str
    """Page in docs/ with more detail."""
    examples: tuple[str, ...]
    flags: tuple[Flag, ...] = ()
    config: bool = True
    """Whether the verb takes config overrides."""


def _flag(name: str, words: str, values: str = "", **more: Any) -> Flag:
    return Flag(tuple(name.split()), words, more, values)


YES = _flag("--yes", "skip confirmation prompts", action="store_true")
SWEEP_FLAG = _flag("-m --multirun", "act on a sweep: all combinations of a=1,2 b=range(0,3) …", action="store_true")
NAMED = _flag(
    "named",
    "ID of a run, or a NAME: its latest run (default: the last run of this folder)",
    "run",
    nargs="?",
    metavar="RUN",
)
RUN = (NAMED, _flag("--run", "the same as RUN", "run", metavar="RUN"))
"""How a verb takes its run; `name_runs` makes one of both."""
REPEAT = (
    _flag("named", "the same as --run", nargs="?", metavar="RUN"),
    _flag("--run", "repeat or resume this recorded run, with its own code", "run", metavar="RUN"),
)
TRUST = _flag("--trust", "with --run: execute another machine's record unasked", action="store_true")
DRIVING = (
    YES, _flag("--detach", "return once the program has started", action="store_true"),
    _flag("--queue", "wait while another run uses the pod", action="store_true"),
    _flag("--take-over", "take over from the controller that drives the run or has the pod", action="store_true"),
)  # fmt: skip
PLAN = _flag("--plan", "use the config in a file written by plan --save", "file", metavar="FILE")
WORKER = _flag("--worker", "worker number (default: 0)", default="0", metavar="N")
JSON = _flag("--json", "print one JSON document (JSON lines while following)", action="store_true")
HELP = _flag("-h --help", "show this page", action="store_true")

WHERE = _flag("--where", "filter, such as metrics.loss<0.5", "condition", action="append", default=[], metavar="COND")
SORT = _flag("--sort", "sort key, such as metrics.accuracy_after; largest last", "word", metavar="KEY")
LAST = _flag("--last", "keep only the last N runs", "number", type=COUNT, metavar="N")
REFRESH = _flag("--refresh", "also read the bucket, for runs from other machines", action="store_true")
RUN_SELECTION = (
    _flag("runs", "IDs of runs, or NAMEs: their latest runs (default: the last sweep or run)", "run", nargs="*",
          metavar="RUN"),
    _flag("--run", "the same as RUN", "run", action="append", default=[], metavar="RUN"),
    _flag("--sweep", "all runs of the sweep with this ID or name", "sweep", default="", metavar="ID"),
    WHERE, SORT, LAST, REFRESH,
)  # fmt: skip
"""Flags that select runs."""

CHECKPOINT = (
    *RUN,
    _flag("--best", "the best checkpoint, by checkpoint.best (default: the latest)", action="store_true"),
    _flag("--step", "the checkpoint of step N", "number", type=Number(int, 0), metavar="N"),
    _flag("--tokenizer", "tokenizer.json, if the run's folder has none", "file", metavar="FILE"),
)
"""Flags that select weights of a run."""
SAMPLING = (
    _flag("--temperature", "0: greedy (default: the run's)", "number", type=Number(float, 0), metavar="T"),
    _flag("--top-k", "sample from the K likeliest tokens", "number", type=COUNT, metavar="K"),
    _flag("--top-p", "from the likeliest tokens of probability P", "number", type=Number(float, 0, 1, opens=True),
          metavar="P"),
    _flag("--min-p", "from those with share P of the likeliest one's", "number", type=Number(float, 0, 1, opens=True),
          metavar="P"),
    _flag("--repetition-penalty", "as loop.sampler.repetition_penalty", "number", type=Number(float, 0.01, 100),
          metavar="X"),
    _flag("--presence-penalty", "as loop.sampler.presence_penalty", "number", type=Number(float, -2, 2), metavar="X"),
    _flag("--frequency-penalty", "as loop.sampler.frequency_penalty", "number", type=Number(float, -2, 2), metavar="X"),
    _flag("--max-new-tokens", "tokens of a response (default: the run's)", "number", type=COUNT, metavar="N"),
    _flag("--seed", "random seed of the samples (default: 0)", "number", type=int, metavar="N"),
    _flag("--dtype", "dtype to compute in (default: the run's)", choices=["float32", "bfloat16"]),
)  # fmt: skip
"""Flags that say how responses are drawn."""

PROGRAM = (
    _flag("--tpu", "for a program after --: slice type (default: v5litepod-16)", "word", default="", metavar="TYPE"),
    _flag("--zone", "for a program after --: zone to try first (default: one with the type)", "word", default="",
          metavar="ZONE"),
    _flag("--name", "for a program after --: name of the run (default: the program's)", "word", default="",
          metavar="NAME"),
)  # fmt: skip
"""Flags that go with a program after `--`."""
PROGRAM_VERBS = ("run", "plan", "rehearse")
"""Verbs that take a program after `--` in place of a config."""
REMAINDER_VERBS = (*PROGRAM_VERBS, "ssh", "exec")
COMPLETION_QUERY = "query"
"""Argument that shells pass to `slipway completion`; users never type it."""
QUICKSTART = "+experiment=quickstart"
FLAGSHIP = "+experiment=gemma2b_gsm8k"
VERBS: dict[str, Verb] = {
    "up": Verb(
        "apply the plan, launch the program and follow it (the default)", "run", "recovery.md",
        (QUICKSTART, f"{FLAGSHIP} tpu.zone=us-west4-a optimizer.lr=1e-6",
         f"-m {QUICKSTART} optimizer.lr=1e-4,7e-4 run.seed=0,1,2 sweep.pods=2", "up --run quickstart-f9ce2387"),
        (SWEEP_FLAG, *REPEAT, TRUST, *DRIVING, PLAN),
    ),
    "run": Verb(
        "run any program, without a config: ships this repository and starts it on every worker", "run",
        "your-program.md",
        ("run -- python train.py --steps 100", "run --tpu v5litepod-8 --zone us-west4-a -- python train.py",
         "run cloud=local -- python train.py", "plan --tpu v6e-8 -- python train.py"),
        (*PROGRAM, *DRIVING),
    ),
    "plan": Verb(
        "preview changes, cost and config errors; changes nothing", "run", "checks.md",
        (f"plan {FLAGSHIP}", f"plan -m {QUICKSTART} run.seed=0,1,2", f"plan --config {QUICKSTART}",
         f"plan --permissions {QUICKSTART}"),
        (SWEEP_FLAG, *REPEAT, TRUST, *PROGRAM, PLAN,
         _flag("--save", "write the config to plans/<run id>.yaml", action="store_true"),
         _flag("--config", "print each value of the config, and the file that sets it", action="store_true"),
         _flag("--permissions", "print the permissions that up, follow and down use of you", action="store_true")),
    ),
    "fit": Verb(
        "compile each program for TPU on this machine; report memory, time and price", "run", "models.md",
        (f"fit {FLAGSHIP}", "fit +experiment=lm_3b_v6e8 --slices v5litepod-16,v6e-8 --sort hours"),
        (_flag("--slices", "compare the run on these accelerator types", "word", default="", metavar="TYPE,TYPE"),
         _flag("--sort", "order of --slices: usd or hours (default: usd)", "word", default="usd",
               choices=("usd", "hours"), metavar="usd|hours")),
    ),
    "rehearse": Verb(
        "run the same plan, scaled down, on a separate emulated cloud, with a preemption", "run", "guides.md",
        (f"rehearse {FLAGSHIP}", "rehearse -- python train.py"), PROGRAM,
    ),
    "status": Verb(
        "show the pod, the run and its workers, the runs of a sweep, or all pods", "look", "recovery.md",
        ("status", "status --all cloud=gcp", f"status {QUICKSTART}", f"status -m {QUICKSTART} run.seed=0,1,2",
         "status --sweep quickstart-5f0c --follow"),
        (SWEEP_FLAG, *RUN, _flag("--sweep", "show the runs of this sweep known to this machine", "sweep", metavar="ID"),
         _flag("--follow", "with --sweep: update until the sweep ends", action="store_true"),
         _flag("--all", "show every pod of the project, with the run on it", action="store_true")),
    ),
    "runs": Verb(
        "list runs: filter, sort, export, or compare two", "look", "runs.md",
        ("runs --where state=finished --sort metrics.accuracy_after", "runs --csv",
         "runs --diff quickstart-f9ce2387 quickstart-0b1c2d3e"),
        (WHERE, SORT, LAST,
         _flag("--csv", "print comma-separated values, one column per key", action="store_true"),
         _flag("--diff", "show what differs between two runs", "run", nargs=2, metavar=("A", "B")), REFRESH),
    ),
    "capacity": Verb(
        "show where requests for pods were granted lately, after what wait, and how long the pods lived", "look",
        "capacity.md", ("capacity", "capacity --days 1 --refresh"),
        (_flag("--days", "how far to look back (default: 7)", "number",
               type=Number(float, 0, 3650, opens=True), default=7.0, metavar="N"),
         _flag("--refresh", "also read the bucket, for requests from other machines", action="store_true")),
    ),
    "report": Verb(
        "write an HTML page about runs or a sweep: curves, comparisons, time, cost, transcripts", "look", "report.md",
        ("report", "report --sweep quickstart", "report --where state=finished --last 12 -o last.html",
         "report --sweep trm_width --x params --fit power --level 0.8"),
        (*RUN_SELECTION,
         _flag("-o --output", "output file (default: in ~/.slipway/reports)", "file", type=html_file, metavar="FILE"),
         _flag("--baseline", "setting to compare the others with", "word", default="", metavar="OVERRIDES"),
         _flag("--metric", "only metrics of this name or pattern, such as 'eval: *'", "word",
               action="append", default=[], metavar="NAME"),
         _flag("--smooth", "draw moving averages over faint curves, as TensorBoard does: 0 (default) to below 1",
               "number", type=Number(float, 0, 0.999), default=0.0, metavar="WEIGHT"),
         _flag("--x", "relate a metric to a number: params, flops, seconds, examples, a config key, a metric", "word",
               default="", metavar="NAME"),
         _flag("--y", "the metric of --x (default: the report's first)", "word", default="", metavar="METRIC"),
         _flag("--fit", "fit y = a - b x^-c to the runs, with bootstrap intervals", choices=("power",), default=""),
         _flag("--level", "show when each run reached this value of the metric", type=float, metavar="VALUE")),
    ),
    "tensorboard": Verb(
        "show the curves of runs or of a sweep in TensorBoard, from the bucket", "look", "report.md",
        ("tensorboard --sweep quickstart", "tensorboard --port 6007 --where state=running"),
        (*RUN_SELECTION,
         _flag("--port", "local port (default: 6006)", "number", type=Number(int, 0, 65535), default=6006,
               metavar="N")),
    ),
    "logs": Verb(
        "print the program's output", "look", "recovery.md",
        ("logs", "logs quickstart -f --tail 20", "logs --worker all --follow", "logs --worker 0,2 --attempt 1",
         f"logs --worker 3 --follow {FLAGSHIP}"),
        (*RUN, _flag("--worker", "worker numbers such as 3 or 0,2, or all (default: 0)", default="0", metavar="N|all"),
         _flag("--attempt", "attempt number (default: the latest)", "number", type=COUNT, metavar="N"),
         _flag("-f --follow", "keep printing until the program ends", action="store_true"),
         _flag("-n --tail", "begin with the last N lines", "number", type=Number(int, 0), metavar="N")),
    ),
    "get": Verb(
        "download results, checkpoints and logs of a run", "look", "cli.md",
        ("get", "get quickstart-f9ce2387 checkpoints --to ./results", "get quickstart-f9ce2387 --list"),
        (*RUN,
         _flag("path", "file or folder of the run, such as logs (default: everything)", nargs="?", metavar="PATH"),
         _flag("--to", "folder to download to (default: ./RUN)", "file", type=local_path, metavar="FOLDER"),
         _flag("--list", "only list what there is", action="store_true")),
    ),
    "ssh": Verb("open a shell on one worker", "look", "access.md", ("ssh", "ssh --worker 2"), (*RUN, WORKER)),
    "exec": Verb(
        "run a command on one worker or all", "look", "access.md",
        ("exec --worker all -- free -g", "exec --worker 0 -- python -c 'print(1)'"),
        (*RUN, _flag("--worker", "worker number, or all (default: all)", default="all", metavar="N|all")),
    ),
    "forward": Verb(
        "forward a local port to a worker", "look", "access.md", ("forward 8888", "forward 6006:6007"),
        (*RUN, WORKER,
         _flag("port", "local port, and the worker's port if different", type=ports, metavar="PORT[:REMOTE]")),
    ),
    "verify": Verb(
        "compare code, packages, config, data, chips, network of workers", "look", "access.md", ("verify",), RUN,
    ),
    "export": Verb(
        "export a run's weights for transformers, vLLM or another run", "use", "use-weights.md",
        ("export --to ./model", "export quickstart-f9ce2387 --best --to gs://my-bucket/model --dtype bfloat16"),
        (*CHECKPOINT, _flag("--to", "folder, or gs://BUCKET/FOLDER", "file", metavar="FOLDER"),
         _flag("--format", "hf, slipway for model.weights, peft for adapters (default: hf)",
               choices=["hf", "slipway", "peft"], default="hf"),
         _flag("--dtype", "dtype of the weights (default: as trained)", choices=["float32", "bfloat16", "float16"])),
    ),
    "chat": Verb(
        "chat with a run's policy on this machine", "use", "use-weights.md",
        ("chat", "chat quickstart-f9ce2387 --temperature 0"), (*CHECKPOINT, *SAMPLING),
    ),
    "generate": Verb(
        "sample responses from a run's policy on this machine", "use", "use-weights.md",
        ("generate --prompt 'Tom has 3 apples …' -n 4", "generate --prompts asked.jsonl --out said.jsonl"),
        (*CHECKPOINT, _flag("--prompt", "a prompt", action="append", default=[],
                            metavar="TEXT"),
         _flag("--prompts", "prompts, one JSON object per line", "file", metavar="FILE"),
         _flag("--column", "key of the prompt in --prompts (default: prompt)", default="prompt", metavar="KEY"),
         _flag("-n --samples", "samples per prompt (default: 1)", "number", type=COUNT, default=1, metavar="N"),
         _flag("--out", "write JSON lines to a file", "file", type=local_path, metavar="FILE"),
         _flag("--raw", "continue the prompts as they are, without the run's wording", action="store_true"),
         *SAMPLING),
    ),
    "cancel": Verb("end the run; keep the pod", "end", "recovery.md", ("cancel",), (*RUN, YES)),
    "stop": Verb("stop a single-VM pod; the next up starts it", "end", "capacity.md", ("stop",), (*RUN, YES)),
    "down": Verb(
        "delete the pod; --all: also the network, the bucket and the rest", "end", "what-is-created.md",
        (f"down {FLAGSHIP}", f"down -m {QUICKSTART} run.seed=0,1,2", f"down --all {FLAGSHIP}"),
        (SWEEP_FLAG, *RUN, YES,
         _flag("--all", "also delete the network, the bucket and the service account", action="store_true")),
    ),
    "orphans": Verb(
        "list billed Slipway resources that no run uses; --delete removes them", "end", "costs.md",
        ("orphans", "orphans --delete"), (YES, _flag("--delete", "delete them, after a prompt", action="store_true")),
    ),
    "init": Verb(
        "set up Google Cloud: credentials, project and a zone with quota; write slipway/cloud/mine.yaml", "setup",
        "first-run.md", ("init", "init --zone us-central1-a"),
        (YES, _flag("--zone", "choose this zone without a prompt", "word"),
         _flag("--no-bucket", "do not create the bucket now", action="store_true")),
    ),
    "doctor": Verb(
        "look for what would stop a run: login, rights, policies, quota, images, SSH, licenses; with cures", "setup",
        "troubleshooting.md", ("doctor cloud=mine tpu=mine", f"doctor {QUICKSTART} cloud=mine tpu=mine"),
        (_flag("--days", "age in days of Slipway's own tables, images and locks from which it warns (default: 180)",
               "number", type=ABOVE_0, default=180.0, metavar="N"),),
    ),
    "witness": Verb(
        "try everything once on your project, a preemption included; record, delete and compare it", "setup",
        "witness.md", ("witness cloud=mine", "witness --max-dollars 2 --minutes 20 --plane tpu_api cloud=mine"),
        (YES, _flag("--max-dollars", "dollars to spend at most, at the list price (default: 5)", "number", type=ABOVE_0,
                    default=5.0, metavar="USD"),
         _flag("--minutes", "minutes on each plane before the clean-up begins at the latest (default: 60)", "number",
               type=ABOVE_0, default=60.0, metavar="N"),
         _flag("--plane", "API that makes the pod (default: both, one after the other)", "word", default="both",
               choices=("both", "tpu_api", "compute_engine"), metavar="PLANE"),
         _flag("-o --output", "folder of the recording (default: witness-DATE-TIME)", "file", type=local_path,
               metavar="FOLDER")),
    ),
    "localcloud": Verb(
        "manage the emulated cloud: start, stop, wipe, env, requests", "setup", "emulated-cloud.md",
        ("localcloud start", "localcloud requests"),
        (_flag("action", "action to perform", choices=["start", "stop", "wipe", "env", "requests"]), YES),
    ),
    "completion": Verb(
        "set up Tab completion for bash, zsh or fish, and for YAML in editors", "setup", "cli.md",
        ("completion install", "completion install zsh", "completion bash"),
        (_flag("action", "install or uninstall it, or print what a shell or editor needs",
               choices=["install", "uninstall", "bash", "zsh", "fish", "vscode", COMPLETION_QUERY]),
         _flag("shell", "shell (default: yours)", nargs="?", metavar="SHELL")), config=False,
    ),
    "version": Verb("print the version of Slipway (also --version, -V)", "setup", "cli.md", ("version",), config=False),
    "help": Verb(
        "show this page, the page of a verb, or what a config key is and what sets it", "setup", "cli.md",
        ("help", "help plan", "plan --help", f"help optimizer.lr {QUICKSTART}", "help tpu", "help --web"),
        (_flag("topic", "a verb, or a key or section of the config", "verb", nargs="?", metavar="VERB|KEY"),
         _flag("--web", "open the documentation in a browser", action="store_true")),
    ),
}  # fmt: skip
"""Verbs in the order of the help, the most important first."""


MODULES = {
    "up": ("plan", "fit", "up", "run", "rehearse", "witness"), "status": ("status",),
    "runs": ("runs",), "billed": ("orphans",), "grants": ("capacity",), "reports": ("report", "tensorboard"),
    "on_workers": ("exec", "ssh", "forward", "verify"), "logs": ("logs",), "doctor": ("doctor",),
    "results": ("get", "export", "chat", "generate"), "down": ("cancel", "stop", "down"),
    "clouds": ("init", "localcloud"),
}  # fmt: skip
"""Modules of `controller/cli/verbs/`, with the verbs that each implements as `run_VERB`."""


def module_of(verb: str, *, of_sweep: bool = False) -> str:
    """Return the module that implements a verb; with -m, for the runs of a sweep."""
    if of_sweep:
        return "controller.cli.verbs.sweeps"
    of_command_line = {"completion": "completion", "help": "help", "version": "help"}
    found = next((f"verbs.{name}" for name, verbs in MODULES.items() if verb in verbs), of_command_line.get(verb))
    return f"controller.cli.{found}"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError on a mistake."""

    typed: Sequence[str] = ()
    """Words of the command line, each up to its =; of several names of a flag, errors say the one among them."""

    def error(self, message: str) -> NoReturn:
        found = re.match(r"argument (\S+): ", message)
        names = found[1].split("/") if found else [""]
        flag, said = next((name for name in names if name in self.typed), names[0]), message
        flag, said = (f"{flag}: ", message[found.end() :]) if found else ("", message)
        if takes := re.fullmatch(r"expected (\w+) arguments?", said):
            said = f"takes {takes[1]} word{'s' * (takes[1] != 'one')}"
        elif said.startswith("ignored explicit argument"):
            said = f"takes no value; write {flag[:-2]} alone, or leave it out"
        elif wrong := re.fullmatch(r"invalid \w+ value: (.*)", said):
            said = f"must be a whole number, not {wrong[1]}"
        elif wrong := re.fullmatch(r"invalid choice: (.+) \(choose from (.*)\)", said):
            said = f"unknown choice {wrong[1]}; choices: {wrong[2].replace(chr(39), '')}"
        elif needed := re.fullmatch(r"the following arguments are required: (.+)", said):
            choices = next((each.choices for each in self._actions if each.dest == needed[1]), None)
            said = f"needs {' or '.join(each for each in choices or [needed[1]] if each != COMPLETION_QUERY)}"
        raise ConfigError(f"{flag}{said}; see {self.prog} --help")


def parser(verb: str, words: Sequence[str] = ()) -> Parser:
    """Return the parser for a verb's flags and positional arguments. words: those that it will parse.

    Raises ConfigError if they have a flag twice that has one value.
    """
    made = Parser(prog="slipway" if verb == "up" else f"slipway {verb}", add_help=False, allow_abbrev=False)
    made.typed = [word.partition("=")[0] for word in words]
    for flag in flags(verb):
        is_lone = flag.names[0][0] == "-" and flag.argparse_options.get("action", "store") == "store"
        if is_lone and sum(word in flag.names for word in made.typed) > 1:
            raise ConfigError(f"{flag.names[0]}: is given twice; give it once")
        made.add_argument(*flag.names, **flag.argparse_options)
    return made


def flags(verb: str) -> tuple[Flag, ...]:
    """Return all flags of a verb, its own first."""
    return (*VERBS[verb].flags, JSON)
