"""The recursive model: its parameters, its config errors."""

from typing import Any

import jax
import numpy as np
import pytest
from pydantic import ValidationError

from conf.schema.training.loop_parts import Trm
from tests.groups import load_group
from trainer.models import trm, weights


def make_trm(**changes: Any) -> Trm:
    """Of 4x4 puzzles, tiny and in float32."""
    tiny = {"vocab_size": 6, "seq_len": 16, "puzzle_len": 2, "dim": 16, "num_heads": 2, "h_cycles": 2, "l_cycles": 2}
    tiny |= {"activation_dtype": "float32", "remat": "none"}
    return Trm.model_validate(load_group("model/trm") | tiny | changes)


def test_parameters_and_flops_are_those_of_the_paper() -> None:
    published = Trm.model_validate(load_group("model/trm"))
    attention = published.model_copy(update={"mixer": "attention", "position_embedding": "rope"})
    assert weights.num_params(published) == 5_028_866
    assert weights.num_params(attention) == 6_828_034
    assert published.update_flops == pytest.approx(42.7e9, rel=1e-3)


def test_initial_weights_have_their_variance() -> None:
    params = jax.jit(weights.init_params, static_argnums=0)(make_trm(dim=256, num_heads=4), jax.random.key(0))
    layers = params["layers"]
    for x in (params["embedding"], layers["up"], layers["mixer_down"], layers["gate"]):
        assert float(np.std(x)) == pytest.approx(256**-0.5, rel=0.05)
        assert float(np.abs(x).max()) <= 2.28 * 256**-0.5
    assert float(np.std(params["initial_h"])) == pytest.approx(1, rel=0.2)
    assert not params["halt"].any()
    assert not params["puzzle_embedding"].any()
    np.testing.assert_array_equal(params["halt_bias"], -5)


@pytest.mark.parametrize("axis", [0, -1])
def test_the_blocks_own_gradients_are_those_of_jax(axis: int) -> None:
    keys, (inputs, inner) = jax.random.split(jax.random.key(2), 5), ((5, 24) if axis == 0 else (7, 4))
    z = jax.random.normal(keys[0], (5, 3, 7))
    gate, up = (jax.random.normal(key, (inputs, inner)) for key in keys[1:3])
    down = jax.random.normal(keys[3], (inner, inputs))
    wanted = jax.random.normal(keys[4], z.shape)

    def plain(z: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        x = z.swapaxes(axis, -1)
        x += (jax.nn.silu(x @ gate) * (x @ up)) @ down
        return (x / jax.numpy.sqrt((x * x).mean(-1, keepdims=True) + 0.1)).swapaxes(axis, -1)

    def own(z: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return trm.feed_forward(z, gate, up, down, axis, 0.1)

    def with_gradients(block: Any) -> Any:
        out, gradient = jax.vjp(block, z, gate, up, down)
        return out, *gradient(wanted)

    for theirs, ours in zip(*(jax.jit(with_gradients, static_argnums=0)(one) for one in (plain, own)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mixer": "attention", "dim": 18}, r"dim \(18\) must be a multiple of 2 num_heads \(4\)"),
        ({"position_embedding": "rope"}, r"rope needs mixer=attention"),
        ({"puzzle_dim": 33}, r"puzzle_dim \(33\) exceeds puzzle_len dim \(32\)"),
        ({"h_cycles": 0}, "greater than or equal to 1"),
    ],
)
def test_shapes_that_do_not_fit_are_config_errors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        make_trm(**changes)
