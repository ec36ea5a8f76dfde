"""Fixtures of the resources' tests that need a project on the emulated cloud."""

from tests.controller.resources.conftest import emulated as emulated
from tests.controller.resources.conftest import project as project
from tests.controller.resources.conftest import settled as settled
