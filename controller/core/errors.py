"""Exceptions shown to the user: what is wrong, which key to change, the choices.

`exit_code` of a class is that of the process; what is wrong in the same way has the same one.
"""

from collections.abc import Sequence


class SlipwayError(Exception):
    """Base of all expected errors, shown without a traceback; the process ends with `exit_code`."""

    exit_code = 1


class ConfigError(SlipwayError):
    """The config or the command line is wrong, or a preflight check failed. Nothing has been changed."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[object]) -> None:
        self.problems = [problems] if isinstance(problems, str) else [str(p) for p in problems]
        super().__init__("\n".join(self.problems))


class WrongDevicesError(SlipwayError):
    """The workers' devices differ from the plan, are held by another process, or are faulty.

    `found` is what each worker has, where known; `faulty` are the workers whose hardware is to blame.
    """

    exit_code = 3

    def __init__(self, message: str, found: Sequence[str] = (), faulty: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.devices = tuple(found)
        self.faulty = tuple(faulty)


class WorkersDisagreeError(SlipwayError):
    """Code, config or packages differ between workers."""

    exit_code = 4


class ProgramFailedError(SlipwayError):
    """The user's program ended with an error on at least one worker."""

    exit_code = 5


class RetriesExhaustedError(SlipwayError):
    """Retries are used up."""

    exit_code = 6


class OverBudgetError(SlipwayError):
    """The run has reached its maximum cost; its pod is deleted."""

    exit_code = 7


class CloudError(SlipwayError):
    """The cloud refused or failed a request, and a retry would not help."""

    exit_code = 2


class LeaseLostError(SlipwayError):
    """Another controller has taken over the pod. Nothing more was changed."""

    exit_code = 8
