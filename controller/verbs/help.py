"""`slipway help [VERB]`, and what --help says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.errors import ConfigError
from controller.flags import VERBS
from controller.help import show

if TYPE_CHECKING:
    from controller.cli import Command


def run(command: Command) -> int:
    topic = command.flags.topic
    if topic is not None and topic not in VERBS:
        raise ConfigError(f"{topic!r} is no verb; verbs: {', '.join(VERBS)}")
    show(topic, as_json=command.flags.json)
    return 0
