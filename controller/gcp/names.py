"""Names, labels and marks that identify what Slipway created on Google Cloud."""

from typing import Any

LABEL = {"managed-by": "slipway"}
"""Label on every resource that takes labels."""
MARK = "made by slipway"
"""Prefix of the description where labels do not exist: networks, subnets, routers, firewall rules, service accounts."""
TAG = "slipway"
"""Network tag of the workers, which the firewall rules target."""


def leaf(url: str) -> str:
    return url.rsplit("/", 1)[-1]


def is_marked(item: dict[str, Any]) -> bool:
    """Return whether the item's description starts with the mark; more text may follow."""
    return item.get("description", "").startswith(MARK)


def is_labelled(item: dict[str, Any]) -> bool:
    return LABEL.items() <= item.get("labels", {}).items()
