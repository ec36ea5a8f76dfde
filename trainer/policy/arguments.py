"""Command-line arguments that `trainer.generate` and `trainer.chat` share."""

import argparse
from dataclasses import replace

from etils import epath

from trainer.corpus import files
from trainer.policy.policy import Policy, Sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder of weights and how to draw responses."""
    parser.add_argument("folder", type=epath.Path, help="RUN/checkpoints/STEP, or a folder of exported weights")
    parser.add_argument("--temperature", type=_temperature, metavar="T", help="0: greedy (default: the run's, or 1)")
    parser.add_argument("--top-k", type=count, help="sample from the K likeliest tokens", metavar="K")
    parser.add_argument("--top-p", type=_share, help="sample from the likeliest tokens of probability P", metavar="P")
    parser.add_argument(
        "--max-new-tokens", type=count, metavar="N", help="tokens of a response (default: the run's, or 256)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the samples (default: 0)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="dtype to compute in (default: the run's)")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json, if the folder has none")


def load_policy(options: argparse.Namespace) -> tuple[Policy, Sampling]:
    """Return the policy and how to draw its responses. Raises RunFileError."""
    files.use_buckets()
    policy = Policy(options.folder, tokenizer=options.tokenizer, dtype=options.dtype)
    named = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "max_new_tokens", "seed")}
    given = {name: value for name, value in named.items() if value is not None}
    return policy, replace(policy.default_sampling(), **given)


def _temperature(word: str) -> float:
    if (value := float(word)) < 0:
        raise argparse.ArgumentTypeError(f"{word} is below 0")
    return value


def count(word: str) -> int:
    """Parse a number that is at least 1."""
    if (value := int(word)) < 1:
        raise argparse.ArgumentTypeError(f"{word} is below 1")
    return value


def _share(word: str) -> float:
    if not 0 < (value := float(word)) <= 1:
        raise argparse.ArgumentTypeError(f"{word} is not above 0 and at most 1")
    return value
