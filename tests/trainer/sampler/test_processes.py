"""One, two and four processes draw the same responses, and are all told the same of them."""

import numpy as np
import pytest

from tests.trainer.processes import start_processes, wait_processes
from tests.trainer.sampler import processes


@pytest.fixture(scope="module")
def alone() -> dict[str, np.ndarray]:
    return processes.sample_responses()


def test_rows_end_at_different_times(alone):
    assert sorted(alone["rows"]) == list(range(15))
    assert sorted(alone["rows"]) != alone["rows"].tolist()


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.deep)])
def test_the_same_responses_in_several_processes(alone, tmp_path, compile_cache, count):
    module = ["tests.trainer.sampler.processes", str(count), str(tmp_path / "result.npz")]
    own = [{"JAX_NUM_CPU_DEVICES": str(8 // count)}] * count
    for ended in wait_processes(start_processes(module, tmp_path, compile_cache, *own)):
        assert ended.exit_code == 0, ended.stderr
    for process in range(count):
        with np.load(tmp_path / f"result-{process}.npz") as found:
            np.testing.assert_array_equal(found["rows"], alone["rows"])
            np.testing.assert_array_equal(found["tokens"], alone["tokens"])
            np.testing.assert_allclose(found["logprobs"], alone["logprobs"], rtol=0, atol=1e-5)
