"""What the controller and the trainer agree on: the version of documents, and the variables and secrets of samplers.

Each document that slipway writes carries `"format": 1`, and no other format is read.
"""

import re
from typing import Any

FORMAT = 1
BYTE_TOKENS = ("<pad>", "<bos>", "<eos>")
"""What data.tokenizer=bytes has after the 256 bytes."""


class RunFileError(ValueError):
    """The file cannot be read, breaks the schema or requests the impossible. The message names every wrong key."""


class LocalRunFileError(RunFileError):
    """A RunFileError of this worker alone. Do not wait for the others: they may be in the middle of a step."""


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


PACKED = {
    rb"\x1f\x8b": "compressed by gzip: unpack it with gunzip",
    rb"\x28\xb5\x2f\xfd": "compressed by Zstandard: unpack it with unzstd",
    rb"BZh[1-9]1AY&SY": "compressed by bzip2: unpack it with bunzip2",
    rb"\xfd7zXZ\0": "compressed by xz: unpack it with unxz",
    rb"\x04\x22\x4d\x18": "compressed by LZ4: unpack it with unlz4",
    rb"PK\x03\x04": "a zip archive: unpack it with unzip",
    rb"7z\xbc\xaf\x27\x1c": "a 7z archive: unpack it with 7z",
    rb"\xff\xfe|\xfe\xff": "text in UTF-16: save it as UTF-8",
    rb"PAR1\x15": "Parquet: read it with data=parquet, or let its name end in .parquet",
}
"""What is no text, by the pattern of the first bytes. Each is the beginning in the format's own specification."""
PACKED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".7z")
HEAD_BYTES = 16


def packed_form(head: bytes) -> str:
    """Return what a file of text or rows is instead, by its first `HEAD_BYTES`, and what to do; "" if nothing known."""
    return next((told for pattern, told in PACKED.items() if re.match(pattern, head, re.DOTALL)), "")


TOKEN_VARIABLE = "SLIPWAY_SAMPLER_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable with the secret of one attempt, on the workers of the trainer's pod."""
SECRET_VARIABLE = "SLIPWAY_SAMPLER_SECRET"  # noqa: S105 - the name of a variable
"""Environment variable with the secret of the run, on pods of samplers: they outlive the attempts of the trainer."""
IMPORTS_VARIABLE = "SLIPWAY_IMPORTS"
"""Variable of a program on the laptop: the `module:name` that it may import of what run.yaml names, with commas."""
POD_VARIABLE = "SLIPWAY_SAMPLER_POD"
"""Environment variable with the number of a pod of `loop.sampler.pods`, from 1; its workers only sample."""
RESULT_FILE = "result.json"
"""Object in a run's folder that exists once the run has finished."""


def attempt_token(secret: str, attempt: int) -> str:
    """Return the token of an attempt, from the secret of its run."""
    import hmac

    return hmac.digest(secret.encode(), f"attempt {attempt}".encode(), "sha256").hex()
