"""Fixtures of the controller's tests that scenarios use as well."""

from tests.controller.conftest import composed_by_hydra as composed_by_hydra
from tests.controller.conftest import composed_once as composed_once
from tests.controller.conftest import fleets as fleets
from tests.controller.conftest import make_pod as make_pod
from tests.controller.conftest import slipway as slipway
