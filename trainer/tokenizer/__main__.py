"""Train a tokenizer on the text of a data set, or convert nanochat's.

    python -m trainer.tokenizer train 'shards/*.parquet' --output FOLDER [--vocab 65536] [--column text]
    python -m trainer.tokenizer convert tokenizer.pkl --output FOLDER

Both write FOLDER/tokenizer.json, for `data.tokenizer`, and FOLDER/token_bytes.npy, how many bytes of text each token
stands for. Files that end in .parquet or .jsonl hold a document per row; any other file is one document of text.
Exit codes: 0 done, 2 bad arguments or data.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from etils import epath

from conf.formats import RunFileError
from trainer.corpus import files
from trainer.corpus.parquet import ParquetSource
from trainer.corpus.source import ByteRangeSource, DocumentSource, json_parser, text_parser
from trainer.tokenizer import loading, training

ROW_SUFFIXES = (".parquet", ".jsonl")
READ_BATCH_SIZE = 256
"""Documents in memory as text."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parser().parse_args(arguments)
    files.use_buckets()
    try:
        raw = options.make(options)
    except RunFileError as error:
        print(error, file=sys.stderr)
        return 2
    made = loading.parse_tokenizer(raw, "the tokenizer")
    folder = epath.Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(raw)
    with (folder / "token_bytes.npy").open("wb") as file:
        np.save(file, made.token_bytes())
    print(f"{folder / 'tokenizer.json'}: {made.vocab_size} tokens; set model.vocab_size to at least that")
    return 0


def _train(options: argparse.Namespace) -> bytes:
    longest = options.doc_chars if options.path.endswith(ROW_SUFFIXES) else options.max_chars
    documents = training.take_documents(_documents(options.path, options.column), options.max_chars, longest)
    return training.train_tokenizer(documents, options.vocab).to_str(pretty=True).encode()


def _convert(options: argparse.Namespace) -> bytes:
    try:
        raw = epath.Path(options.path).read_bytes()
    except OSError as error:
        raise RunFileError(f"{options.path}: cannot be read: {error.strerror or error}") from None
    return training.convert_nanochat(raw, options.path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.tokenizer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True, metavar="train|convert")
    convert = verbs.add_parser("convert", help="convert nanochat's tokenizer.pkl")
    convert.set_defaults(make=_convert)
    convert.add_argument("path", help="the file: a local path or gs://…; nothing in it is executed")
    train = verbs.add_parser("train", help="train a byte-pair encoding")
    train.set_defaults(make=_train)
    train.add_argument("path", help="data set: a local path or gs://…, with * and ** as wildcards")
    for verb in (train, convert):
        verb.add_argument("--output", required=True, help="folder for tokenizer.json and token_bytes.npy")
    size = "vocabulary size, special tokens included (default: 65536)"
    train.add_argument("--vocab", type=_parse_vocab_size, default=65_536, metavar="N", help=size)
    column = "column of .parquet and .jsonl files (default: text)"
    train.add_argument("--column", default="text", metavar="KEY", help=column)
    most = "characters to learn from, at most (default: 2000000000)"
    train.add_argument("--max-chars", type=int, default=2_000_000_000, metavar="N", help=most)
    most = "characters to use of each row, at most (default: 10000)"
    train.add_argument("--doc-chars", type=int, default=10_000, metavar="N", help=most)
    return parser


def _parse_vocab_size(word: str) -> int:
    if (size := int(word)) < training.MIN_VOCAB_SIZE:
        raise argparse.ArgumentTypeError(f"at least {training.MIN_VOCAB_SIZE}: the bytes and the special tokens")
    return size


def _documents(pattern: str, column: str) -> Iterator[str]:
    opened = _open_corpus(files.expand_glob(pattern, "path"), column)
    for number in range(len(opened)):
        group = opened.read(number)
        for start in range(0, len(group), READ_BATCH_SIZE):
            for row in group.take(range(start, min(start + READ_BATCH_SIZE, len(group)))):
                yield row[column]


def _open_corpus(found: list[str], column: str) -> DocumentSource:
    if found[0].endswith(".parquet"):
        return ParquetSource(found, (column,), "path", "--column")
    if found[0].endswith(".jsonl"):
        return ByteRangeSource(found, b"\n", json_parser((column,)), "path", "--column")
    return ByteRangeSource(found, b"", text_parser(column), "path")


if __name__ == "__main__":
    sys.exit(main())
