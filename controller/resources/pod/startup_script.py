"""Startup script of a node. Google runs it as root at every boot, before anybody can log in.

https://cloud.google.com/compute/docs/instances/startup-scripts/linux
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from controller.resources.pod import dead_mans_switch

STARTUP_SCRIPT = "startup-script"
"""Key of the node's metadata."""
_END = "END_OF_DEAD_MANS_SWITCH"
_SWITCH = f"""\
# Deletes the pod after a time without any sign of Slipway. It runs in the background and writes only to its log,
# because Google waits for this script and for the end of its output.
setsid python3 -I -S -c "$(cat <<'{_END}'
{{source}}{_END}
)" {{arguments}} < /dev/null >> "${{{{TMPDIR:-/var/log}}}}/slipway-dead-mans-switch.log" 2>&1 &
"""


def startup_script(*parts: str) -> str:
    """Return one script of several parts."""
    return "#!/bin/bash\n" + "".join(parts)


def switch_part(limit_seconds: float, deletions: Sequence[str]) -> str:
    """Return the part that starts the dead man's switch.

    Args:
        limit_seconds: seconds without a sign of life.
        deletions: URLs of what to delete, in order.
    """
    source = Path(dead_mans_switch.__file__).read_text()
    arguments = shlex.join([f"{limit_seconds:.10g}", *deletions])
    return _SWITCH.format(source=source, arguments=arguments)
