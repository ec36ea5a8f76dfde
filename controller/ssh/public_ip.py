"""The address that this machine has on the internet, as others see it."""

from __future__ import annotations

import ipaddress
import urllib.request

IP_SERVICES = ("https://checkip.amazonaws.com", "https://ipv4.icanhazip.com")
"""Each answers with the caller's IPv4 address as text; the second is asked if the first does not answer."""
SECONDS = 5.0


def find_public_ip(services: tuple[str, ...] = IP_SERVICES) -> str | None:
    """The public IPv4 address, or None if nobody says. Asks over the network."""
    for service in services:
        try:
            with urllib.request.urlopen(service, timeout=SECONDS) as answer:  # noqa: S310 - the addresses are above
                text = answer.read(64).decode().strip()
            return str(ipaddress.IPv4Address(text))
        except (OSError, ValueError):
            continue
    return None
