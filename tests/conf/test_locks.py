"""The locks are made for the Python that installs them, by the command at the top of their input."""

import re

import pytest

from tests.composed import config_of
from tests.paths import ROOT


@pytest.mark.parametrize("name", ["requirements", "wandb", "evals", "driver"])
def test_a_lock_is_made_for_the_python_of_pods_and_bastion(name: str) -> None:
    [command] = re.findall(r"^#   (uv pip compile .*)$", (ROOT / f"conf/{name}.in").read_text(), re.M)
    assert f"--python-version {config_of().env.python} " in command
    assert command.startswith(f"uv pip compile conf/{name}.in ")
    assert command.endswith(f"-o conf/{name}.txt")
    assert "--generate-hashes" in command
