"""Draw responses from the policy.

A prompt is computed once for all of its samples (`prefill`). Rows are decoded in slots, a chunk of tokens at a time
(`decode`); between chunks the host sees which have ended and gives their slots to the next rows (`engine`). The weights
are a copy, split so that no token gathers any of them (`placement`).

A row's tokens depend on the weights, its prompt, the key and its number alone: not on the rows beside it, nor on slots,
chunks, devices or processes.
"""

from trainer.sampler.engine import Completion, Sampler
from trainer.sampler.settings import SamplerSettings
from trainer.sampler.stops import StopCriteria

__all__ = ["Completion", "Sampler", "SamplerSettings", "StopCriteria"]
