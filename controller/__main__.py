"""`python -m controller` in the clone: what `python -m slipway` and the console script `slipway` are everywhere."""

import gc
import os
import re
import sys
from pathlib import Path

PROGRAM = re.compile(r"(trainer|controller)\.[\w.]+")
"""`slipway trainer.convert …` is `python -m trainer.convert …`: an installed Slipway is not found by `python -m`."""

OWN_PACKAGES = ("", "conf", "controller", "slipway", "trainer")

OBJECTS_PER_COLLECTION = 50_000
"""Python's default of 700 spends a tenth of a short verb on collections: what imports create is never garbage."""


def main() -> int:
    os.umask(0o077)  # no other user of this machine may read keys, tokens, logs and records
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # looks for them in every installed package
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    try:
        # `python -m` searches the working folder first, and it may hold packages named conf or trainer
        here = Path.cwd()
        if here != Path(__file__).resolve().parents[1]:
            sys.path[:] = [entry for entry in sys.path if Path(entry or here).resolve() != here]
    except FileNotFoundError:
        print("error: the working folder has been deleted; change to one that exists", file=sys.stderr)
        return 2
    if len(sys.argv) > 1 and PROGRAM.fullmatch(sys.argv[1]):
        from controller.core.this_process import own_program

        command = own_program(*sys.argv[1:])
        os.execv(command[0], command)  # noqa: S606 - our own program
    try:
        from conf.proxies import settle_proxies  # a `conf` may exist in the working directory too
        from controller.cli.main import run

        settle_proxies()
        try:
            return run(sys.argv[1:])
        finally:
            gc.freeze()  # Python would look through all objects once more as it ends
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in OWN_PACKAGES:
            raise
        print(
            f"error: {sys.executable} lacks the package {package}; install Slipway with its dependencies: "
            "`python -m pip install -e .` in its clone",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
