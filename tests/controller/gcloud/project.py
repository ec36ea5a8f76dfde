"""A controller without command line on an emulated cloud: what it wants, makes, sees and deletes."""

from pathlib import Path
from typing import Any, cast

from google.oauth2.credentials import Credentials

from controller.config.compose import compose
from controller.context import Context
from controller.core.clock import Clock
from controller.core.events import Events
from controller.gcp.client import GoogleClient
from controller.plan.build import node_resource
from controller.plan.preview import preview_resources
from controller.plan.project import bucket_name, shared_resources
from controller.reconcile.resource import Resource
from controller.ssh.login import Login
from tests.controller.localcloud.harness import EmulatedCloud


def make_context(cloud: EmulatedCloud, folder: Path) -> Context:
    """The emulated cloud as the controller sees it; `folder` holds its keys."""
    endpoint, clock = cloud.endpoint, Clock()
    google = GoogleClient(Credentials(token=endpoint["token"]), clock, endpoint["roots"])
    login = Login(google, clock, "slipway-local", "slipway", folder)
    return Context("slipway-local", google, clock, Events(clock), folder, login, 0.02, cast(Any, None))


def desired_resources(*overrides: str) -> list[Resource]:
    """What pods share, and the pod without what is on its workers."""
    config, problems = compose(["cloud=local", "program=command", *overrides])
    assert config is not None, problems
    assert not problems, problems
    shared = list(shared_resources(config, bucket_name(config, "slipway-local")))
    return [*shared, node_resource(config, tuple(r.id for r in shared))]


def planned_actions(context: Context, *overrides: str) -> dict[str, str]:
    """What `plan` says would be done about each resource, by id."""
    return {row.resource.id: row.action for row in preview_resources(tuple(desired_resources(*overrides)), context)}
