"""Does the run fit the chips, as the TPU compiler said when `slipway fit` asked it?"""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema.config import Config
from conf.schema.training.model import Model
from controller.checks import fit_cache
from controller.core.finding import Finding

SMALL = 100_000_000
"""Weights of a model that fits in any case."""


def fits_the_chips(config: Config) -> Iterator[Finding]:
    """What does not fit fails minutes after the pod has been made; the compiler tells before, without a TPU."""
    model = config.model
    if config.program.kind != "trainer" or model is None or config.cloud.kind == "local":
        return
    stored = fit_cache.found(config)
    if stored is None and weights(model) > SMALL:
        yield Finding("fit", "note", "model", "nobody has asked yet whether it fits the chips: slipway fit")
    short = [program for program in stored["programs"] if not program["fits"]] if stored else []
    if stored and short:
        worst = max(short, key=lambda program: program["peak_gib"])
        fix = f"it fits with {found}" if (found := fit_cache.fix(config)) else "slipway fit tells more"
        words = (
            f"{worst['name']} needs {worst['peak_gib']:.2f} GiB of a chip and may use {stored['usable_gib']:.2f}; {fix}"
        )
        yield Finding("fit", "error", "model", words)


def weights(model: Model) -> int:
    """Roughly how many: the products and the tables."""
    attention = 2 * model.dim * model.head_dim * (model.num_heads + model.num_kv_heads)
    feed_forward = (3 if model.mlp in ("geglu", "swiglu") else 2) * model.dim * model.mlp_dim
    return model.num_layers * (attention + feed_forward) + model.vocab_size * model.dim * (
        1 if model.tie_word_embeddings else 2
    )


CHECKS = (fits_the_chips,)
