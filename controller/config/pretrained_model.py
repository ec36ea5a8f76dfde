"""Complete the section `model` with the sizes and switches of a config.json of Hugging Face (`model=pretrained`)."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conf.hugging_face.config_json import UnknownArchitectureError, model_from_config
from conf.schema.infra.assets import parse_source
from conf.schema.training.model import KEYS_FREE_OF_WEIGHTS, family_switches
from conf.schema.validation import ConfigProblem
from controller.config.hub_model import HUB, hub_file, with_hub_weights

KEY = "model.config_json"
ASSET = "assets://"
FILE = "config.json"
INSTEAD = f"the model's repository, such as google/gemma-2-2b, or to a copy of its {FILE}"
TIMEOUT_SECONDS = 10
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
FREE_KEYS = KEYS_FREE_OF_WEIGHTS | {"implementation"}
"""Keys of the section that may differ from config.json: how the model is computed."""
STAND_IN = "gemma2"
"""Family of the small model of a rehearsal, which has sizes and no switches."""


class _UnreadableError(ValueError):
    """A config.json cannot be read here."""


def with_pretrained_model(data: dict[str, Any]) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """Return composed data whose model is complete, and what is wrong with its config.json."""
    data, problems = with_hub_weights(data)
    if problems:
        return data, problems
    model = data.get("model")
    if not isinstance(model, dict) or "config_json" not in model:
        return data, []
    source = model["config_json"]
    if source is None:
        if "num_layers" not in model and "norm" not in model:
            return data, [
                ConfigProblem("model.weights", "set it to a folder of Hugging Face, or set model.config_json")
            ]
        return data | {"model": family_switches(STAND_IN) | model if "norm" not in model else model}, []
    try:
        described = model_from_config(_read(str(source), data)).model_dump(mode="json")
    except (_UnreadableError, UnknownArchitectureError) as error:
        return data, [ConfigProblem(KEY, f"{source}: {error}")]
    problems = [
        ConfigProblem(
            f"model.{key}", f"is {value!r}, and {described[key]!r} in {source}; remove it, as in ~model.{key}"
        )
        for key, value in model.items()
        if key not in FREE_KEYS and key in described and value != described[key]
    ]
    return data | {"model": described | model}, problems


def _read(source: str, data: Mapping[str, Any]) -> Any:
    file = _local_file(source, data)
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        raise _UnreadableError(f"there is no such folder with a {FILE} here") from None
    except OSError as error:
        raise _UnreadableError(f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise _UnreadableError(f"{FILE} is not valid JSON: {error}") from None


def _local_file(source: str, data: Mapping[str, Any]) -> Path:
    """Return the file of a source; that of a repository is downloaded once."""
    if source.startswith(ASSET):
        return _file_of_asset(source, data)
    if source.startswith(HUB):
        return _file_of_hub(source)
    if "://" in source:
        raise _UnreadableError(f"is not read from here; set {KEY} to {INSTEAD}")
    path = _with_file(Path(source).expanduser())
    of_weights = source == data["model"].get("weights")  # the run reads them from a folder
    if not path.exists() and REPOSITORY.fullmatch(source) and not of_weights:
        return _downloaded(source)
    return path


def _with_file(path: Path) -> Path:
    return path if path.name == FILE else path / FILE


def _file_of_asset(source: str, data: Mapping[str, Any]) -> Path:
    """Return the file in an asset's folder, or that of the repository which its command downloads."""
    name, _, rest = source.removeprefix(ASSET).partition("/")
    asset = ((data.get("assets") or {}).get("models") or {}).get(name) or {}
    if (folder := asset.get("path")) is not None:
        return _with_file(Path(folder).expanduser() / rest)
    if str(asset.get("source")).startswith(HUB):
        return _file_of_hub(asset["source"], rest)
    words = [str(word) for word in asset.get("build") or ()]
    if "download" in words[:2] and (repository := next(filter(REPOSITORY.fullmatch, words), None)):
        return _downloaded(repository)
    raise _UnreadableError(f"assets.models.{name}.path is not set; set {KEY} to {INSTEAD}")


def _file_of_hub(source: str, folder: str = "") -> Path:
    try:
        address = parse_source(source)
        return hub_file(address, f"{address.folder}{folder}/{FILE}".lstrip("/"))
    except ValueError as error:
        raise _UnreadableError(str(error)) from None


def _downloaded(repository: str) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] - httpx's
        RepositoryNotFoundError,
    )

    if isinstance(kept := try_to_load_from_cache(repository, FILE), str):
        return Path(kept)
    page = f"https://huggingface.co/{repository}"
    try:
        get_hf_file_metadata(hf_hub_url(repository, FILE), timeout=TIMEOUT_SECONDS)
        return Path(hf_hub_download(repository, FILE))
    except GatedRepoError:
        raise _UnreadableError(f"it is gated; accept its license at {page}, then run `hf auth login`") from None
    except RepositoryNotFoundError:
        raise _UnreadableError(f"there is no such folder here, and no public repository {page}") from None
    except EntryNotFoundError:
        raise _UnreadableError(f"{page} has no {FILE}") from None
    except (HTTPError, OSError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise _UnreadableError(f"there is no such folder here, and {page} does not answer ({why})") from None
