"""The benches: lists them, runs one by name or all of them, and keeps the table that each prints.

    python -m tests.bench                  # lists them
    python -m tests.bench growth [WORDS]   # WORDS are the bench's own
    python -m tests.bench --all

The tables are in tests/bench/tables/, one file a bench; docs/performance.md repeats that of `growth`.
"""

import argparse
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import tests.bench

TABLES = Path(__file__).with_name("tables")


def benches() -> dict[str, str]:
    """What each bench measures, by its name."""
    names = [found.name for found in pkgutil.iter_modules(tests.bench.__path__) if not found.ispkg]
    names = [name for name in names if name != "__main__" and not name.startswith("test_")]
    docs = {name: importlib.import_module(f"tests.bench.{name}").__doc__ or "" for name in names}
    return {name: doc.partition("\n")[0] for name, doc in docs.items()}


def command(name: str) -> list[str]:
    return [sys.executable, "-m", f"tests.bench.{name}"]


def run(name: str, words: Sequence[str]) -> int:
    """Run a bench, show what it prints, and keep the table of it if it succeeds; return its exit code."""
    with subprocess.Popen([*command(name), *words], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        lines = []
        for line in started.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if not started.returncode:
        TABLES.mkdir(exist_ok=True)
        table = (re.sub(r" *\| *", "|", line) for line in lines if line.startswith("|"))
        (TABLES / f"{name}.md").write_text("".join(table))
    return started.returncode


def main(given: Sequence[str]) -> int:
    known = benches()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="run all of them")
    parser.add_argument("name", nargs="?", choices=known, help="run this one")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="of the bench's own")
    options = parser.parse_args(given)
    if options.all or options.name:
        return max([run(name, options.words) for name in ([options.name] if options.name else known)])
    print("\n".join(f"{name:10} {doc}" for name, doc in known.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
