"""What is compiled: no weight is gathered for a token, no logits but a token's, caches of local layers hold windows."""

import math
import re

import jax
import pytest

from conf.schema.training.model import Model
from conf.schema.training.settings import Mesh
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from trainer.models import weights
from trainer.sampler import SamplerSettings, decode, placement
from trainer.sampler.programs import SamplerPrograms

SLOTS, PROMPT, RESPONSE = 16, 24, 40
VOCAB = 2 * 127
"""What has 127 as a factor is the vocabulary, or a device's part of it."""


def model_of(**changes: object) -> Model:
    sizes = {"dim": 40, "mlp_dim": 88, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12, "sliding_window": 5}
    return Model(**load_group("model/tiny") | sizes | {"vocab_size": VOCAB} | changes)


@pytest.fixture(scope="module", params=[1, 2])
def compiled(request: pytest.FixtureRequest) -> tuple[int, str]:
    """The decoding program on eight devices, over which the trainer splits all weights; by the sampler's `tensor`."""
    mesh = Mesh(data=-1, fsdp=1, tensor=request.param)
    settings = SamplerSettings(PROMPT, RESPONSE, SLOTS, chunk=8, dtype="float32", mesh=mesh)
    programs = SamplerPrograms(model_of(), settings, make_mesh(1, 8, 1), ends=(1,))
    function, arguments = next(f for name, *f, _ in programs.list_programs(samples=4) if name == "decode")
    return request.param, function.lower(*arguments).compile().as_text()


def shapes_of(hlo: str) -> set[tuple[int, ...]]:
    return {tuple(map(int, shape.split(","))) for shape in re.findall(r"\b\w*\d+\[([\d,]+)\]", hlo)}


def test_no_token_gathers_weights(compiled):
    """What is gathered at all is smaller than a device's part of any matrix."""
    tensor, hlo = compiled
    table = jax.tree.leaves(weights.weight_table(model_of())["layers"])
    least = min(math.prod(w.shape[1:]) for w in table if len(w.shape) > 2) // tensor
    gathers = [m[1] for m in re.finditer(r" = (.*?) all-gather(?:-start)?\(", hlo)]
    assert gathers  # the chunk's tokens, which every process is told
    assert max(math.prod(shape) for found in gathers for shape in shapes_of(found)) < least, gathers
    assert ("all-reduce" in hlo) == (tensor > 1)  # devices that hold all weights do not wait for each other


def test_logits_are_those_of_one_token_of_each_row(compiled):
    tensor, hlo = compiled
    rows = SLOTS // (8 // tensor)
    over_vocabulary = {shape for shape in shapes_of(hlo) if any(size % 127 == 0 for size in shape)}
    table = VOCAB * model_of().dim
    assert max(math.prod(shape) for shape in over_vocabulary) <= max(table, rows * VOCAB)
    assert {shape for shape in over_vocabulary if rows in shape}


def test_each_length_of_the_cache_has_programs_and_the_longest_decides_what_fits():
    settings = SamplerSettings(512, 1024, SLOTS, chunk=64)
    programs = SamplerPrograms(model_of(), settings, make_mesh(1, 1, 1), ends=(1,))
    found = {name: arguments for name, _, arguments, _ in programs.list_programs(samples=4)}
    of_each = {f"{name}{length}" for name in ("admit", "decode") for length in ("", "_768", "_384")}
    pairs = [(384, 768), (768, 1536)]
    resizes = {f"resize_{old}_to_{new}" for one, other in pairs for old, new in ((one, other), (other, one))}
    assert found.keys() == {"prefill", *of_each, *resizes}
    assert [found[name][1].cache.values[1].shape[2] for name in ("decode_768", "decode")] == [768, 1536]
    most = {name for name, *_ in programs.list_programs(samples=4, longest_only=True)}
    assert most == {"prefill", "admit", "decode", "resize_768_to_1536"}


def test_local_layers_hold_their_window_only():
    cfg = model_of(num_layers=3, attention_pattern="LLG")
    slots = jax.eval_shape(lambda: decode.init_slots(cfg, SLOTS, PROMPT + RESPONSE))
    assert [ring.shape for ring in slots.cache.values] == [(SLOTS, 2, n, 12) for n in (5, 5, 64)]


@pytest.mark.parametrize(("model", "tensor"), [("gemma2_2b", 4), ("gemma2_9b", 8), ("gemma3_1b", 1), ("tiny", 1)])
def test_the_mesh_is_derived_from_weights_and_heads(model, tensor):
    """As large as makes the copy small, as the key heads allow; gemma3_1b has one."""
    settings = SamplerSettings(PROMPT, RESPONSE, SLOTS, chunk=8)
    found = placement.sampler_mesh(Model(**load_group(f"model/{model}")), settings, make_mesh(1, 8, 1))
    assert dict(found.shape) == {"data": 8 // tensor, "fsdp": 1, "tensor": tensor}
