"""Routes that are replayed: the experts that the sampler took, shares and gradients of the router that learns."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conf.schema.training.loop import GrpoLoop
from conf.schema.training.model import Model
from conf.schema.training.settings import Mesh
from tests.conftest import wide
from tests.groups import load_group
from tests.trainer.conftest import make_mesh
from tests.trainer.models.reference_models import described, expected_of, params_of
from trainer.losses import grpo
from trainer.models import experts, routes, weights
from trainer.models.routes import Replay
from trainer.rl.programs import ROUTES, pad_sequences
from trainer.rl.rollouts import _pad_routes
from trainer.sampler import Completion, Sampler, SamplerSettings, StopCriteria
from trainer.sampler import settings as sampler_settings
from trainer.step import train_step

FAMILY = "qwen3_moe"
GROUP, PROMPT, RESPONSE = 2, 5, 6


def random_routes(cfg: Model, *shape: int) -> np.ndarray:
    """Different experts for each token and layer, whatever its router says: [*shape, layers, per_token]."""
    assert cfg.experts is not None
    random = np.random.default_rng(3).random((*shape, cfg.num_layers, cfg.experts.count))
    return random.argsort(axis=-1)[..., : cfg.experts.per_token].astype(np.uint8)


def one_layer(params: weights.Params) -> weights.Params:
    return {name: weight[0] for name, weight in params["layers"].items() if name in ("router", *experts.MATRICES)}


@pytest.mark.parametrize("is_divided", [True, False])
def test_given_experts_are_taken_and_router_and_experts_learn_as_in_plain_products(is_divided):
    """All experts of all tokens are computed, and those given are weighed; one token has its router's own."""
    cfg = described(FAMILY)
    assert cfg.experts is not None
    cfg = cfg.model_copy(update={"experts": cfg.experts.model_copy(update={"norm_topk_prob": is_divided})})
    x, aim = np.random.default_rng(0).normal(size=(2, 2, 5, cfg.dim)).astype(np.float32)
    own, given = one_layer(params_of(FAMILY)), random_routes(cfg, 2, 5).astype(np.int16)
    given[0, 0] = -1
    likeliest = np.argsort(-(x @ np.asarray(own["router"])), axis=-1)[..., : cfg.experts.per_token]
    chosen = np.where(given[:, :, 1] < 0, likeliest, given[:, :, 1])

    @jax.jit
    def computed(x: jax.Array, own: weights.Params) -> tuple[jax.Array, jax.Array]:
        changed: list[Any] = []
        choose = Replay(jnp.asarray(given.reshape(2, 5, -1))).choose(jnp.int32(1), changed)
        return experts.feed_forward(x, own, cfg, choose=choose)[0], changed[0]

    def plain(x: jax.Array, own: weights.Params) -> jax.Array:
        logits = x @ own["router"]
        if is_divided:
            shares = jax.nn.softmax(jnp.take_along_axis(logits, chosen, axis=-1))
        else:
            shares = jnp.take_along_axis(jax.nn.softmax(logits), chosen, axis=-1)
        gate, up = (jnp.einsum("btd,edh->bteh", x, own[f"expert_{name}"]) for name in ("gate", "up"))
        every = jnp.einsum("bteh,ehd->bted", jax.nn.silu(gate) * up, own["expert_down"])
        return (jnp.take_along_axis(every, chosen[..., None], axis=2) * shares[..., None]).sum(axis=2)

    found, pull, changed = jax.vjp(computed, x, own, has_aux=True)
    wanted, pull_plain = jax.vjp(plain, x, own)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    pairs = zip(chosen.reshape(10, -1), likeliest.reshape(10, -1), strict=True)
    assert float(changed) == sum(len({*ours} - {*alone}) for ours, alone in pairs)
    for (path, slope), like in zip(jax.tree.leaves_with_path(pull(aim)), jax.tree.leaves(pull_plain(aim)), strict=True):
        np.testing.assert_allclose(slope, like, rtol=0, atol=2e-5 * np.abs(like).max(), err_msg=str(path))
        assert np.abs(like).max() > 1e-3


def loop(**changes: object) -> GrpoLoop:
    sizes = {"prompts_per_step": 4, "group_size": GROUP, "max_prompt_length": PROMPT, "max_new_tokens": RESPONSE}
    return GrpoLoop(**load_group("loop/grpo") | sizes | {"replay_routes": True, "kl_coef": 0.3} | changes)


def batch_of(cfg: Model) -> dict[str, np.ndarray]:
    """Four prompts of two responses each; the samples of a prompt share its routes."""
    random = np.random.default_rng(0)
    prompts = [one for size in (5, 1, 3, 4) for one in [random.integers(0, 64, size).tolist()] * GROUP]
    responses = [random.integers(0, 64, size).tolist() for size in (6, 1, 5, 3, 6, 2, 4, 6)]
    tokens, mask = pad_sequences(prompts, responses, PROMPT + RESPONSE)
    fields = {name: random.normal(-4, 0.3, mask.shape).astype(np.float32) for name in grpo.TOKEN_FIELDS}
    fields |= {"advantage": random.normal(size=8).astype(np.float32), "weight": np.ones(8, np.float32)}
    taken = random_routes(cfg, 8, PROMPT + RESPONSE)
    for row, prompt in enumerate(prompts):
        taken[row, : len(prompt)] = taken[row // GROUP * GROUP, : len(prompt)]
    return {"tokens": tokens, "mask": mask, ROUTES: taken.reshape(*tokens.shape, -1)} | fields


BATCH = ("data", "fsdp", "expert")
MESHES = [(4, 1, 1), (1, 2, 1, 2), *wide((1, 2, 2), (1, 1, 2, 2), (2, 1, 1, 2))]


@pytest.mark.parametrize("family", [FAMILY, *wide("gpt_oss")])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize(
    ("grouped", "how"),
    [(True, {"scan_layers": True, "remat": "products"}), (False, {"scan_layers": False, "remat": "full"})],
)
def test_an_update_with_routes_is_the_same_on_any_mesh_packed_or_not(family, sizes, grouped, how):
    batch = batch_of(described(family))

    def gradient(grouped: bool, how: dict[str, Any], *sizes: int) -> Any:
        cfg, mesh = described(family, logit_chunk=7, **how), make_mesh(*sizes)
        placed = jax.device_put(params_of(family), weights.param_shardings(cfg, mesh))
        with jax.set_mesh(mesh):
            mean = train_step.mean_gradient(
                train_step.without_carry(grpo.loss(cfg, loop(), grouped=grouped)), cfg, mesh
            )
            rows = jax.device_put(batch, jax.NamedSharding(mesh, jax.P(BATCH)))
            return jax.jit(mean)(placed, rows, None)[:2]

    gradients, metrics = gradient(grouped, how, *sizes)
    wanted, told = gradient(False, {"scan_layers": False, "remat": "none"}, 1, 1, 1)
    norm = np.sqrt(sum(np.vdot(g, g) for g in jax.tree.leaves(wanted)))
    for (path, found), one in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(found, one, rtol=0, atol=4e-6 * norm, err_msg=str(path))
    assert np.abs(wanted["layers"]["router"]).max() > 1e-4
    assert float(metrics["loss"]) == pytest.approx(float(told["loss"]), rel=1e-5)
    alike = told if not grouped else gradient(True, how, 1, 1, 1)[1]  # a packed prompt counts once
    assert float(metrics["routes_changed"]) == pytest.approx(float(alike["routes_changed"]))
    assert 0.3 < float(metrics["routes_changed"]) < 0.9


def drawn(cfg: Model, mesh: Mesh | None, monkeypatch: pytest.MonkeyPatch, **how: object) -> list[Completion]:
    """Three responses to each of eight prompts, in slots that are used again and grow."""
    monkeypatch.setattr(sampler_settings, "LANES", 8)
    monkeypatch.setattr(sampler_settings, "MIN_CACHE_LENGTH", 16)
    monkeypatch.setattr(sampler_settings, "MIN_BUCKET", 4)
    settings = SamplerSettings(14, 15, slots=4, chunk=4, dtype="float32", mesh=mesh, returns_routes=True)
    assert len(settings.cache_lengths(14)) > 1
    sampler = Sampler(cfg, settings, make_mesh(2, 1, 2), StopCriteria((7,)))
    found = list(sampler.generate(sampler.load_params(params_of(FAMILY)), prompts(), 3, jax.random.key(0), 1.0))
    return sorted(found, key=lambda one: one.row)


def prompts() -> list[list[int]]:
    expected = expected_of(FAMILY)
    rows = zip(expected["prompts"], expected["prompt_lengths"], strict=True)
    return [row[:length].tolist() for row, length in rows]


def replayed(found: list[Completion]) -> dict[str, jax.Array]:
    """A batch of the samples: tokens, mask, routes and the sampler's log-probabilities."""
    asked = [prompts()[one.row // 3] for one in found]
    tokens, mask = pad_sequences(asked, [one.tokens.tolist() for one in found], 29)
    logprobs = np.zeros(mask.shape, np.float32)
    logprobs[mask == 1] = np.concatenate([one.logprobs for one in found])
    taken = _pad_routes([one.routes for one in found if one.routes is not None], 29)
    batch = {"tokens": tokens, "mask": mask, ROUTES: taken, "sampler": logprobs}
    return jax.tree.map(jnp.asarray, batch)


@pytest.mark.parametrize(
    "mesh", [None, Mesh(data=1, fsdp=1, tensor=2, expert=2), *wide(Mesh(data=4, fsdp=1, tensor=1))]
)
def test_the_sampler_tells_the_experts_of_every_token(mesh, monkeypatch):
    """In float32 the trainer would choose the same, and has the same log-probabilities."""
    cfg = described(FAMILY, remat="none")
    assert cfg.experts is not None
    found = drawn(cfg, mesh, monkeypatch)
    for one in found:
        assert one.routes is not None
        rows = len(prompts()[one.row // 3]) + len(one.tokens)
        assert (one.routes.shape, one.routes.dtype) == ((rows, cfg.num_layers, cfg.experts.per_token), np.uint8)
    batch = replayed(found)
    replay = Replay.of(batch)
    assert replay is not None
    whole = sum(len(one.routes) - 1 for one in found if one.routes is not None)  # nothing depends on the last token
    assert float(replay.known) == whole * routes.per_row(cfg)
    logprobs, _ = grpo.per_token_logps(params_of(FAMILY), cfg, batch, 1.0, None, replay)
    assert float(replay.changed) == 0
    np.testing.assert_allclose(logprobs * batch["mask"], batch["sampler"], rtol=0, atol=2e-5)
    every = Replay(jnp.pad(batch[ROUTES].astype(jnp.int16), ((0, 0), (0, 1), (0, 0))))
    lengths = np.array([len(one.routes) for one in found if one.routes is not None])
    every.routes = jnp.where(jnp.arange(30)[None, :, None] < lengths[:, None, None], every.routes, -1)
    tokens = {"tokens": jnp.pad(batch["tokens"], ((0, 0), (0, 1)))}
    grpo.per_token_logps(params_of(FAMILY), cfg, tokens, 1.0, None, every)
    assert float(every.changed) == 0, "those of the last tokens"


def test_a_router_that_has_moved_changes_no_choice_but_shares(monkeypatch):
    """A little noise decides near ties otherwise; as many as the metric says, in the experts that are computed."""
    cfg = described(FAMILY, remat="none", scan_layers=False)
    batch, params = replayed(drawn(cfg, None, monkeypatch)), params_of(FAMILY)
    router = params["layers"]["router"]
    noise = 0.02 * router.std() * jax.random.normal(jax.random.key(1), router.shape)
    moved = params | {"layers": params["layers"] | {"router": router + noise}}
    computed, seen = experts._computed, list[np.ndarray]()

    def spied(rows: jax.Array, chosen: jax.Array, *others: Any, **sizes: Any) -> jax.Array:
        seen.append(np.asarray(chosen))
        return computed(rows, chosen, *others, **sizes)

    monkeypatch.setattr(experts, "_computed", spied)
    needed = np.asarray(Replay.of(batch).routes[..., 0] >= 0).reshape(-1)  # pyright: ignore[reportOptionalMemberAccess]
    recorded = np.asarray(batch[ROUTES]).reshape(len(needed), cfg.num_layers, -1)[needed]

    def choices(replay: Replay | None) -> tuple[int, np.ndarray]:
        """How many recorded experts were not taken; the log-probabilities."""
        seen.clear()
        logprobs, _ = grpo.per_token_logps(moved, cfg, batch, 1.0, None, replay)
        taken = np.stack(seen, axis=1)[needed]
        return int((~(recorded[..., None] == taken[:, :, None]).any(axis=3)).sum()), np.asarray(logprobs)

    replay = Replay.of(batch)
    assert replay is not None
    with_replay, close = choices(replay)
    without, far = choices(None)
    assert with_replay == 0 < without < 0.05 * recorded.size
    assert 0 < float(replay.changed) < 2 * without
    apart = [np.abs((one - batch["sampler"]) * batch["mask"]).max() for one in (close, far)]
    assert 1e-6 < 2 * apart[0] < apart[1]


def test_ids_have_the_smallest_type_that_holds_them():
    cfg = described(FAMILY)
    assert cfg.experts is not None
    types = {
        count: routes.dtype(cfg.model_copy(update={"experts": cfg.experts.model_copy(update={"count": count})}))
        for count in (8, 256, 257, 4096)
    }
    assert types == {8: np.uint8, 256: np.uint8, 257: np.uint16, 4096: np.uint16}


def test_without_routes_nothing_of_them_is_compiled(monkeypatch):
    cfg, own = described(FAMILY), loop(replay_routes=False)
    batch = batch_of(cfg)
    texts = [
        jax.jit(grpo.loss(cfg, own)).lower(params_of(FAMILY), given).as_text()
        for given in (batch, {name: values for name, values in batch.items() if name != ROUTES})
    ]
    for returned in (True, False):
        settings = SamplerSettings(14, 15, slots=4, chunk=4, returns_routes=returned)
        programs = Sampler(cfg, settings, make_mesh(1, 1, 1), StopCriteria(())).programs
        texts += ["\n".join(f.lower(*given).as_text() for _, f, given, _ in programs.list_programs(2))]
    assert ["ui8" in text for text in texts] == [True, False, True, False]
