"""Worker agent: runs on a worker what would otherwise be long bash strings over SSH.

Standard library only, Python 3.10 and later. The controller ships this package as one zip file. Every worker runs it as
`python3 agent-<sha>.pyz COMMAND`: arguments are one JSON document on stdin; the answer is one JSON document on stdout
(`watch`: one per line) with exit code 0, or {"error", "detail"} with exit code 1. `dispatch.COMMANDS` lists
the commands.

Every command can be interrupted, repeated, and run concurrently with itself. Files and folders appear by rename; a venv
counts once its marker is written, which happens last. Exclusive sections hold a flock, which the kernel releases
however the process dies.

    ~/.slipway/                 folders 0700, files 0600
      agent-<sha>/              the agent's modules and their bytecode, unpacked from the zip file beside it
      code/<tree hash>/         unpacked code, never run in place
      venv/<fingerprint>/       complete if it holds slipway.json, which lists the installed packages
      devices.json, peers.json  results of probes, valid for the boot they name
      health.json               the chips have passed the health check, valid for the boot it names
      tidy.json                 what could not be tidied, valid for the boot it names
      maintenance.json          a program has been notified of maintenance, valid for the boot it names
      runs/<run id>/            $SLIPWAY_RUN_DIR: run.yaml, env, and the program's metrics.jsonl and summary.json
        secrets, netrc          only while the program lives
        setup.json, setup.log   the setup commands, run once
        work/                   the program's working directory: a copy of the code, kept between attempts
        attempt-<n>/            pid.json, log, notice.json, exit.json, supervisor.log
"""
