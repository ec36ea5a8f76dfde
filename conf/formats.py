"""Version of the documents that slipway writes: each one carries `"format": 1`, and no other format is read."""

from typing import Any

FORMAT = 1


def format_problem(body: Any, where: str) -> str:
    """Return why a document cannot be read, "" if its format is the one that this slipway reads.

    Args:
        where: the document's name, for the message.
    """
    written = body.get("format") if isinstance(body, dict) else None
    if written is None:
        return f"{where} has no format; this slipway reads format {FORMAT}: something else or an older slipway wrote it"
    if written != FORMAT:
        return f"{where} has format {written!r:.20}; this slipway reads format {FORMAT}: update slipway"
    return ""
