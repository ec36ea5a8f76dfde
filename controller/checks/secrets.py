"""Secrets: each is where the config says, and stays out of the code, the assets, the config and the command."""

import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from conf.schema.config import Config
from controller.checks.names import iter_strings
from controller.context import Context
from controller.core.finding import Issue, check
from controller.inputs.env_inputs import NETRC, address_problem
from controller.inputs.git import strip_password
from controller.plan.build import Plan

WANDB_KEY = "WANDB_API_KEY"
OPTIONAL = ("HF_TOKEN", WANDB_KEY, "NETRC")
"""Passed on by default if set; not required."""
SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIALS?)$", re.IGNORECASE)
SECRET_VARIABLE = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|(API|ACCESS|SECRET|PRIVATE)_?KEY)$")
SECRET_TEXT = re.compile(
    r"\b(hf_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{8,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|"
    r"sk-[\w-]{16,}|AIza[\w-]{16,}|AKIA[A-Z0-9]{12,}|xox[abprs]-[\w-]{10,}|glpat-[\w-]{16,}|ya29\.[\w-]{16,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
)
"""Beginnings of tokens of Hugging Face, GitHub, OpenAI and Anthropic, Google, Amazon, Slack and GitLab."""
PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@{$]+@")
"""In an address, `://user:password@host`."""
SECRET_OPTION = re.compile(r"--?([\w-]*[-_])?(token|secret|password|passwd|passphrase|api[-_]?key)", re.IGNORECASE)
SECRET_VALUE = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w.+/=-]{8,}")
MIN_SECRET_LENGTH = 8
"""Characters. Shorter values occur in many texts by chance."""


@check("secret", "error", "env.secrets.NAME", also="warning")
def secrets_are_there(config: Config) -> Iterator[Issue]:
    """Each secret's source is checked before anything is billed. `plan` and `up` query Secret Manager."""
    for name, source in config.env.secrets.items():
        key = f"env.secrets.{name}"
        kind, _, rest = (source or "").partition(":")
        if source == "env" and name not in OPTIONAL and not os.environ.get(name):
            yield Issue(f"the environment variable {name} is not set, so the program will not get it", key, "warning")
        elif kind == "env" and rest and not os.environ.get(rest):
            yield Issue(f"the environment variable {rest} is not set; set it, or use null", key)
        elif kind == "file" and not Path(rest).expanduser().is_file():
            yield Issue(f"no file at {rest}; set another path, or use null", key)


@check("secret_shipped", "error", "env.secrets.NAME", "notify.webhook", of_plan=True)
def secrets_stay_here(plan: Plan, context: Context) -> Iterator[Issue]:
    """Code and assets are copied to the bucket and to every worker."""
    del context
    assets = [Path(asset.path).expanduser() for _, _, asset in plan.config.assets.iter_assets() if asset.path]
    shipped = {path.resolve() for path in plan.snapshot.paths.values()}
    for name, source in plan.config.secret_sources.items():
        kind, _, rest = (source or "").partition(":")
        file = Path(rest if kind == "file" else os.environ.get(NETRC, "")).expanduser().resolve()
        if kind != "file" and (name, source) != (NETRC, "env"):
            continue
        key = name if "." in name else f"env.secrets.{name}"
        if file in shipped:
            yield Issue(f"{file} is shipped with the code; move it elsewhere, or name it in code.exclude", key)
        elif file.is_file() and (within := [root for root in assets if file.is_relative_to(root.resolve())]):
            yield Issue(f"{file} is part of the asset at {within[0]}; move it elsewhere", key)


@check("webhook", "error", "notify.webhook")
def webhook_is_there(config: Config) -> Iterator[Issue]:
    """A webhook that cannot work would be noticed only at the end of the run, by nobody."""
    kind, _, rest = (config.notify.webhook or "").partition(":")
    if kind == "env":
        value = os.environ.get(rest, "")
        if not value:
            yield Issue(f"the environment variable {rest} is not set; set it to the webhook's address, or use null")
    elif kind == "file" and Path(rest).expanduser().is_file():
        value = Path(rest).expanduser().read_text().strip()
    elif kind == "file":
        yield Issue(f"no file at {rest}; set another path, or use null")
        return
    else:
        return  # Secret Manager is asked when it is needed
    if value and (problem := address_problem(value)):
        yield Issue(f"{config.notify.webhook}: {problem}")


@check("variable_twice", "error", "env.secrets.NAME")
def variables_are_set_once(config: Config) -> Iterator[Issue]:
    """A secret overrides a variable of the same name."""
    for name in config.env.vars:
        if config.env.secrets.get(name):
            given = f"env.secrets.{name}={config.env.secrets[name]} passes yours on"
            yield Issue(f"{given}; leave this out, or set env.secrets.{name}=null", f"env.vars.{name}")


@check("secret_in_vars", "warning", "env.vars.NAME")
def no_secrets_in_variables(config: Config) -> Iterator[Issue]:
    """`env.vars` is recorded in the bucket, in plan.yaml. `env.secrets` is never recorded."""
    for name in config.env.vars:
        if SECRET_NAME.search(name) and not config.env.secrets.get(name):  # then `variable_twice` tells it
            message = (
                f"looks like a secret and would be recorded; export it in your shell and use env.secrets.{name}=env"
            )
            yield Issue(message, f"env.vars.{name}")


def _secrets_here(config: Config) -> dict[str, str]:
    """Return the variables of this process that hold secrets: those that the config names, or that are called so."""
    sources = {name: (source or "").removeprefix("env:") for name, source in config.env.secrets.items()}
    named = {name if source == "env" else source for name, source in sources.items()} - {"NETRC"}
    found = {n: value for n, value in os.environ.items() if n in named or SECRET_VARIABLE.search(n)}
    return {name: value for name, value in found.items() if len(value) >= MIN_SECRET_LENGTH}


@check("secret_like", "warning", "KEY")
def nothing_looks_like_a_secret(config: Config) -> Iterator[Issue]:
    """The config is recorded in the bucket and the state folder and shown on the terminal, its command included."""
    cure = "looks like a token, which would be recorded; set env.secrets.NAME=env and read the variable NAME"
    kept = _secrets_here(config).values()
    for key, text in iter_strings(config.model_dump(mode="json"), ""):
        of_secret = key.startswith("env.vars.") and SECRET_NAME.search(key.removeprefix("env.vars."))
        if of_secret or any(value in text for value in kept):
            continue  # `secret_in_vars` or `secret_value` tells it
        has_password = key.startswith(("env.vars.", "program.")) and PASSWORD.search(text)
        if SECRET_TEXT.search(text) or has_password:
            yield Issue(cure.replace("a token", "a password") if has_password else cure, key)
    for key, argv in (("command", config.program.command), *(("setup", argv) for argv in config.program.setup)):
        for word, value in pairwise((*argv, "")):
            name, has_value, given = word.partition("=")
            given = given if has_value else value
            if SECRET_OPTION.fullmatch(name) and SECRET_VALUE.fullmatch(given) and not SECRET_TEXT.search(given):
                yield Issue(f"the value of {name} {cure}", f"program.{key}")


@check("secret_value", "error", "KEY")
def no_secret_is_in_the_config(config: Config) -> Iterator[Issue]:
    """The config is recorded in the bucket and the state folder and shown on the terminal. A shell silently expands
    `$HF_TOKEN`; `${oc.env:HF_TOKEN}` is refused before (docs/security.md).
    """
    kept = _secrets_here(config)
    for key, text in iter_strings(config.model_dump(mode="json"), ""):
        for name, value in kept.items():
            if value in text and not key.startswith("env.secrets."):
                yield Issue(
                    f"contains the value of your variable {name}, which would be recorded; use env.secrets", key
                )


@check("repository_password", "error", "code.repository.url")
def repository_has_no_password(config: Config) -> Iterator[Issue]:
    """A password in an address would be recorded with the results; git can use a credential helper or an SSH key."""
    url = config.code.repository.url if config.code.repository else ""
    if strip_password(url) != url:
        yield Issue("contains a password or token, which would be recorded; use git's credential helper or SSH")
