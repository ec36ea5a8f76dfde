"""Versions of the library verifiers (https://github.com/PrimeIntellect-ai/verifiers) that Slipway speaks to."""

import re

ENVIRONMENTS, TASKSETS = "environments", "tasksets"
KINDS = {ENVIRONMENTS: ((0, 1, 14), (0, 4)), TASKSETS: ((0, 4), (0, 5))}
"""What an environment of the library is, by its version: from the first number, below the second."""
SPECIFIER = ">=0.1.14,<0.5"
"""All of them, as a requirement."""


class VersionError(ValueError):
    """A version of the library that Slipway does not know. The message names the choices."""


def kind_of(version: str) -> str:
    """Return ENVIRONMENTS (load_environment) or TASKSETS (tasksets and harnesses). Raises VersionError."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", re.match(r"[\d.]*", version)[0]))  # pyright: ignore[reportOptionalSubscript]
    for kind, (first, end) in KINDS.items():
        if first <= numbers < end:
            return kind
    told = "0.1.14 to 0.3, whose environments have load_environment, or 0.4, whose environments are tasksets"
    raise VersionError(f"Slipway does not know verifiers {version}; install {told}")
