"""Names, labels and marks by which Slipway recognises what it made on Google Cloud."""

from __future__ import annotations

from typing import Any

LABEL = {"managed-by": "slipway"}
"""On everything that takes labels."""
MARK = "made by slipway"
"""Begins the description of what takes no labels: networks, subnets, routers, firewall rules, service accounts."""
TAG = "slipway"
"""Network tag of the workers; the firewall rules target it."""


def leaf(url: str) -> str:
    """Return the last part of a resource URL."""
    return url.rsplit("/", 1)[-1]


def is_marked(item: dict[str, Any]) -> bool:
    """Whether the item's description starts with the mark; more text may follow."""
    return item.get("description", "").startswith(MARK)


def is_labelled(item: dict[str, Any]) -> bool:
    """Whether the item has the label."""
    return LABEL.items() <= item.get("labels", {}).items()
