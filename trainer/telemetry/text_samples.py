"""Text samples: the model periodically continues prompts for people to read."""

import jax
from jax.sharding import Mesh

from conf.schema.training.loop import TextSamples
from conf.schema.training.model import Model
from conf.schema.training.run_yaml import RunFileError
from conf.schema.training.sampling import MAX_DECODE_CHUNK
from trainer.data import batches
from trainer.models.weights import Params
from trainer.sampler import Sampler, SamplerSettings, StopCriteria


class TextSampler:
    """The prompts of `loop.text_samples`, and the sampler that continues them.

    Uses the same randomness each time, to make texts of one run comparable. Raises RunFileError if prompt and
    continuation exceed the model's context.
    """

    def __init__(self, settings: TextSamples, data: batches.Dataset, cfg: Model, mesh: Mesh, seed: int) -> None:
        self._settings = settings
        self._tokenizer, begin = data.tokenizer, data.bos_ids
        encoded = [[*begin, *ids.tolist()] for ids in self._tokenizer.encode(settings.prompts)]
        longest = max(len(ids) for ids in encoded)
        if longest + settings.max_new_tokens > cfg.max_seq_len:
            raise RunFileError(
                f"loop.text_samples.max_new_tokens: a prompt of {longest} tokens plus {settings.max_new_tokens} "
                f"exceeds model.max_seq_len, {cfg.max_seq_len}"
            )
        if not all(encoded):
            raise RunFileError("loop.text_samples.prompts: a prompt is empty; each needs at least one token")
        sizes = SamplerSettings(longest, settings.max_new_tokens, slots=len(encoded), chunk=MAX_DECODE_CHUNK)
        self._sampler = Sampler(cfg, sizes, mesh, StopCriteria(() if data.eos_id is None else (data.eos_id,)))
        self._prompts, self._key = encoded, jax.random.key(seed)

    def generate(self, params: Params) -> list[str]:
        """Return each prompt with its continuation, as Markdown. All processes must call it, and all get the same."""
        copy, temperature = self._sampler.load_params(params), self._settings.temperature
        drawn = self._sampler.generate(copy, self._prompts, 1, self._key, temperature)
        said = [self._tokenizer.decode(f.tokens.tolist()) for f in sorted(drawn, key=lambda found: found.row)]
        return [
            f"{prompt}**{text}**".replace("\n", "  \n")
            for prompt, text in zip(self._settings.prompts, said, strict=True)
        ]
