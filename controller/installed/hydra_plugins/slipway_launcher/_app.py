"""How an app is started again on a worker: its file or module, and the overrides that mean something there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import CompactHydraException
from omegaconf import DictConfig, OmegaConf

OWN_KEYS = re.compile(
    r"^[+~]*hydra(/launcher|/sweeper|\.launcher|\.sweeper|\.sweep|\.mode|\.run\.dir|\.job\.(num|id))\b"
)
"""Overrides that say how the multirun is driven here, or that the worker sets itself."""
JOB_NUMBER = re.compile(r"\$\{hydra[:.]job\.(num|id)\b")
SETTING_KEYS = {"packages": "env.packages", "requirements": "env.requirements"}


class AppNotFoundError(CompactHydraException):
    """The app is not in the folder that is shipped, so no worker could start it."""


def app_words(config: DictConfig, task_function: Any, folder: Path) -> list[str]:
    """Return how Python starts the app in `folder`, with the flags that choose its config.

    Raises:
        AppNotFoundError: neither its file nor its module is in the repository.
    """
    top = _repository(folder)
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    file = getattr(main, "__file__", None)
    if spec is not None:
        words, file = ["-m", spec.name.removesuffix(".__main__")], spec.origin
    elif file is not None and Path(file).resolve().is_relative_to(top):
        words = [os.path.relpath(Path(file).resolve(), folder.resolve())]
    else:  # a console script, which imports the app
        module = task_function.__module__
        found = importlib.util.find_spec(module) if module != "__main__" else None
        words, file = ["-m", module], found.origin if found is not None else None
    if file is None or not Path(file).resolve().is_relative_to(top):
        raise AppNotFoundError(
            f"hydra/launcher=slipway ships {top}, and the app ({file or 'without a file'}) is not in it; start it from "
            "its repository"
        )
    return [*words, *_config_flags(config, Path(file).resolve().parent, folder, top)]


def _config_flags(config: DictConfig, app: Path, folder: Path, top: Path) -> list[str]:
    """Return `--config-name`, `--config-path` and `--config-dir`; absolute paths become relative ones."""
    from hydra._internal.utils import get_args_parser

    known, _ = get_args_parser().parse_known_args(sys.argv[1:])
    words = ["--config-name", str(config.hydra.job.config_name)] if known.config_name else []
    for flag, value, base in (("--config-path", known.config_path, app), ("--config-dir", known.config_dir, folder)):
        if value is None:
            continue
        path = Path(base, value).resolve()
        if not path.is_relative_to(top):
            raise AppNotFoundError(f"{flag} {value}: is outside {top}, which is what the workers get")
        words += [flag, os.path.relpath(path, base.resolve())]
    return words


def job_words(config: DictConfig, task: Sequence[str], number: int | None) -> list[str]:
    """Return the overrides of a job on a worker: its own, and those of Hydra that are not about the multirun."""
    of_hydra = [str(word) for word in config.hydra.overrides.hydra]
    kept = [word for word in [*task, *of_hydra] if not OWN_KEYS.match(word)]
    return kept if number is None else [*kept, f"++hydra.job.num={number}", f"++hydra.job.id={number}"]


def refers_to_the_job_number(config: DictConfig) -> bool:
    """Return whether the app's config or its job settings contain `${hydra:job.num}` or `${hydra:job.id}`."""
    parts = [value for key, value in config.items_ex(resolve=False) if key != "hydra"]
    plain = OmegaConf.to_yaml(OmegaConf.create({"app": parts, "job": config.hydra.job}), resolve=False)
    return JOB_NUMBER.search(plain) is not None


def output_folders(config: DictConfig) -> list[str]:
    """Return the folders that Hydra writes outputs to, up to the first part that changes, such as the time."""
    raw: Any = OmegaConf.to_container(config.hydra, resolve=False)
    folders = {"multirun", "outputs", str(config.hydra.sweep.dir)}
    for text in (raw["run"]["dir"], raw["sweep"]["dir"]):
        fixed = str(text).partition("${")[0].rpartition("/")[0]
        folders |= {fixed} if fixed.strip("./") else set()
    return sorted(folders)


def local_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return Slipway's overrides for `hydra.launcher`'s keys; those of `overrides` come last and win."""
    words = [f"cloud={settings['cloud']}"] if settings["cloud"] else []
    words.append(f"sweep.pods={settings['pods']}")
    words += [f"{key}={settings[name]}" for name, key in SETTING_KEYS.items() if settings[name]]
    if settings["requirements"] and not settings["packages"]:
        words.append("env.packages=requirements")
    if settings["setup"]:
        commands = ",".join(f"[{','.join(_quoted(str(word)) for word in argv)}]" for argv in settings["setup"])
        words.append(f"program.setup=[{commands}]")
    return [*words, *settings["overrides"]]


def _quoted(text: str) -> str:
    """Quote a word in Hydra's grammar; `${x}` is not interpolated."""
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", escaped)
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", escaped) + "'"


def _repository(folder: Path) -> Path:
    """Return the top of the git repository around a folder; the folder itself if there is none."""
    command = ["git", "rev-parse", "--show-toplevel"]
    try:
        git = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # git is not installed
        return folder.resolve()
    return Path(git.stdout.strip() if git.returncode == 0 else folder).resolve()
