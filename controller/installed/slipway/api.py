"""The Python interface, `controller.api`: see docs/api.md."""

from .finder import find_own_packages

find_own_packages()

from controller.api import *  # noqa: E402, F403
from controller.api import __all__ as __all__  # noqa: E402
from controller.api import __dir__ as __dir__  # noqa: E402
