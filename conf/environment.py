"""The interface of environments, as users write them; `conf.extension` has the other kinds."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

ROLES, TOOLS = ("system", "user", "assistant"), "tools"
Messages = Sequence[tuple[str, str]]
"""Turns of a chat, each a role and a text.

The first one may have the role `tools` and a JSON list of functions as in OpenAI's chat completions, which the policy
may call in the words of Hermes and Qwen.
"""


class Environment(Protocol):
    """One episode: `loop.environment.name`, a class that is called with `loop.environment.options` for each episode.

    It runs in a process of its own under limits, and must be deterministic: a process that dies is replaced, and the
    other episodes there are repeated from their rows and responses. It may have a method `metrics`, which returns
    numbers by name after `reward`; their means are logged as `environment_NAME`. It may have a method `close`, which is
    called when its object is no longer needed.
    """

    def reset(self, row: Mapping[str, Any], /) -> str | Messages:
        """Begin, and return text that is appended to the question; it may be empty. Messages replace the whole prompt.

        row: all columns of the question's row, `question`, `answer`, and `seed`, a number that is the same for all
        samples of a question; `prompt_messages`, what an earlier `reset` with this row has returned, if messages.
        """
        ...

    def step(self, response: str, /) -> tuple[str | Messages, bool]:
        """Return what the policy reads next, and whether the episode is done.

        response: what the policy wrote in this turn, without special tokens.
        """
        ...

    def reward(self) -> float:
        """Return the reward of the episode, a finite number. 1 or more counts as a correct answer.

        It is called once, also after an episode that a limit has ended.
        """
        ...


ENVIRONMENT_METHODS = ("reset", "step", "reward")


class EnvironmentClass(Protocol):
    """The class of an Environment, with the arguments of its constructor."""

    def __call__(self, **options: Any) -> Environment: ...
