"""What jaxlib says against XLA_FLAGS: it ends the process at a flag that it does not know, without an exception."""

import re
import shlex

VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables of flags: for jaxlib, and for libtpu, which alone knows those of the TPU compiler."""
SAID = re.compile(r"^[EF]\d{4} [^\]\n]*\] (.+)$", re.MULTILINE)
"""What absl logs before it ends a process; its first message is about the flag."""


def ignored_words(flags: str) -> list[str]:
    """Return the words that are no flags; jaxlib and libtpu skip them in silence. A file may be named instead.

    Raises ValueError if a quotation has no end.
    """
    words = shlex.split(flags)
    return [word for word in words if not word.startswith("--") and (len(words) > 1 or "=" in word)]


def complaint(log: str, version: str) -> str:
    """Return one line about flags from what a process said that jaxlib ended. version: jaxlib's."""
    found = SAID.search(log)
    said = found[1].strip() if found else log.strip().partition("\n")[0]
    cure = "; libtpu knows those of the TPU compiler: move them to LIBTPU_INIT_ARGS" if "--xla_tpu_" in said else ""
    return f"jaxlib {version} does not accept XLA_FLAGS: {said[:300]}{cure}"
