"""Folders that tests read from."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The checkout."""
SHARED = ROOT.parent / "shared"
"""Data and guides beside the checkout; tests that need them skip where it does not exist."""
