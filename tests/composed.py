"""Configs as the command line composes them."""

from pathlib import Path

from conf.schema.config import Config
from controller.config.compose import compose


def config_of(*words: str, folder: Path | None = None) -> Config:
    """The config of these words, with which nothing is wrong; `folder` holds the user's own files."""
    config, problems = compose(words, extra_dir=folder)
    assert config is not None, problems
    assert problems == []
    return config


def problems_of(*words: str, folder: Path | None = None) -> list[str]:
    """What is wrong with the config of these words."""
    return [str(problem) for problem in compose(words, extra_dir=folder)[1]]
