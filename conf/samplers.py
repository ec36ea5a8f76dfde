"""What the controller and the trainer agree on about samplers: variables of their processes, and their secrets."""

import hmac

TOKEN_VARIABLE = "SLIPWAY_SAMPLER_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable with the secret of one attempt, on the workers of the trainer's pod."""
SECRET_VARIABLE = "SLIPWAY_SAMPLER_SECRET"  # noqa: S105 - the name of a variable
"""Environment variable with the secret of the run, on pods of samplers: they outlive the attempts of the trainer."""
POD_VARIABLE = "SLIPWAY_SAMPLER_POD"
"""Environment variable with the number of a pod of `loop.sampler.pods`, from 1; its workers only sample."""
RESULT_FILE = "result.json"
"""Object in a run's folder that exists once the run has finished."""


def attempt_token(secret: str, attempt: int) -> str:
    """Return the token of an attempt, from the secret of its run."""
    return hmac.digest(secret.encode(), f"attempt {attempt}".encode(), "sha256").hex()
