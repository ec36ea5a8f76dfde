"""Stop criteria of responses: tokens, checked on the devices, and texts, which the host finds between chunks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopCriteria:
    """Stop criteria; `decode` maps tokens to text.

    token_ids: they end a response as its last token. strings: the token that completes any of them ends the response.
    """

    token_ids: tuple[int, ...]
    strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None

    def find_end(self, tokens: Sequence[int], seen: int) -> int | None:
        """Return how many tokens to keep, including the first stop text, or None if there is none.

        seen: this many tokens are known to contain no stop text.
        """
        if not self.strings or not self._contains_stop(tokens):
            return None
        least, most = seen, len(tokens)  # bisect for the shortest prefix that contains a text
        while least + 1 < most:
            middle = (least + most) // 2
            least, most = (least, middle) if self._contains_stop(tokens[:middle]) else (middle, most)
        return most

    def _contains_stop(self, tokens: Sequence[int]) -> bool:
        assert self.decode is not None, "texts cannot be looked for without a tokenizer"
        said = self.decode(tokens)
        return any(text in said for text in self.strings)
