"""Parse the timestamps of Google's APIs."""

from datetime import datetime


def parse_timestamp(timestamp: str | None) -> float:
    """Parse RFC 3339 to seconds since the epoch; 0 where Google sends none. Nanoseconds are cut to microseconds."""
    if not timestamp:
        return 0.0
    head, dot, tail = timestamp.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{head}{dot}{tail[:6]}+00:00").timestamp()
