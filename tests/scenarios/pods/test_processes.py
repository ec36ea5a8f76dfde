"""JAX programs that call `jax.distributed.initialize()` without arguments, on VMs of both planes."""

import pytest

from tests.controller.conftest import SlipwayCli
from tests.planes import Plane

PROGRAM = "import jax; jax.distributed.initialize(); print('process', jax.process_index(), 'of', jax.process_count())"


@pytest.mark.e2e
@pytest.mark.deep
@pytest.mark.one_plane
def test_jax_finds_the_processes_of_a_pod(slipway: SlipwayCli, plane: Plane) -> None:
    words = [
        "program=command",
        f'program.command=[python,-c,"{PROGRAM}"]',
        "cloud.health_check=true",
        "cleanup.on_success=keep",
    ]
    words += plane.two
    code, out, err = slipway("up", *words)
    assert (code, err) == (0, "")
    assert "health check passed" in out
    assert [slipway.json("logs", "--worker", str(i), *words)["log"] for i in range(2)] == [
        f"process {i} of 2\n" for i in range(2)
    ]
