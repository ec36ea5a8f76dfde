"""No program that a loop compiles holds the logits of whole sequences: on no mesh, in no layout, in no direction."""

import math
import re

import jax
import pytest

from conf.schema.training.run_yaml import RunFile
from tests.conftest import deep
from tests.trainer.conftest import make_mesh
from trainer.fit import remat

ROWS, LENGTH, CHUNK = 16, 96, 8
VOCAB = 8 * 127
"""What has 127 as a factor of its size is an array over the vocabulary, or over a device's part of it, however it is
laid out or flattened: no other axis has it."""


@pytest.fixture(params=["lm", "grpo"])
def experiment(request: pytest.FixtureRequest) -> RunFile:
    raw, half = request.getfixturevalue(f"{request.param}_run"), LENGTH // 2
    sizes = {"total_batch_tokens": ROWS * LENGTH, "seq_len": LENGTH}
    if request.param == "grpo":
        sizes = {"prompts_per_step": ROWS // 2, "group_size": 2, "max_prompt_length": half, "max_new_tokens": half}
    model = raw["model"] | {"vocab_size": VOCAB, "logit_chunk": CHUNK, "scan_layers": True}
    return RunFile.model_validate(raw | {"model": model, "loop": raw["loop"] | sizes})


@pytest.mark.parametrize("sizes", [(2, 2, 2), *deep((8, 1, 1))])
def test_logits_exist_for_a_chunk_of_positions(experiment, sizes):
    """And every program compiles from its shapes."""
    devices = math.prod(sizes)
    mesh = make_mesh(*sizes)
    chunk = ROWS * CHUNK * VOCAB // devices
    table = VOCAB * experiment.model.dim  # and its gradient: with pure data parallelism whole on every device
    compiled = set()
    with jax.set_mesh(mesh):
        for program in remat.programs(experiment, mesh):
            if program.function is None or program.function in compiled:
                continue
            compiled.add(program.function)
            found = of_vocabulary(program.function.lower(*program.arguments).compile().as_text())
            if program.name in ("update", "warm_start", "logprob", "eval"):
                assert chunk in found, program.name  # the search sees what it should
            assert max(found, default=0) <= max(chunk, table) < ROWS * LENGTH * VOCAB // devices, program.name


def of_vocabulary(hlo: str) -> set[int]:
    """Sizes of all arrays over the vocabulary in an optimized program."""
    sizes = {math.prod(int(n) for n in shape.split(",")) for shape in re.findall(r"\b\w*\d+\[([\d,]+)\]", hlo)}
    return {size for size in sizes if size % (VOCAB // 8) == 0}
