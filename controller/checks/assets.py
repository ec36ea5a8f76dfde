"""Is what the program reads here, or where it can be had?"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from conf.schema.config import Config
from conf.schema.infra.assets import RemoteFile
from controller.core.finding import Finding
from controller.inputs.assets import is_there


def local_files_are_here(config: Config) -> Iterator[Finding]:
    """What is missing here would be missing on a TPU that is billed."""
    for kind, name, asset in config.assets.each():
        if asset.path is not None and not is_there(Path(asset.path).expanduser()):
            words = f"no file at {asset.path}; set it to the file or folder with the data"
            yield Finding("asset_here", "error", f"assets.{kind}s.{name}.path", words)


def tokens_are_secrets(config: Config) -> Iterator[Finding]:
    """A token that is sent along with a download is one of `env.secrets`, and never sent in the clear."""
    for key, file in _downloads(config):
        if file.token_secret is not None and config.env.secrets.get(file.token_secret) is None:
            words = f"env.secrets has no {file.token_secret}; say where it is, e.g. env.secrets.{file.token_secret}=env"
            yield Finding("asset_token", "error", f"{key}.token_secret", words)
        if file.token_secret is not None and file.url.startswith("http://") and not _is_loopback(file.url):
            yield Finding("asset_clear", "error", f"{key}.url", "would send the token in the clear; use https")


def pod_has_something_to_fetch(config: Config) -> Iterator[Finding]:
    """Only downloads can be left to the pod; what is here, or made here, is sent from here."""
    if config.assets.fetch_on == "pod" and not any(True for _ in _downloads(config)):
        words = "pod: no asset has files to download; the others are sent from here all the same"
        yield Finding("fetch_on", "warning", "assets.fetch_on", words)


def _downloads(config: Config) -> Iterator[tuple[str, RemoteFile]]:
    for kind, name, asset in config.assets.each():
        for file, remote in (asset.files or {}).items():
            yield f"assets.{kind}s.{name}.files.{file}", remote


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


CHECKS = (
    local_files_are_here,
    tokens_are_secrets,
    pod_has_something_to_fetch,
)
