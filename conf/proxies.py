"""The environment's variables of proxies, written so that every library reads the same from them.

The libraries differ: urllib and aiohttp ignore ALL_PROXY, httplib2 an address without a scheme or a domain without its
dot, gRPC and libcurl the names in capitals, and all but gRPC take a proxy to loopback if `no_proxy` does not forbid it.
"""

import os
import re
from collections.abc import Iterable, Mapping, MutableMapping
from urllib.parse import urlsplit

DIRECT = ("localhost", "127.0.0.1", "::1", "metadata.google.internal", "169.254.169.254")
"""Hosts that no proxy can reach: this machine's own, and a VM's server of metadata."""
SCHEMES = ("http", "https")


def settle_proxies(environment: MutableMapping[str, str] = os.environ, direct: Iterable[str] = ()) -> None:
    """Rewrite the variables if any names a proxy. Hosts that are DIRECT, and those of `direct`, are reached without."""
    proxies = _proxies(environment)
    if not any(proxies.values()):
        return
    given = [word.removeprefix("*") for word in re.split(r"[\s,]+", _value(environment, "no")) if word]
    words = [word for word in given if word not in DIRECT]
    everything = "" in words  # it was "*"
    dotted = [f".{word}" for word in words if re.fullmatch(r"[\w-]+(\.[\w-]+)*\.[A-Za-z]+", word)]
    hosts = dict.fromkeys([*words, *dotted, *DIRECT, *direct])
    settled = {f"{scheme}_proxy": address for scheme, address in proxies.items()}
    if _value(environment, "all"):
        settled["all_proxy"] = proxies["https"]
    for name, text in {**settled, "no_proxy": "*" if everything else ",".join(hosts)}.items():
        for variable in (name, name.upper()):
            if text:
                environment[variable] = text
            else:
                environment.pop(variable, None)


def unusable_proxy() -> str:
    """Return what is wrong with the proxy for https, without its password; empty if nothing is."""
    address = _proxies(os.environ)["https"]
    try:
        found = urlsplit(address)
        usable = not address or (found.scheme == "http" and found.hostname is not None and found.port != 0)
    except ValueError:  # of a port
        usable = False
    shown = "://".join(part.rpartition("@")[2] for part in address.split("://", 1))
    return "" if usable else f"https_proxy: {shown!r} is no HTTP proxy; set http://HOST:PORT"


def _proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the address of the proxy by scheme; empty if there is none."""
    found = {scheme: (_value(environment, scheme) or _value(environment, "all")).strip() for scheme in SCHEMES}
    return {scheme: f"http://{text}" if text and "://" not in text else text for scheme, text in found.items()}


def _value(environment: Mapping[str, str], name: str) -> str:
    small = environment.get(f"{name}_proxy")
    return environment.get(f"{name}_proxy".upper(), "") if small is None else small
