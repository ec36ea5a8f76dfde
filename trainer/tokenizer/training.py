"""Byte-pair encoding, trained on documents: GPT-4's split, with numbers of at most two digits, as nanochat has it.

https://arxiv.org/abs/1508.07909; the split: https://github.com/openai/tiktoken, cl100k_base.
"""

from collections.abc import Iterable, Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = (
    "<|bos|>",
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
)
"""nanochat's special tokens, which get the last ids."""

MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
"""One id per byte and special token."""


def train_tokenizer(documents: Iterable[str], vocab: int) -> Tokenizer:
    """Train a byte-level BPE with `vocab` ids (265 or more), or fewer if the documents have too few pairs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # makes any byte encodable
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def take_documents(documents: Iterable[str], characters: int, longest: int) -> Iterator[str]:
    """Yield documents, each cut after `longest` characters, up to `characters` in total."""
    left = characters
    for document in documents:
        if left <= 0:
            return
        piece = document[: min(longest, left)]
        left -= len(piece)
        yield piece
