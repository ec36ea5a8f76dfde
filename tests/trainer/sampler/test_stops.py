"""Where a text that ends a response is found."""

import pytest

from trainer.sampler import StopCriteria
from trainer.tokenizer.byte_level import decode, encode

STOPS = StopCriteria((7,), ("\n\n\n", "Question:"), decode)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("4\n\n\n\n\n", "4\n\n\n"),
        ("so 4. Question: 5?\n\n\n", "so 4. Question:"),
        ("é\n\n\nx", "é\n\n\n"),
    ],
)
@pytest.mark.parametrize("seen", [0, 1])
def test_a_response_ends_with_the_token_that_completes_the_first_text(text, kept, seen):
    assert STOPS.find_end(encode(text), seen) == len(encode(kept))


def test_texts_that_are_not_there_end_nothing():
    assert STOPS.find_end(encode("4\n\nmore"), 0) is None
    assert StopCriteria((7,)).find_end([1, 7], 0) is None  # tokens are seen by the devices


def test_tokens_of_many_characters_are_kept_whole():
    words = {1: "a\n", 2: "\n\nb"}
    stops = StopCriteria((), ("\n\n\n",), lambda ids: "".join(words[i] for i in ids))
    assert stops.find_end([1, 2, 1], 0) == 2
