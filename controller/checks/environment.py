"""Do the workers get the Python, the variables and the secrets that the program needs?"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from conf.schema.config import Config
from controller.checks.names import strings
from controller.config.placeholders import PLACEHOLDER
from controller.core.finding import Finding

WANDB_KEY = "WANDB_API_KEY"
OPTIONAL = ("HF_TOKEN", WANDB_KEY, "NETRC")
"""Passed on by default where they are set; who has none needs none."""
SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIALS?)$", re.IGNORECASE)
SECRET_VARIABLE = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|(API|ACCESS|SECRET|PRIVATE)_?KEY)$")
SHORTEST_SECRET = 8
"""Characters; shorter values are in many texts by chance."""
LONGEST_WORD = 131_000
"""Bytes of an argument, or of a variable with its name: a little less than 32 pages."""
OLDEST_PYTHON = (3, 11)


def requirements_are_named(config: Config) -> Iterator[Finding]:
    """A venv of requirements needs their file, and a file that nobody reads is a mistake."""
    wanted = config.env.packages == "requirements"
    if wanted and config.env.requirements is None and not config.program.setup:
        words = "env.packages=requirements installs a file of your repository; name it, e.g. requirements.txt"
        yield Finding("requirements", "error", "env.requirements", words)
    elif not wanted and config.env.requirements is not None:
        words = f"{config.env.requirements} is not read with env.packages={config.env.packages}; use requirements"
        yield Finding("requirements", "error", "env.packages", words)


def python_is_new_enough(config: Config) -> Iterator[Finding]:
    """JAX from 0.7 on needs Python 3.11; the images of TPU VMs have 3.10, with which pip quietly takes an old JAX."""
    version = tuple(int(part) for part in config.env.python.split(".")[:2])
    if version >= OLDEST_PYTHON:
        return
    words = f"{config.env.python} caps JAX at 0.6.2, silently; choose 3.11 or later"
    if config.env.packages == "lock":
        yield Finding("python", "error", "env.python", words)
    elif config.env.requirements is not None:
        yield Finding("python", "warning", "env.python", words)


def trainer_has_jax(config: Config) -> Iterator[Finding]:
    """The bundled trainer needs the packages that its lock names; an image has no JAX."""
    if config.program.kind == "trainer" and config.env.packages == "none" and config.cloud.kind == "gcp":
        words = "program=trainer needs JAX, which the image has not; choose lock"
        yield Finding("trainer_packages", "error", "env.packages", words)


def secrets_are_there(config: Config) -> Iterator[Finding]:
    """What a secret comes from is looked at before anything is billed; Secret Manager is asked by `plan` and `up`."""
    for name, source in config.env.secrets.items():
        key = f"env.secrets.{name}"
        kind, _, rest = (source or "").partition(":")
        if source == "env" and name not in OPTIONAL and not os.environ.get(name):
            words = f"the environment variable {name} is not set, so the program will not see it"
            yield Finding("secret", "warning", key, words)
        elif kind == "env" and rest and not os.environ.get(rest):
            yield Finding("secret", "error", key, f"the environment variable {rest} is not set; set it, or say null")
        elif kind == "file" and not Path(rest).expanduser().is_file():
            yield Finding("secret", "error", key, f"there is no file {rest}; name another, or say null")


def wandb_is_possible(config: Config) -> Iterator[Finding]:
    """W&B takes a package on the workers and, online, a key; without them it would be known once the pod is billed."""
    wanted, key = config.logging.wandb, "logging.wandb"
    if wanted is None:
        return
    if config.program.kind != "trainer":
        words = "is of the bundled trainer; a program of yours speaks to W&B itself: say null"
        yield Finding("wandb", "error", key, words)
        return
    here = config.env.packages == "image" and config.cloud.kind == "local"
    if here and find_spec("wandb") is None:
        words = "the package is not installed here, where the workers have theirs from: pip install 'slipway[wandb]'"
        yield Finding("wandb", "error", key, words)
    source = config.env.secrets.get(WANDB_KEY)
    if wanted.mode == "online" and (not source or (source == "env" and not os.environ.get(WANDB_KEY))):
        words = f"{WANDB_KEY} is not set; set it (https://wandb.ai/authorize), name a file or Secret Manager in "
        words += f"env.secrets.{WANDB_KEY}, or say mode: offline"
        yield Finding("wandb", "error", key, words)


def no_secrets_in_variables(config: Config) -> Iterator[Finding]:
    """`env.vars` is recorded in the bucket, in plan.yaml; `env.secrets` is recorded nowhere."""
    for name in config.env.vars:
        if SECRET_NAME.search(name):
            words = f"looks like a secret and would be recorded; set it in your shell and say env.secrets.{name}=env"
            yield Finding("secret_in_vars", "warning", f"env.vars.{name}", words)


def no_secret_is_in_the_config(config: Config) -> Iterator[Finding]:
    """A config is recorded: in the bucket, in the state folder, on the terminal. A shell puts what `$HF_TOKEN` holds
    into it without a word, and so does `${oc.env:HF_TOKEN}`."""
    sources = {name: (source or "").removeprefix("env:") for name, source in config.env.secrets.items()}
    named = {name if source == "env" else source for name, source in sources.items()} - {"NETRC"}
    kept = {n: value for n, value in os.environ.items() if n in named or SECRET_VARIABLE.search(n)}
    for key, text in strings(config.model_dump(mode="json"), ""):
        for name, value in kept.items():
            if len(value) >= SHORTEST_SECRET and value in text and not key.startswith("env.secrets."):
                words = f"holds the value of your variable {name}, which would be recorded; env.secrets passes it on"
                yield Finding("secret_value", "error", key, words)


def words_fit_a_process(config: Config) -> Iterator[Finding]:
    """Linux starts no program with a longer word or variable: https://man7.org/linux/man-pages/man2/execve.2.html"""
    plain = config.model_dump(mode="json", include={"env": {"vars"}, "program": {"command", "setup"}})
    for key, text in strings(plain, ""):
        if len(text.encode()) > LONGEST_WORD:
            words = f"has {len(text.encode())} bytes, and a program is given at most {LONGEST_WORD}; put it into a file"
            yield Finding("long_word", "error", key, words)


def variables_are_told_once(config: Config) -> Iterator[Finding]:
    """A secret counts more than a variable of the same name, and what slipway sets counts more than both."""
    for name in config.env.vars:
        if config.env.secrets.get(name):
            words = f"{name} is in env.vars too; take it out of one of them"
            yield Finding("variable_twice", "error", f"env.secrets.{name}", words)
        if name.startswith("SLIPWAY_"):
            words = "names that begin with SLIPWAY_ are set by slipway; choose another"
            yield Finding("variable_reserved", "error", f"env.vars.{name}", words)


def placeholders_name_assets(config: Config) -> Iterator[Finding]:
    """`{assets.models.NAME}` becomes the URL of the copy in the bucket, if there is such an asset."""
    known = {f"assets.{kind}s.{name}" for kind, name, _ in config.assets.each()}
    texts = {f"env.vars.{name}": value for name, value in config.env.vars.items()}
    texts["program.command"] = " ".join(config.program.command)
    texts["program.setup"] = " ".join(word for argv in config.program.setup for word in argv)
    for key, text in texts.items():
        for word in PLACEHOLDER.findall(text):
            if word.startswith("assets.") and word not in known:
                choices = ", ".join(sorted(known)) or "none is configured"
                yield Finding("asset_named", "error", key, f"{{{word}}} names no asset; there are: {choices}")


CHECKS = (
    requirements_are_named,
    python_is_new_enough,
    trainer_has_jax,
    secrets_are_there,
    wandb_is_possible,
    no_secrets_in_variables,
    no_secret_is_in_the_config,
    words_fit_a_process,
    variables_are_told_once,
    placeholders_name_assets,
)
