"""Fixtures of the controller's tests that scenarios use as well."""

from tests.controller.conftest import fleets as fleets
from tests.controller.conftest import make_pod as make_pod
from tests.controller.conftest import slipway as slipway
from tests.controller.conftest import unpacked_agent as unpacked_agent
