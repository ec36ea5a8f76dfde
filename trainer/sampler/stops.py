"""What ends a response: tokens, which the devices see, and texts, which the host finds between chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopCriteria:
    """tokens: ids that end a response, as its last token. texts: it ends with the token that completes the first of
    them; `decode` gives the text of tokens."""

    tokens: tuple[int, ...]
    texts: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None

    def end(self, tokens: Sequence[int], seen: int) -> int | None:
        """How many of the tokens there are up to and with the first text that ends them; None: it is not there.

        seen: so many of the tokens are known to hold none.
        """
        if not self.texts or not self._stopped(tokens):
            return None
        least, most = seen, len(tokens)  # the shortest prefix that holds a text, by bisection
        while least + 1 < most:
            middle = (least + most) // 2
            least, most = (least, middle) if self._stopped(tokens[:middle]) else (middle, most)
        return most

    def _stopped(self, tokens: Sequence[int]) -> bool:
        assert self.decode is not None, "texts cannot be looked for without a tokenizer"
        said = self.decode(tokens)
        return any(text in said for text in self.texts)
