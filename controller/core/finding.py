"""Findings of checks, and the rules that declare them."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, ParamSpec

from conf.schema.forms import escape_line
from controller.core.errors import SlipwayError

CURES = (
    re.compile(r"`((?:gcloud|slipway|hf|git|pip|ssh|sudo|chmod|rm|uv) [^`]+)`"),
    re.compile(r"('[a-z_]+\.[a-z_.]+=[^']+'|(?<![\w.`'])(?:[a-z]\w*\.)?[a-z_]+\.[a-z_]+=[^\s,;)]+|cloud=local)"),
    re.compile(r"(https?://[^\s,;)]+)"),
)
"""Commands, overrides and addresses in a message, the most useful first."""
Severity = Literal["error", "warning", "note"]
P = ParamSpec("P")


@dataclass(frozen=True)
class Finding:
    """Result of a check; `key` is what to change. An error stops `up`; warnings and notes are only shown."""

    check: str
    severity: Severity
    key: str
    message: str

    def __str__(self) -> str:
        return escape_line(f"{self.key}: {self.message}")

    @property
    def cure(self) -> str:
        """Return the first command of the message, or else its first override or address; empty if it has none."""
        return next((found[1] for pattern in CURES if (found := pattern.search(self.message))), "")


class UncheckedError(SlipwayError):
    """A check could not look, for a reason that is no finding of a plan: few people have what it needs."""


@dataclass(frozen=True)
class Rule:
    """Declaration of one kind of finding. docs/checks.md lists all rules.

    Attributes:
        severities: the possible severities, the usual one first.
        keys: the config keys it can name, the usual one first; a part in capitals stands for any name.
        live: whether the check queries Google or another service.
        of_plan: whether the check is given the plan instead of the config; implies `live`.
        of_pods: whether the check is about pods on Google Cloud, which `cloud=here` does not use.
    """

    id: str
    severities: tuple[Severity, ...]
    keys: tuple[str, ...]
    reason: str
    live: bool = True
    of_plan: bool = False
    of_pods: bool = False

    def finding(self, message: str, key: str = "", severity: Severity | None = None) -> Finding:
        """Return a finding with this message, by default with the rule's usual key and severity."""
        return Finding(self.id, severity or self.severities[0], key or self.keys[0], message)


class Issue(NamedTuple):
    """Result of a check function: a message, and the key and severity unless the rule's usual ones apply."""

    message: str
    key: str = ""
    severity: Severity | None = None


@dataclass(frozen=True)
class Check(Generic[P]):
    """A function that looks for one kind of finding, with its rule."""

    rule: Rule
    function: Callable[P, Iterator[Issue]]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Finding]:
        for issue in self.function(*args, **kwargs):
            yield self.rule.finding(*issue)


def check(
    name: str,
    severity: Severity,
    *keys: str,
    also: Severity | tuple[Severity, ...] = (),
    live: bool = False,
    of_plan: bool = False,
    of_pods: bool = False,
) -> Callable[[Callable[P, Iterator[Issue]]], Check[P]]:
    """Declare a function as the check called `name`; docs/checks.md gives the first sentence of its docstring."""
    severities = (severity, also) if isinstance(also, str) else (severity, *also)

    def declare(function: Callable[P, Iterator[Issue]]) -> Check[P]:
        reason = " ".join((function.__doc__ or "").split())
        return Check(Rule(name, severities, keys, reason, live or of_plan, of_plan, of_pods), function)

    return declare
