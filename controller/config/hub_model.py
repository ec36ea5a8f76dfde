"""`model.weights=hf://OWNER/NAME`: the asset that fetches a model of the Hub, with its tokenizer and its chat."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conf.schema.infra.assets import SourceAddress, parse_source
from conf.schema.validation import ConfigProblem

HUB = "hf://"
PUBLIC_HUB = "https://huggingface.co"
KEY = "model.weights"
MISSING_TOKENIZER = "bytes"
"""The value of data.tokenizer in the data sources, which no published model has."""
CHAT_MARKS = {"qwen": "<|im_start|>", "gemma": "<start_of_turn>", "llama3": "<|start_header_id|>"}
"""What a template of each of our chats writes."""
TIMEOUT_SECONDS = 10


class HubFileError(ValueError):
    """A small file of a repository cannot be read now."""


def with_hub_weights(data: dict[str, Any]) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """Return composed data whose weights on the Hub are an asset, which `up` copies to the bucket."""
    model = data.get("model")
    weights = model.get("weights") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(weights, str) or not weights.startswith(HUB):
        return data, []
    try:
        address = parse_source(weights)
    except ValueError as error:
        return data, [ConfigProblem(KEY, str(error).removeprefix("source: "))]
    if address.kind != "model":
        return data, [ConfigProblem(KEY, f"{weights} is a data set; name a model, such as hf://Qwen/Qwen3-0.6B")]
    name = re.sub(r"[^a-z0-9]+", "-", address.repository.partition("/")[2].lower())
    name = re.sub(r"^(?![a-z])", "m-", name.strip("-"))[:63].rstrip("-")  # as the schema wants names
    source = f"{weights}/*" if address.pattern == "**" else weights
    assets = dict(data.get("assets") or {})
    assets["models"] = {**(assets.get("models") or {}), name: {"source": source}}
    data = data | {"model": model | {"weights": f"assets://{name}"}, "assets": assets}
    section = data.get("data")
    if not isinstance(section, dict) or not _is_of_another(section.get("tokenizer"), assets):
        return data, []
    try:
        described = json.loads(hub_file(address, "tokenizer_config.json").read_text())
        template = described.get("chat_template") or _template_file(address)
    except (HubFileError, OSError, ValueError, AttributeError) as error:
        return data, [ConfigProblem("data.tokenizer", f"is not set, and that of {weights} cannot be read: {error}")]
    found = section | {"tokenizer": f"assets://{name}/tokenizer.json"} | _special_tokens(described)
    if "chat_template" in section and template:
        chat = next((chat for chat, mark in CHAT_MARKS.items() if mark in str(template)), None)
        if chat is None:
            message = f"{weights} was tuned on a chat other than {', '.join(CHAT_MARKS)}; set data.tokenizer and it"
            return data, [ConfigProblem("data.chat_template", message)]
        found |= {"chat_template": chat, "bos": None, "eos": None}
    return data | {"data": found}, []


def _is_of_another(tokenizer: Any, assets: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer cannot be this model's: that of no model, or of the weights that this one replaces."""
    asset = re.match(r"assets://([^/]+)/", str(tokenizer))
    return tokenizer == MISSING_TOKENIZER or (asset is not None and asset[1] in assets["models"])


def hub_file(address: SourceAddress, name: str) -> Path:
    """Return a small file of a repository, downloaded once per revision. Raises HubFileError if it cannot be read."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] - httpx's
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    endpoint = (os.environ.get("HF_ENDPOINT") or PUBLIC_HUB).rstrip("/")
    repository, page = address.repository, f"{endpoint}/{address.repository}"
    if isinstance(kept := try_to_load_from_cache(repository, name, revision=address.revision), str):
        return Path(kept)
    try:
        where = {"revision": address.revision, "endpoint": endpoint, "etag_timeout": TIMEOUT_SECONDS}
        return Path(hf_hub_download(repository, name, **where))
    except (HTTPError, OSError, ValueError) as error:
        reasons: dict[type[Exception], str] = {
            GatedRepoError: f"it is gated; accept its license at {page}, then run `hf auth login` or export HF_TOKEN",
            RepositoryNotFoundError: f"there is no public repository {page}; for a private one, export HF_TOKEN",
            RevisionNotFoundError: f"{page} has no revision {address.revision}",
            EntryNotFoundError: f"{page} has no {name}",
        }
        link: BaseException | None = error
        while link is not None:
            for kind, reason in reasons.items():
                if isinstance(link, kind):
                    raise HubFileError(reason) from None
            link = link.__cause__
        raise HubFileError(f"{page} does not answer ({' '.join(str(error).split())[:200]})") from None


def _template_file(address: SourceAddress) -> str:
    """Return the template of repositories that keep it in a file of its own; empty if there is none."""
    try:
        return hub_file(address, "chat_template.jinja").read_text()
    except HubFileError:
        return ""


def _special_tokens(described: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the special tokens that begin and end a text, as tokenizer_config.json says."""

    def text(value: Any) -> str | None:
        found = value.get("content") if isinstance(value, dict) else value
        return found if isinstance(found, str) else None

    begins = text(described.get("bos_token")) if described.get("add_bos_token", True) else None
    return {"bos": begins, "eos": text(described.get("eos_token"))}
