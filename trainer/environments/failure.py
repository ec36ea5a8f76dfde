"""What an environment did that fails its episode."""


class FailureError(Exception):
    """It fails its episode alone. The arguments are cause, one of `pool.CAUSES`, and reason."""
