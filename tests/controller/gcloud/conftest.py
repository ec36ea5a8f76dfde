"""The real gcloud, and a controller without command line, on an emulated cloud."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from google.oauth2.credentials import Credentials

from controller.config.run_yaml import bucket_name
from controller.context import Context
from controller.core.events import Events
from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.localcloud import lifecycle
from controller.plan.build import node_resource, preview_resources
from controller.plan.project_steps import shared_resources
from controller.reconcile import Resource
from controller.ssh.login import Login
from tests.composed import config_of
from tests.controller.localcloud.harness import EmulatedCloud, run_localcloud

SSH = """#!/bin/bash
# ssh and scp with the port of the emulated workers. What gcloud sends a worker runs among stand-ins there.
tool=$(basename "$0") port=-p
[ "$tool" = scp ] && port=-P
mine=(-o UserKnownHostsFile="$HOME/.ssh/known_hosts" -i "$HOME/.ssh/google_compute_engine")
args=("$@")
for ((i = 0; i < $#; i++)); do
  if [ "${args[i]}" = -- ]; then
    args=("${args[@]:0:i+1}" "[ -e ~/.stand-ins ] || exit 97; . ~/.stand-ins;" "${args[@]:i+1}")
    break
  fi
done
for word in "$@"; do [ "$word" = -i ] && mine=(); done
exec "/usr/bin/$tool" $port PORT "${mine[@]}" "${args[@]}"
"""
STUB_COMMANDS = """
for name in sudo pip pip3 python python3 python3.11 wandb gcloud; do
  eval "$name() { echo \\"$name \\$*\\" >>~/ran; }"
done
"""
"""Programs that the guides start on workers: they write down that they were started. Nothing is installed by a test."""


@dataclass(frozen=True)
class GcloudShell:
    """A home of its own, where commands find gcloud, ssh and scp."""

    cloud: EmulatedCloud
    home: Path

    def __post_init__(self) -> None:
        for folder in ("bin", ".ssh", "tmp", "work"):
            (self.home / folder).mkdir(parents=True)
        (self.home / ".ssh").chmod(0o700)
        for tool in ("ssh", "scp"):
            path = self.home / "bin" / tool
            path.write_text(SSH.replace("PORT", self.port))
            path.chmod(0o755)
        # gsutil hands over to gcloud, which knows the emulated cloud.
        (self.home / ".boto").write_text("[GSUtil]\nuse_gcloud_storage = True\n")

    @property
    def port(self) -> str:
        """Where the workers listen; all on the same port of addresses of their own."""
        config = self.cloud.state / "ssh_config"
        found = re.search(r"Port (\d+)", config.read_text()) if config.exists() else None
        return found[1] if found else "2222"

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        quiet = {"CLOUDSDK_CORE_DISABLE_PROMPTS": "1", "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "1"}
        mine = {"CLOUDSDK_CONFIG": str(self.home / "gcloud"), "CLOUDSDK_CORE_ACCOUNT": "me@example.com"}
        places = {"HOME": str(self.home), "TMP": str(self.home / "tmp"), "USER": "me", "LAPTOP": "127.0.0.0/8"}
        path = {"PATH": f"{self.home / 'bin'}:{os.environ['PATH']}", "BOTO_CONFIG": str(self.home / ".boto")}
        return {**path, **lifecycle.client_environment(self.cloud.state), **quiet, **mine, **places, **variables}

    def run(self, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command line in bash; its errors are among what it prints."""
        return subprocess.run(
            ["/bin/bash", "-c", command], env=self.environment(variables), cwd=self.home / "work", input="exit\n",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
        )  # fmt: skip


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedCloud]:
    """One emulated cloud for all tests of a file; only where there is a gcloud to speak to it."""
    if shutil.which("gcloud") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("gcloud or OpenSSH is not installed")
    made = EmulatedCloud(tmp_path_factory.mktemp("cloud") / "state")
    made.start("--operation-seconds=0")
    yield made
    run_localcloud("wipe", made.state)


def make_context(cloud: EmulatedCloud, folder: Path) -> Context:
    """The emulated cloud as the controller sees it; `folder` holds its keys."""
    endpoint, clock = cloud.endpoint, Clock()
    google = GoogleClient(Credentials(token=endpoint["token"]), clock, endpoint["roots"])
    login = Login(google, clock, "slipway-local", "slipway", folder)
    return Context("slipway-local", google, clock, Events(clock), folder, login, 0.02, cast(Any, None))


def desired_resources(*overrides: str) -> list[Resource]:
    """What pods share, and the pod without what is on its workers."""
    config = config_of("cloud=local", "program=command", *overrides)
    shared = list(shared_resources(config, bucket_name(config, "slipway-local")))
    return [*shared, node_resource(config, tuple(r.id for r in shared))]


def planned_actions(context: Context, *overrides: str) -> dict[str, str]:
    """What `plan` says would be done about each resource, by id."""
    return {row.resource.id: row.action for row in preview_resources(tuple(desired_resources(*overrides)), context)}
