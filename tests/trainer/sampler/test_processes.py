"""One process and two draw the same responses, and both are told the same of them."""

import numpy as np
import pytest

from tests.trainer.processes import start_processes, wait_processes
from tests.trainer.sampler import processes


@pytest.mark.deep
def test_the_same_responses_in_several_processes(tmp_path, compile_cache):
    module = ["tests.trainer.sampler.processes", "2", str(tmp_path / "result.npz")]
    started = start_processes(module, tmp_path, compile_cache, *[{"JAX_NUM_CPU_DEVICES": "4"}] * 2)
    alone = processes.sample_responses()
    assert sorted(alone["rows"]) == list(range(15))
    assert sorted(alone["rows"]) != alone["rows"].tolist(), "rows end at different times"
    for ended in wait_processes(started):
        assert ended.exit_code == 0, ended.stderr
    for process in range(2):
        with np.load(tmp_path / f"result-{process}.npz") as found:
            np.testing.assert_array_equal(found["rows"], alone["rows"])
            np.testing.assert_array_equal(found["tokens"], alone["tokens"])
            np.testing.assert_allclose(found["logprobs"], alone["logprobs"], rtol=0, atol=1e-5)
