"""`slipway help [VERB]`: print the same help as --help, or show the documentation in a browser."""

from controller.cli.help import print_help
from controller.cli.main import Command, resolve_verb


def run(command: Command) -> int:
    topic = None if command.flags.topic is None else resolve_verb(command.flags.topic)
    if command.flags.web:
        from controller.cli.documentation import show_site

        return show_site(command.options.state_dir, topic)
    print_help(topic, as_json=command.flags.json)
    return 0
