"""Memory: the run fits the chips, according to the TPU compiler in `slipway fit`."""

from collections.abc import Iterator

from conf.schema.config import Config
from conf.schema.training.model import Model
from controller.checks import fit_cache
from controller.core.finding import Issue, check

SMALL_MODEL_PARAMS = 100_000_000
"""Models up to this size always fit."""


@check("fit", "error", "model", also="note")
def fits_the_chips(config: Config) -> Iterator[Issue]:
    """A program that does not fit fails minutes after the pod is created. The compiler can tell without a TPU."""
    model = config.model
    if config.program.kind != "trainer" or model is None or config.cloud.kind == "local":
        return
    stored = fit_cache.load(config)
    if stored is None and estimate_num_params(model) > SMALL_MODEL_PARAMS:
        yield Issue("memory use is unknown; run `slipway fit` to check that it fits the chips", severity="note")
    short = [program for program in stored["programs"] if not program["fits"]] if stored else []
    if stored and short:
        worst = max(short, key=lambda program: program["peak_gib"])
        fix = f"it fits with {found}" if (found := fit_cache.suggested_overrides(config)) else "see `slipway fit`"
        yield Issue(
            f"{worst['name']} needs {worst['peak_gib']:.2f} GiB per chip (usable: {stored['usable_gib']:.2f}); {fix}"
        )


def estimate_num_params(model: Model) -> int:
    """Return the approximate number of parameters: the matrices and the embedding tables."""
    attention = 2 * model.dim * model.head_dim * (model.num_heads + model.num_kv_heads)
    feed_forward = (3 if model.mlp in ("geglu", "swiglu") else 2) * model.dim * model.mlp_dim
    tables = model.vocab_size * model.dim * (1 if model.tie_word_embeddings else 2)
    return model.num_layers * (attention + feed_forward) + tables
