"""Rows of samples that share a prompt: computed together as by themselves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.model import Model
from tests.conftest import wide
from tests.groups import load_group as values
from trainer.losses import grpo
from trainer.models import weights
from trainer.models.shared_prompt import PromptGroup, prompt_group
from trainer.rl.programs import pad_sequences

GROUP = PromptGroup(group_size=3, prompt_length=7, response_length=9)
ROWS, WIDTH = 12, 16


@pytest.fixture(scope="module")
def loop() -> GrpoLoop:
    sizes = {"prompts_per_step": 4, "group_size": 3, "max_prompt_length": 7, "max_new_tokens": 9}
    return GrpoLoop(**values("loop/grpo") | sizes | {"kl_coef": 0.3, "temperature": 0.7})


@pytest.fixture(scope="module")
def batch() -> dict[str, jax.Array]:
    """Prompts and responses of all lengths, from one token to the longest."""
    random = np.random.default_rng(0)
    prompts = [prompt for size in (7, 1, 4, 6) for prompt in [random.integers(0, 512, size).tolist()] * 3]
    responses = [random.integers(0, 512, size).tolist() for size in (9, 1, 5, 9, 9, 2, 3, 9, 1, 8, 7, 9)]
    tokens, mask = pad_sequences(prompts, responses, WIDTH)
    fields = {name: random.normal(-6, 0.3, mask.shape).astype(np.float32) for name in grpo.TOKEN_FIELDS}
    fields |= {"advantage": random.normal(size=ROWS).astype(np.float32), "weight": np.ones(ROWS, np.float32)}
    return jax.tree.map(jnp.asarray, {"tokens": tokens, "mask": mask} | fields)


FAMILIES = {"gemma2": {}, "gpt2": values("model/family/gpt2"), "sinks": {"attention_sinks": True}}


@pytest.fixture(scope="module", params=["gemma2", "sinks", *wide("gpt2")])
def model(request: pytest.FixtureRequest) -> tuple[Model, weights.Params]:
    """With windows shorter than a response, soft-caps and rotary positions; with learned positions."""
    computed = {"sliding_window": 5, "activation_dtype": "float32", "remat": "full", "logit_chunk": 4}
    cfg = Model(**values("model/tiny") | FAMILIES[request.param] | computed)
    return cfg, jax.jit(weights.init_params, static_argnums=0)(cfg, jax.random.key(0))


def test_log_probabilities_and_entropies_are_those_of_rows_by_themselves(model, batch):
    """And their gradients."""
    cfg, params = model
    aims = np.random.default_rng(1).normal(size=(2, *batch["mask"].shape)) * batch["mask"]

    @partial(jax.jit, static_argnums=1)
    @partial(jax.value_and_grad, has_aux=True)
    def scored(params, group):
        found = jnp.stack(grpo.per_token_logps(params, cfg, batch, 0.7, group)) * batch["mask"]
        return (aims * found).sum(), found

    (_, together), slope = scored(params, GROUP)
    (_, apart), wanted = scored(params, None)
    np.testing.assert_allclose(together, apart, atol=2e-5)
    norm = float(optax.tree_utils.tree_norm(wanted))
    assert norm > 0.01
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * norm), slope, wanted)


def test_rows_stay_apart_where_nothing_is_gained(loop):
    cfg = Model(**values("model/tiny"))
    assert prompt_group(cfg, loop, WIDTH) == GROUP
    assert prompt_group(cfg, loop, width=9) is None  # a short bucket: the padding of prompt and responses is more
    assert prompt_group(cfg.model_copy(update={"attention": "splash"}), loop, WIDTH) is None
