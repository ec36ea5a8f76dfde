"""`slipway help [VERB]`: print the same help as --help, or show the documentation in a browser."""

from controller.cli.documentation import show_site
from controller.cli.flags import VERBS
from controller.cli.help import print_help
from controller.cli.main import Command
from controller.core.errors import ConfigError


def run(command: Command) -> int:
    topic = command.flags.topic
    if topic is not None and topic not in VERBS:
        raise ConfigError(f"unknown verb {topic!r}; verbs: {', '.join(VERBS)}")
    if command.flags.web:
        return show_site(command.options.state_dir, topic)
    print_help(topic, as_json=command.flags.json)
    return 0
