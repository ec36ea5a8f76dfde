"""Draw responses from the policy.

A prompt is computed once for all of its samples. Rows are decoded in slots, a chunk of tokens at a time
(`decode`); between chunks the host collects finished rows and gives their slots to waiting ones (`engine`). The weights
are a copy, sharded so that no token has to gather them (`programs`).

A row's tokens depend only on the weights, its prompt, the key and its number: not on other rows, slots, chunks, devices
or processes.
"""

from trainer.sampler.engine import Completion, LogitsError, Sampler
from trainer.sampler.settings import Distribution, SamplerSettings, StopCriteria

__all__ = ["Completion", "Distribution", "LogitsError", "Sampler", "SamplerSettings", "StopCriteria"]
