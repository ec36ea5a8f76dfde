"""One file per verb of the command line; each has `run(command) -> exit code`."""
