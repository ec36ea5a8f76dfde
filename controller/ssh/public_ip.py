"""Find this machine's public IP address."""

import ipaddress

IP_SERVICES = ("https://checkip.amazonaws.com", "https://ipv4.icanhazip.com")
"""Each returns the caller's IPv4 address as text; the second is the fallback."""
SECONDS = 5.0


def find_public_ip(services: tuple[str, ...] = IP_SERVICES) -> str | None:
    """Return the public IPv4 address, or None if no service answers. Uses the network."""
    import urllib.request

    for service in services:
        try:
            with urllib.request.urlopen(service, timeout=SECONDS) as answer:  # noqa: S310 - the addresses are above
                text = answer.read(64).decode().strip()
            return str(ipaddress.IPv4Address(text))
        except (OSError, ValueError):
            continue
    return None
