"""Models of Hugging Face: `model.weights=hf://OWNER/NAME`, and sizes from a config.json (`model=pretrained`)."""

import json
import logging
import os
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.config_json import UnknownArchitectureError, model_from_config
from conf.schema.assets import HUB_NAME, SourceAddress, parse_source
from conf.schema.problems import ConfigProblem
from conf.schema.training.model import KEYS_FREE_OF_WEIGHTS, family_switches
from controller.core.text import nearest_names

if TYPE_CHECKING:
    from conf.chat_template import TokenizerFiles

HUB = "hf://"
PUBLIC_HUB = "https://huggingface.co"
WEIGHTS_KEY = "model.weights"
MISSING_TOKENIZER = "bytes"
"""The value of data.tokenizer in the data sources, which no published model has."""
TIMEOUT_SECONDS = 10


class HubFileError(ValueError):
    """A small file of a repository cannot be read now."""


class HubFileAbsentError(HubFileError):
    """A repository has no such file."""


def with_hub_weights(data: dict[str, Any]) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """Return composed data whose weights on the Hub are an asset, which `up` copies to the bucket."""
    model = data.get("model")
    weights = model.get("weights") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(weights, str) or not weights.startswith(HUB):
        return data, []
    try:
        address = parse_source(weights)
    except ValueError as error:
        return data, [ConfigProblem(WEIGHTS_KEY, str(error).removeprefix("source: ") + _meant(weights))]
    if address.kind != "model":
        return data, [
            ConfigProblem(WEIGHTS_KEY, f"{weights} is a data set; name a model, such as hf://Qwen/Qwen3-0.6B")
        ]
    if re.search(r"\.(safetensors|gguf|bin|json|pt|pth)$", address.pattern) and "*" not in address.pattern:
        return data, [
            ConfigProblem(WEIGHTS_KEY, f"{weights} is a file; name its repository: {HUB}{address.repository}")
        ]
    name = re.sub(r"[^a-z0-9]+", "-", address.repository.partition("/")[2].lower())
    name = re.sub(r"^(?![a-z])", "m-", name.strip("-"))[:63].rstrip("-")  # as the schema wants names
    source = f"{weights}/*" if address.pattern == "**" else weights
    assets = dict(data.get("assets") or {})
    assets["models"] = {**(assets.get("models") or {}), name: {"source": source}}
    data = data | {"model": model | {"weights": f"assets://{name}"}, "assets": assets}
    section, others = data.get("data"), assets["models"].keys() - {name}
    if not isinstance(section, dict) or not _is_of_another(section.get("tokenizer"), others):
        return data, []
    section = section | {"tokenizer": f"assets://{name}/tokenizer.json"}
    try:
        return data | {"data": section | _prompt_keys(section.get("chat_template"), address)}, []
    except HubFileAbsentError as error:
        if said := _no_model(weights, address):
            return data, [ConfigProblem(WEIGHTS_KEY, f"{weights}: {said}")]
        return data, [ConfigProblem("data.tokenizer", f"is not set, and {weights} has none: {error}")]
    except HubFileError as error:
        return data, [ConfigProblem(WEIGHTS_KEY, f"{weights}: {error}{_meant(weights)}")]
    except ValueError as error:
        message = f"what {weights} says of prompts cannot be used: {error}; set data.tokenizer and data.chat_template"
        return data, [ConfigProblem("data.chat_template", message)]


def _meant(weights: str) -> str:
    """Return how a name of the Hub is written that was probably meant; empty if it is written so, or is none."""
    found = HUB_NAME.fullmatch(weights)
    if found is None or weights.startswith(("models/", "model/")):
        return ""
    name = found["name"] if "/" in found["name"] else f"OWNER/{found['name']}"
    revision = f"@{found['revision']}" if found["revision"] not in (None, "", "main") else ""
    written = f"{HUB}{name}{revision}"
    return "" if written == weights else f"; a model of the Hub is {WEIGHTS_KEY}={written}"


def _no_model(weights: str, address: SourceAddress) -> str:
    """Return why a repository is no model that can be read; empty if it may be one. Raises HubFileError."""
    for name in (FILE, "adapter_config.json"):
        try:
            hub_file(address, name)
        except HubFileAbsentError:
            continue
        adapter = f"is an adapter of LoRA: assets.models.a.source={weights} model.lora.adapter=assets://a"
        return "" if name == FILE else adapter
    return f"has no {FILE}; name the repository of the model itself, with {FILE} and safetensors, not one of GGUF files"


def _prompt_keys(asked: str | None, address: SourceAddress) -> dict[str, Any]:
    """Return special tokens and turns of a model. asked: the config's turns; for `none` the model may have its own.

    Raises HubFileError, and another ValueError for files that say nothing sensible.
    """
    described = json.loads(hub_file(address, "tokenizer_config.json").read_text(encoding="utf-8"))
    if not isinstance(described, dict):
        raise ValueError("tokenizer_config.json holds no mapping")
    if asked == "none" and hub_tokenizer(address).is_tuned:
        asked = "own"
    if asked in (None, "none"):
        return _special_tokens(described)
    return {"chat_template": asked, "bos": None, "eos": None}


def hub_tokenizer(address: SourceAddress, unreachable: str = "") -> "TokenizerFiles":
    """Return what a repository, or a folder of it, says about prompts; its attributes also raise HubFileError."""
    from conf.chat_template import TokenizerFiles

    def read(name: str) -> bytes | None:
        try:
            return hub_file(address, name, unreachable).read_bytes()
        except HubFileAbsentError:
            return None

    return TokenizerFiles(read, address.repository.rpartition("/")[2])


def _is_of_another(tokenizer: Any, others: Set[str]) -> bool:
    """Return whether a tokenizer cannot be this model's: that of no model, or of the weights that this one replaces."""
    asset = re.match(r"assets://([^/]+)/", str(tokenizer))
    return tokenizer == MISSING_TOKENIZER or (asset is not None and asset[1] in others)


def hub_file(address: SourceAddress, name: str, unreachable: str = "") -> Path:
    """Return a small file of an address, downloaded once per revision. Raises HubFileError if it cannot be read.

    unreachable: why the Hub cannot be asked now, which then says why a file was not read that is not in the cache.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] - httpx's
        OfflineModeIsEnabled,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # each of its retries would be a line
    endpoint = (os.environ.get("HF_ENDPOINT") or PUBLIC_HUB).rstrip("/")
    repository, page = address.repository, f"{endpoint}/{address.repository}"
    name = f"{address.folder}{name}"
    try:
        # the library's cache knows repositories by name: what another server said of one is not what this one says
        cache = HF_HUB_CACHE if endpoint == PUBLIC_HUB else f"{HF_HUB_CACHE}/of/{endpoint.rpartition('//')[2]}"
        kept = try_to_load_from_cache(repository, name, cache, address.revision)
        # a file that was absent may have come since
        if not isinstance(kept, str) and (HF_HUB_OFFLINE or not unreachable):
            where = {"revision": address.revision, "endpoint": endpoint, "etag_timeout": TIMEOUT_SECONDS}
            kept = hf_hub_download(repository, name, cache_dir=cache, **where)
    except (HTTPError, ImportError, OSError, ValueError) as error:  # of a package for proxies of SOCKS
        reasons: dict[type[Exception], str] = {
            GatedRepoError: f"{page} is gated; accept its license there, then run `hf auth login` or export HF_TOKEN",
            RepositoryNotFoundError: f"there is no public repository {page}; for a private one, export HF_TOKEN",
            RevisionNotFoundError: f"{page} has no revision {address.revision}",
            HFValidationError: f"{repository} is no name of a repository",
        }
        link: BaseException | None = error
        while link is not None:
            if isinstance(link, RemoteEntryNotFoundError | OfflineModeIsEnabled):
                offline = " in this machine's cache (HF_HUB_OFFLINE)" if isinstance(link, OfflineModeIsEnabled) else ""
                raise HubFileAbsentError(f"{page} has no {name}{offline}") from None
            for kind, reason in reasons.items():
                if isinstance(link, kind):
                    raise HubFileError(reason) from None
            link = link.__cause__
        raise HubFileError(f"{page} does not answer ({' '.join(str(error).split())[:200]})") from None
    if kept is None:
        raise HubFileError(unreachable)
    if not isinstance(kept, str):  # the cache knows that there is none
        raise HubFileAbsentError(f"{page} has no {name}")
    return Path(kept)


def _special_tokens(described: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the special tokens that begin and end a text, as tokenizer_config.json says."""

    def text(value: Any) -> str | None:
        found = value.get("content") if isinstance(value, dict) else value
        return found if isinstance(found, str) else None

    begins = text(described.get("bos_token")) if described.get("add_bos_token", True) else None
    return {"bos": begins, "eos": text(described.get("eos_token"))}


KEY = "model.config_json"
ASSET = "assets://"
FILE = "config.json"
INSTEAD = f"the model's repository, such as google/gemma-2-2b, or to a copy of its {FILE}"
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
            said = (
                "set it to a model of the Hub, such as hf://Qwen/Qwen3-0.6B, or to a folder, or set model.config_json"
            )
            return data, [ConfigProblem(WEIGHTS_KEY, said)]
        return data | {"model": family_switches(STAND_IN) | model if "norm" not in model else model}, []
    try:
        described = model_from_config(_read(str(source), data)).model_dump(mode="json")
    except (_UnreadableError, UnknownArchitectureError) as error:
        if source == model.get("weights"):
            path = Path(source).expanduser()
            if path.is_file():
                said = f"is a file; name its folder: {WEIGHTS_KEY}={path.parent}"
                return data, [ConfigProblem(WEIGHTS_KEY, f"{source}: {said}")]
            said = "" if path.exists() else _meant(source)
            why = "is no address of weights" if said and "://" in source else error
            return data, [ConfigProblem(WEIGHTS_KEY, f"{source}: {why}{said}")]
        return data, [ConfigProblem(KEY, f"{source}: {error}")]
    other = [key for key in model if key not in FREE_KEYS and key in described and model[key] != described[key]]
    if len(other) == 1:
        [key] = other
        said = f"is {model[key]!r}, and {described[key]!r} in {source}; remove it, as in ~model.{key}"
        problems = [ConfigProblem(f"model.{key}", said)]
    elif other:
        pairs = ", ".join(f"{key} is {model[key]!r}, not {described[key]!r}" for key in other)
        removed = " ".join(f"~model.{key}" for key in other)
        problems = [ConfigProblem("model", f"differs from {source}: {pairs}; remove them: {removed}")]
    return data | {"model": described | model}, problems


def _read(source: str, data: Mapping[str, Any]) -> Any:
    file = _local_file(source, data)
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        names = {path.name for path in file.parent.iterdir()} if file.parent.is_dir() else set[str]()
        if "adapter_config.json" in names:
            raise _UnreadableError(f"is an adapter of LoRA; set model.lora.adapter={source}") from None
        if names:
            gguf = "; GGUF is not read, but safetensors" if any(name.endswith(".gguf") for name in names) else ""
            raise _UnreadableError(f"has no {FILE}; it has {nearest_names(FILE, names)}{gguf}") from None
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
        return hub_file(parse_source(source), f"{folder}/{FILE}".lstrip("/"))
    except ValueError as error:
        raise _UnreadableError(str(error)) from None


def _downloaded(repository: str) -> Path:
    try:
        return hub_file(parse_source(f"{HUB}{repository}"), FILE)
    except HubFileError as error:
        raise _UnreadableError(f"there is no such folder here, and {error}") from None
