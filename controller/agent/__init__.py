"""The worker agent: does on a worker what would otherwise be long bash strings over SSH.

Standard library only, Python 3.10 and later. The controller sends this package as one zip file, which every worker
runs as `python3 agent-<sha>.pyz COMMAND`: the arguments are one JSON document on stdin, the answer is one on stdout
(`watch`: one per line) with exit 0, or {"error", "detail"} with exit 1. `main.COMMANDS` lists the commands.

Every command may be interrupted anywhere, repeated, and run beside itself: files and folders appear by rename (a venv
by a mark that is written last), and what must not happen twice at once happens under flock, which the kernel releases
however its holder dies.

    ~/.slipway/                 folders 0700, files 0600
      code/<tree hash>/         unpacked code, never run in place
      venv/<fingerprint>/       slipway.json in it: it is complete, and what was installed
      devices.json, peers.json  what a probe found; counts for the boot that it names
      tidy.json                 what could not be tidied; the same
      maintenance.json          a program has been told of it; the same
      runs/<run id>/            $SLIPWAY_RUN_DIR: run.yaml, env, and the program's metrics.jsonl and summary.json
        secrets, netrc          while the program lives
        setup.json, setup.log   what prepared it, once
        work/                   the program's working directory: a copy of the code, kept between attempts
        attempt-<n>/            pid.json, log, notice.json, exit.json, supervisor.log
"""

from .tree_hash import tree_hash

__all__ = ["tree_hash"]
