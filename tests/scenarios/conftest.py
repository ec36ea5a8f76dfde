"""Fixtures of the controller's tests that scenarios use as well."""

from tests.controller.conftest import fleets as fleets
from tests.controller.conftest import pod_of as pod_of
from tests.controller.conftest import slipway as slipway
