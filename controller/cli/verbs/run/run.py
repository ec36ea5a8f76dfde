"""`slipway run -- PROGRAM`: `up` for a program without a config; the overrides stand for it from here on."""

from controller.cli.verbs.run.up import run as run

__all__ = ["run"]
