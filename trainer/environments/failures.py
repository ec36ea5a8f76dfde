"""What may fail an episode, by name."""

CAUSES = ("error", "timeout", "memory", "output", "not_finite", "history", "died")


class FailureError(Exception):
    """What an environment did that fails its episode. The arguments are cause, one of CAUSES, and reason."""
