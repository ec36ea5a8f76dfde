"""What the controller and the trainer agree on: the version of documents, and the variables and secrets of samplers.

Each document that slipway writes carries `"format": 1`, and no other format is read.
"""

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
    import hmac

    return hmac.digest(secret.encode(), f"attempt {attempt}".encode(), "sha256").hex()
