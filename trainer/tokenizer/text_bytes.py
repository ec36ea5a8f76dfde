"""How many bytes of text each token stands for, so that a loss can be told per byte; or why that cannot be told."""

from typing import NamedTuple

import numpy as np

from trainer.tokenizer.loading import LibraryTokenizer, Tokenizer

PROBES = (
    "word",
    "A LOUD word, and don't (x_1 += 0.5)",
    "two  spaces, a tab\t, lines\n\n\n  and an end ",
    "caf\u00e9 \u00bd \ufb01 \uff21 \u2026 \u65e5\u672c \U0001f642\u200b",
)
"""Texts that change in tokenizers that fold letters or accents, strip, join spaces, or lack characters.

None begins with a space. Canonical composition (NFC, as in Qwen) leaves all as they are, so bytes are those of the
composed text; composition by compatibility (NFKC) does not.
"""


class TextBytes(NamedTuple):
    """What is known of a tokenizer's tokens."""

    of_token: np.ndarray  # int32 [vocab]; 0: a special token
    own_space: bool  # whether the tokenizer puts a space before each text, which the first token then holds


def measure(tokenizer: Tokenizer) -> TextBytes | str:
    """Return the bytes of each token, or why they cannot be told, found by encoding texts whose bytes are known.

    A space of the tokenizer's own is found by any way to it: Metaspace, Prepend, add_prefix_space.
    """
    of_token = tokenizer.token_bytes()
    if not isinstance(tokenizer, LibraryTokenizer):
        return TextBytes(of_token, own_space=False)
    counted: set[int] = set()
    try:
        encoded = tokenizer.encode(PROBES)
    except Exception as error:  # the library raises plain Exception
        return f"the tokenizer cannot encode any text: {error}"
    for text, ids in zip(PROBES, encoded, strict=True):
        back = tokenizer.decode(ids.tolist())
        if back not in (text, f" {text}"):
            return f"the tokenizer makes {back!r} of {text!r}"
        counted.add(int(of_token[ids].sum()) - len(text.encode()))
    if counted not in ({0}, {1}):
        return "the bytes of its tokens are not those of the text"
    return TextBytes(of_token, own_space=counted == {1})
