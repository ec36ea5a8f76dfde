"""Notifications about a run: a webhook, and a function of the user's own."""

from typing import Literal

from pydantic import Field, field_validator

from conf.extension import Reference
from conf.schema.base import Strict
from conf.schema.run.program import SecretSource

Event = Literal["end", "failure", "preemption", "alert"]


class Notify(Strict):
    """Who is told about a run. A notification that fails is a warning, and never ends a run."""

    webhook: SecretSource | None = Field(
        description="Source of an HTTPS address that gets JSON such as Slack's: env:SLACK_WEBHOOK, file:PATH, or "
        "secretmanager:projects/P/secrets/S. null: none. The address itself is a secret, and never recorded."
    )
    notifier: Reference | None = Field(
        description="module:name of a function that gets the same event (docs/extend.md). null: none."
    )
    events: tuple[Event, ...] = Field(description="Events to notify of: end, failure, preemption, alert.")

    @field_validator("webhook")
    @classmethod
    def _names_a_variable(cls, value: str | None) -> str | None:
        if value == "env":
            raise ValueError("name the variable, e.g. env:SLACK_WEBHOOK")
        return value
